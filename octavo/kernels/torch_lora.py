"""Low-rank products in plain torch on any device; see ``octavo.kernels.lora``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.lora import (
    NOTHING,
    Adapters,
    LowRank,
    LowRankEmbedding,
    LowRankPart,
    LowRankShape,
    check_part,
    rounded_part,
)
from octavo.kernels.torch_arrays import to_torch, torch_dtype


class TorchAdapters(Adapters):
    """Low-rank products by torch."""

    def _take(self, slots: Tensor, rows: Tensor) -> Tensor:
        return slots.index_select(0, rows)

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRank:
        """See ``Adapters``."""
        return PlainLowRank(self, shape, sampled=sampled)

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankEmbedding:
        """See ``Adapters``."""
        return PlainLowRankEmbedding(self, shape)


@dataclass(frozen=True)
class PlainAdapter:
    """Matrices as they are."""

    parts: tuple[LowRankPart | None, ...]

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts if part is not None)


class PlainLowRank(LowRank):
    """Low-rank products by torch on any device; the rows of an adapter in one product."""

    def __init__(self, adapters: Adapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        """See ``Adapters.make_low_rank``."""
        super().__init__(shape)
        self._adapters, self._sampled = adapters, sampled
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, parts: Sequence[LowRankPart | None]) -> PlainAdapter:
        """Copies the matrices."""
        self.check(parts)
        return PlainAdapter(tuple(None if part is None else rounded_part(part, self.dtype) for part in parts))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        """Keeps a reference."""
        self._held[slot] = packed

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
        """A loop over the adapters of the step."""
        slots = self._adapters.slots(sampled=self._sampled)
        if slots is None:
            return add
        out = x.new_full((len(x), sum(self.outputs)), NOTHING, dtype=torch.float32) if add is None else add
        x = x.to(torch_dtype(self.dtype)).float()
        starts = [0, *itertools.accumulate(self.outputs)]
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            for part, start in zip(adapter.parts, starts, strict=False):
                if part is not None:
                    columns = slice(start, start + len(part.up))
                    shrunk = x[chosen] @ _floats(part.down, x).T
                    out[chosen, columns] += _expand(shrunk, part.up)
        return out


class PlainLowRankEmbedding(LowRankEmbedding):
    """Low-rank products of an embedding by torch on any device."""

    def __init__(self, adapters: Adapters, shape: LowRankShape) -> None:
        """See ``Adapters.make_low_rank_embedding``."""
        super().__init__(shape)
        self._adapters = adapters
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, part: LowRankPart) -> PlainAdapter:
        """Copies the matrices."""
        check_part(part, self.rows, self.outputs, self.max_rank)
        return PlainAdapter((rounded_part(part, self.dtype),))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        """Keeps a reference."""
        self._held[slot] = packed

    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
        """A loop over the adapters of the step."""
        slots = self._adapters.slots()
        if slots is None:
            return add
        ids = ids - first
        slots = slots.masked_fill((ids < 0) | (ids >= self.rows), -1)
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            (part,) = adapter.parts
            assert part is not None
            add[chosen] += _expand(_floats(part.down, add).T[ids[chosen]], part.up)
        return add


def _rows_by_adapter(slots: Tensor, held: Sequence[PlainAdapter | None]) -> list[tuple[Tensor, PlainAdapter]]:
    """The rows of each slot that holds an adapter, and it."""
    found = []
    for slot in slots.unique().tolist():
        adapter = held[slot] if slot >= 0 else None
        if adapter is not None:
            found.append(((slots == slot).nonzero().squeeze(1), adapter))
    return found


def _expand(shrunk: Tensor, up: np.ndarray) -> Tensor:
    """Rounded to the type of ``up`` first: [n, rank] to float32 [n, outputs]."""
    return shrunk.to(to_torch(up).dtype).float() @ _floats(up, shrunk).T


def _floats(matrix: np.ndarray, like: Tensor) -> Tensor:
    return to_torch(matrix).to(like.device).float()
