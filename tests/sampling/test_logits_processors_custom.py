"""User-given logits processors get tensors where torch is imported, and arrays of numpy where it is not."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from octavo.sampling.logits_processors import CustomProcessors, RowError

VOCAB = 8


@pytest.fixture(params=["torch", "numpy"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """What processors get."""
    if request.param == "torch":
        torch: Any = pytest.importorskip("torch")
        tensor: type = torch.Tensor
        return tensor
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return np.ndarray


def apply(*processors: Any) -> np.ndarray:
    logits = np.arange(VOCAB, dtype=np.float32)
    CustomProcessors([*processors], [1], VOCAB).apply(logits, np.array([1, 2], np.int32))
    return logits


def test_each_gets_its_kind_in_float32_whatever_the_one_before_returned(kind: type) -> None:
    seen = []

    def note(outputs: list[int], logits: Any) -> Any:
        seen.append((outputs, type(logits) is kind, str(logits.dtype).removeprefix("torch."), tuple(logits.shape)))
        return logits

    def doubled(outputs: list[int], logits: Any) -> Any:
        return np.asarray(logits, np.float64) * 2

    def whole(outputs: list[int], logits: Any) -> Any:
        return np.asarray(logits).astype(np.int64)[::-1]

    found = apply(note, doubled, note, whole, note)
    assert seen == [([2], True, "float32", (VOCAB,))] * 3
    assert found.tolist() == [14, 12, 10, 8, 6, 4, 2, 0]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (np.zeros(VOCAB, np.complex64), "TypeError"),
        (np.array(["a"] * VOCAB), "TypeError"),
        (np.zeros(3, np.float32), r"shape \[8\], not \[3\]"),
        ([0.0] * VOCAB, "array or tensor of logits, not list"),
        (None, "not NoneType"),
    ],
)
def test_what_are_no_logits_fails_its_row(kind: type, result: Any, says: str) -> None:
    with pytest.raises(RowError, match=says):
        apply(lambda outputs, logits: result)
