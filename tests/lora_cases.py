"""Low-rank products for tests: adapters made at random, and what they add to a row, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.interface import LowRankPart
from octavo.kernels.torch_backend import torch_dtype

Adapter = Sequence[LowRankPart | None]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_adapter(inputs: int, outputs: Sequence[int], ranks: Sequence[int], seed: int) -> list[LowRankPart | None]:
    """A part of rank 0 is absent."""
    parts: list[LowRankPart | None] = []
    for i, (size, rank) in enumerate(zip(outputs, ranks, strict=True)):
        down, up = random(rank, inputs, seed=10 * seed + i), random(size, rank, seed=-10 * seed - i - 1)
        parts.append(LowRankPart((down / inputs**0.5).numpy(), (up / rank**0.5).numpy()) if rank else None)
    return parts


def exact(
    adapters: Sequence[Adapter | None], outputs: Sequence[int], slots: Sequence[int], x: Tensor, dtype: DType
) -> tuple[Tensor, Tensor]:
    """What is added to each row, and how far it may be off: down(x) may be rounded to the next number of ``dtype``."""
    x = x.to(torch_dtype(dtype)).double()
    added, bound = torch.zeros(len(x), sum(outputs), dtype=torch.float64), torch.zeros(len(x), sum(outputs)).double()
    eps = 2.0**-8 if dtype is DType.BFLOAT16 else 2.0**-20
    starts = [0, *itertools.accumulate(outputs)]
    for row, slot in enumerate(slots):
        adapter = adapters[slot] if slot >= 0 else None
        for part, start, size in zip(adapter or (), starts, outputs, strict=False):
            if part is not None:
                down, up = (torch.from_numpy(matrix.astype(dtype.numpy).astype(np.float64)) for matrix in part)
                shrunk = down @ x[row]
                added[row, start : start + size] = up @ shrunk
                bound[row, start : start + size] = up.abs() @ (shrunk.abs() + down.abs() @ x[row].abs() / 64) * eps
    return added, bound + 1e-6
