"""An adapter's matrices in host memory, as slots on a GPU take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.lora import LowRankPart
from octavo.kernels.torch_arrays import to_torch, torch_dtype
from octavo.kernels.torch_pinned import host_empty


class PaddedPart(NamedTuple):
    """As ``LowRankPart``, in pinned host memory."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class TritonAdapter:
    """The matrices of an adapter in pinned host memory, each part padded to whole blocks of the rank."""

    parts: list[PaddedPart | None]
    ranks: list[int]

    @property
    def nbytes(self) -> int:
        """Padding included."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts if part is not None)


def rank_blocks(max_rank: int) -> tuple[int, int]:
    """(the rank that matrices have room for, ranks that a tile takes at once)."""
    block = 16 if max_rank <= 16 else 32
    return triton.cdiv(max_rank, block) * block, block


def pad(part: LowRankPart, dtype: DType, block: int) -> PaddedPart:
    """Both in pinned memory, with zeros up to a multiple of ``block``."""
    (rank, inputs), outputs = part.down.shape, len(part.up)
    padded = triton.cdiv(rank, block) * block
    to = torch_dtype(dtype)
    down, up = host_empty((padded, inputs), to).zero_(), host_empty((outputs, padded), to).zero_()
    down[:rank], up[:, :rank] = to_torch(part.down), to_torch(part.up)
    return PaddedPart(down, up)
