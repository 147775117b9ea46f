"""Low-rank products of adapters in plain torch, against float64; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError
from octavo.kernels.forward_batch import make_batch
from octavo.kernels.interface import LowRankPart, LowRankShape
from octavo.kernels.reference import ReferenceKernels
from tests.lora_cases import exact, make_adapter, random

OUTPUTS = [24, 7, 40]
SLOTS = [1, -1, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_rows_of_several_adapters(dtype: DType) -> None:
    kernels = ReferenceKernels()
    low_rank = kernels.adapters.make_low_rank(LowRankShape(48, tuple(OUTPUTS), 4, 16, dtype))
    adapters = [make_adapter(48, OUTPUTS, ranks, i) for i, ranks in enumerate([(8, 8, 8), (1, 0, 16), (3, 5, 0)])]
    for slot, adapter in enumerate(adapters):
        low_rank.place(slot, low_rank.pack(adapter))
    x, add = random(7, 48, seed=5), random(7, sum(OUTPUTS), seed=6)
    kernels.adapters.use(torch.tensor(SLOTS, dtype=torch.int32))
    added, bound = exact([*adapters, None], OUTPUTS, SLOTS, x, dtype)
    alone = low_rank(x)
    assert alone is not None and ((alone.double() - added).abs() <= bound).all()
    together = low_rank(x, add.clone())
    assert together is not None and ((together.double() - (added + add)).abs() <= bound).all()
    for row in (1, 5):  # no adapter, and a slot that holds none
        assert torch.equal(together[row], add[row])
        assert torch.equal(torch.signbit(alone[row]), torch.ones(sum(OUTPUTS), dtype=torch.bool))
    low_rank.place(1, None)
    assert torch.equal(low_rank(x, add.clone())[[0, 3]], add[[0, 3]])  # type: ignore[index]


def test_a_step_without_adapters_adds_nothing() -> None:
    kernels = ReferenceKernels()
    low_rank = kernels.adapters.make_low_rank(LowRankShape(8, (8,), 1, 8, DType.FLOAT32))
    low_rank.place(0, low_rank.pack(make_adapter(8, [8], [2], 0)))
    kernels.adapters.begin(make_batch([1, 1], [1, 1], np.zeros((2, 1)), 16, kernels))
    x, add = random(2, 8), random(2, 8, seed=1)
    assert low_rank(x) is None
    assert low_rank(x, add) is add


def test_a_step_names_the_rows_of_its_tokens_and_the_sampled_ones() -> None:
    kernels = ReferenceKernels()
    batch = make_batch([1, 3, 2], [1, 3, 2], np.zeros((3, 1)), 16, kernels, adapters=[-1, 1, 0])
    assert batch.has_adapters
    kernels.adapters.begin(batch)
    tokens, sampled = kernels.adapters.slots(), kernels.adapters.slots(sampled=True)
    assert tokens is not None and tokens.tolist() == [-1, 1, 1, 1, 0, 0]
    assert sampled is not None and sampled.tolist() == [-1, 1, 0]


def test_embeddings_of_several_adapters() -> None:
    kernels = ReferenceKernels()
    low_rank = kernels.adapters.make_low_rank_embedding(LowRankShape(20, (16,), 2, 8, DType.FLOAT32))
    adapters = [make_adapter(20, [16], [rank], rank)[0] for rank in (1, 8)]
    for slot, part in enumerate(adapters):
        assert part is not None
        low_rank.place(slot, low_rank.pack(part))
    kernels.adapters.use(torch.tensor([0, 1, -1, 1], dtype=torch.int32))
    ids, add = torch.tensor([105, 119, 103, 99]), random(4, 16)
    out = low_rank(ids, add.clone(), 100)
    for row, slot in ((0, 0), (1, 1)):
        part = adapters[slot]
        assert part is not None
        torch.testing.assert_close(out[row], add[row] + torch.from_numpy(part.up @ part.down[:, int(ids[row]) - 100]))
    assert torch.equal(out[2:], add[2:])  # no adapter, and an id of another rank


@pytest.mark.parametrize(
    ("down", "up", "message"),
    [
        ((4, 9), (8, 4), r"\[4, 9\] and \[8, 4\] do not fit a layer of 8 inputs and 8 outputs"),
        ((4, 8), (8, 5), r"must be \[rank, 8\] and \[8, rank\]"),
        ((17, 8), (8, 17), "rank 17 is not within 1 and max_lora_rank, 16"),
    ],
)
def test_matrices_that_do_not_fit(down: tuple[int, int], up: tuple[int, int], message: str) -> None:
    low_rank = ReferenceKernels().adapters.make_low_rank(LowRankShape(8, (8,), 1, 16, DType.FLOAT32))
    with pytest.raises(AdapterError, match=message):
        low_rank.pack([LowRankPart(np.zeros(down), np.zeros(up))])
