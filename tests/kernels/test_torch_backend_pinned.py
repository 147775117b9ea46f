"""Pinned host memory, and what happens where there is none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from octavo.kernels import torch_backend
from octavo.kernels.torch_backend import PinnedSend


@pytest.fixture
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nmore")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    torch_backend._warn.cache_clear()


def test_plain_memory_serves_where_none_can_be_pinned(no_pinning: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo"):
        made = [torch_backend.host_empty((2, 3), torch.int64) for _ in range(2)]
        copy = torch_backend.host_copy(torch.arange(4))
    assert [(tuple(m.shape), m.dtype, m.is_pinned()) for m in made] == [((2, 3), torch.int64, False)] * 2
    assert copy.tolist() == [0, 1, 2, 3]
    (record,) = caplog.records
    assert record.getMessage() == (
        "host memory cannot be pinned (CUDA error: OS call failed or operation not supported on this OS): plain memory "
        "is used, copies to and from the GPU are slower"
    )


def test_inputs_are_sent_and_blocks_swapped_without_pinned_memory(
    no_pinning: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(PinnedSend(torch.device("cuda"))._buffers) == 2
    cache = pytest.importorskip("octavo.kernels.triton.cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layers = cache.make_host_cache(2, 4, 16, 2, 8, torch.float32)
    assert len(layers) == 2 and not any(layer.key.any() for layer in layers)
