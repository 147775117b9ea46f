"""Low-rank products of adapters on a GPU: two launches for a layer, whatever the adapters of its rows.

The rows of a step are sorted by slot once, in tiles of one slot each (``sort_pairs``), and a program multiplies a tile
of rows by a block of its slot's matrices. The number of programs depends on that of the rows alone, so that a step can
be captured. ``_shrink_kernel`` computes down(x), K in pieces so that few rows have enough programs; the pieces are
added in order, whether programs do one each or one does all. ``_expand_kernel`` adds up(down(x)). Blocks past an
adapter's own rank are not computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.interface import LowRank, LowRankEmbedding, LowRankPart, LowRankShape, check_part
from octavo.kernels.reference import TorchAdapters
from octavo.kernels.torch_backend import host_empty, to_torch, torch_dtype
from octavo.kernels.triton.elementwise import rounded
from octavo.kernels.triton.experts import sort_pairs
from octavo.kernels.triton.matmul import dot, gathered_product

#: Rows of a tile for slots with few rows, and with many.
_FEW, _MANY = 16, 64
_COLUMNS = 128
#: Blocks of inputs in a piece of K, and the most pieces.
_PIECE_BLOCKS, _MOST_PIECES = 4, 16
#: Number of rows from which a program computes all pieces.
_MANY_ROWS = 512


class TritonLowRank(LowRank):
    """Slots of equal size on the device."""

    def __init__(self, adapters: TritonAdapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        super().__init__(adapters, shape, sampled=sampled)
        self._starts = [0, *itertools.accumulate(self.outputs)]
        self._type = torch_dtype(self.dtype)
        self._rank, self._block = rank_blocks(self.max_rank)
        device, parts = adapters.device, len(self.outputs)
        self._down = torch.zeros((shape.slots, parts, self._rank, self.inputs), dtype=self._type, device=device)
        self._up = torch.zeros((shape.slots, self._starts[-1], self._rank), dtype=self._type, device=device)
        #: Ranks of each slot's parts, 0 without a product; the last row is for rows without an adapter.
        self._ranks = torch.zeros((shape.slots + 1, parts), dtype=torch.int32, device=device)
        tiles = [
            (part, column, end)
            for part, (start, end) in enumerate(itertools.pairwise(self._starts))
            for column in range(start, end, _COLUMNS)
        ]
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(device)

    def pack(self, parts: Sequence[LowRankPart | None]) -> TritonAdapter:
        self.check(parts)
        ranks = [0 if part is None else len(part.down) for part in parts]
        return TritonAdapter([part and pad_part(part, self.dtype, self._block) for part in parts], ranks)

    def place(self, slot: int, packed: TritonAdapter | None) -> None:
        if packed is None:
            self._ranks[slot].zero_()
            return
        self._ranks[slot].copy_(torch.tensor(packed.ranks, dtype=torch.int32))
        for i, part in enumerate(packed.parts):
            if part is not None:
                self._down[slot, i, : len(part.down)].copy_(part.down, non_blocking=True)
                columns = slice(self._starts[i], self._starts[i + 1])
                self._up[slot, columns, : part.up.shape[1]].copy_(part.up, non_blocking=True)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
        tiles = self._adapters.tiles(sampled=self._sampled)
        if tiles is None:
            return add
        rows, columns, parts = len(x), self._starts[-1], len(self.outputs)
        out = torch.empty((rows, columns), dtype=torch.float32, device=x.device) if add is None else add
        if not rows:
            return out
        x = x.to(self._type)
        depth = 64 if self.dtype.itemsize == 2 else 32
        blocks = triton.cdiv(self.inputs, depth)
        piece = triton.cdiv(blocks, min(_MOST_PIECES, triton.cdiv(blocks, _PIECE_BLOCKS)))
        pieces = triton.cdiv(blocks, piece)
        split = pieces if rows < _MANY_ROWS else 1
        options = {"ROWS": tiles.rows, "PARTS": parts, "RANK": self._rank, "BLOCK": self._block}
        options |= {"num_warps": 4, "enable_fp_fusion": False}
        partial = torch.empty((split, rows, parts * self._rank), dtype=torch.float32, device=x.device)
        _shrink_kernel[(len(tiles.slots), parts * self._rank // self._block, split)](
            x, self._down, self._ranks, partial, tiles.places, tiles.slots, rows, self.inputs, x.stride(0),
            DEPTH=depth, PIECE=piece * depth, PIECES=pieces, SPLIT=split > 1, **options,
        )  # fmt: skip
        _expand_kernel[(len(tiles.slots), len(self._tiles))](
            partial, self._up, self._ranks, self._tiles, add, out, tiles.places, tiles.slots, rows, columns,
            COLUMNS=_COLUMNS, PIECES=split, **options,
        )  # fmt: skip
        return out


class TritonLowRankEmbedding(LowRankEmbedding):
    """Slots of equal size on the device; ``down`` is transposed."""

    def __init__(self, adapters: TritonAdapters, shape: LowRankShape) -> None:
        super().__init__(adapters, shape)
        self._type = torch_dtype(self.dtype)
        self._rank, self._block = rank_blocks(self.max_rank)
        self._down = torch.zeros((shape.slots, self.rows, self._rank), dtype=self._type, device=adapters.device)
        self._up = torch.zeros((shape.slots, self.outputs, self._rank), dtype=self._type, device=adapters.device)
        self._ranks = torch.zeros(shape.slots, dtype=torch.int32, device=adapters.device)

    def pack(self, part: LowRankPart) -> TritonAdapter:
        check_part(part, self.rows, self.outputs, self.max_rank)
        return TritonAdapter([pad_part(part, self.dtype, self._block)], [len(part.down)])

    def place(self, slot: int, packed: TritonAdapter | None) -> None:
        self._ranks[slot] = 0 if packed is None else packed.ranks[0]
        if packed is not None:
            (part,) = packed.parts
            assert part is not None
            rank = len(part.down)
            self._down[slot, :, :rank].copy_(part.down.T)
            self._up[slot, :, :rank].copy_(part.up, non_blocking=True)

    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
        slots = self._adapters.slots()
        if slots is None or not len(ids):
            return add
        columns = 64
        _lookup_kernel[(len(ids), triton.cdiv(self.outputs, columns))](
            ids, self._down, self._up, self._ranks, slots, add, first, self.rows, self.outputs, self.slots,
            RANK=self._rank, BLOCK=self._block, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return add


class TritonAdapters(TorchAdapters):
    """Holds the tiles of the step's rows, which all layers share."""

    low_rank = TritonLowRank
    low_rank_embedding = TritonLowRankEmbedding

    def __init__(self, device: torch.device, *, deterministic: bool) -> None:
        super().__init__()
        self.device = device
        self._deterministic = deterministic
        #: Slots, equal in all layers; 0: no layer has slots.
        self.count = 0
        self._tiles: dict[bool, RowTiles] = {}

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRank:
        self.count = shape.slots
        return super().make_low_rank(shape, sampled=sampled)

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankEmbedding:
        self.count = shape.slots
        return super().make_low_rank_embedding(shape)

    def use(self, tokens: Tensor | None, sampled: Tensor | None = None) -> None:
        super().use(tokens, sampled)
        self._tiles = {}

    def tiles(self, *, sampled: bool) -> RowTiles | None:
        """The tiles of the step's tokens or sampled rows, made once in a step; None if no row has an adapter."""
        slots = self.slots(sampled=sampled)
        if slots is None:
            return None
        if sampled not in self._tiles:
            self._tiles[sampled] = RowTiles.of(slots, self.count, deterministic=self._deterministic)
        return self._tiles[sampled]


@dataclass(frozen=True)
class RowTiles:
    """The rows of a step in tiles of one slot each."""

    #: Rows of a tile.
    rows: int
    #: int32 [tiles * rows]: rows of the step; the step's number of rows where a tile has none.
    places: Tensor
    #: int32 [tiles]; the number of slots for rows without an adapter; -1 of tiles without rows.
    slots: Tensor

    @classmethod
    def of(cls, slots: Tensor, count: int, *, deterministic: bool) -> RowTiles:
        """The tiles of rows with these slots, int32 [T], -1 without an adapter; ``count`` is the number of slots."""
        rows = _FEW if deterministic or len(slots) <= _FEW * count else _MANY
        own = torch.where((slots < 0) | (slots >= count), count, slots)
        return cls(rows, *sort_pairs(own.unsqueeze(1), count + 1, rows))


class PaddedPart(NamedTuple):
    """A ``LowRankPart`` in pinned host memory."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class TritonAdapter:
    """The matrices of an adapter in pinned host memory, each part padded to whole blocks of the rank."""

    parts: list[PaddedPart | None]
    ranks: list[int]


def rank_blocks(max_rank: int) -> tuple[int, int]:
    """(rank up to which matrices are padded, ranks of a tile)."""
    block = 16 if max_rank <= 16 else 32
    return triton.cdiv(max_rank, block) * block, block


def pad_part(part: LowRankPart, dtype: DType, block: int) -> PaddedPart:
    """Copies both matrices to pinned memory, with zeros up to a multiple of ``block`` ranks."""
    (rank, inputs), outputs = part.down.shape, len(part.up)
    padded = triton.cdiv(rank, block) * block
    to = torch_dtype(dtype)
    down, up = host_empty((padded, inputs), to).zero_(), host_empty((outputs, padded), to).zero_()
    down[:rank], up[:, :rank] = to_torch(part.down), to_torch(part.up)
    return PaddedPart(down, up)


# Kernels.


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x_ptr, down_ptr, ranks_ptr, partial_ptr, places_ptr, slots_ptr, rows, depth, x_stride,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[piece, row, part * RANK + r] = one piece of down(x), without SPLIT all of it in piece 0.

    down [slots + 1, PARTS, RANK, depth], ranks [slots + 1, PARTS].
    """
    tile, blocks = tl.program_id(0), RANK // BLOCK
    part, start_rank = tl.program_id(1) // blocks, tl.program_id(1) % blocks * BLOCK
    slot = tl.load(slots_ptr + tile)
    if (slot >= 0) & (start_rank < tl.load(ranks_ptr + tl.maximum(slot, 0) * PARTS + part)):
        place = tl.load(places_ptr + tile * ROWS + tl.arange(0, ROWS))
        inside = place < rows
        k = tl.arange(0, DEPTH)
        rank = (slot * PARTS + part).to(tl.int64) * RANK + start_rank + tl.arange(0, BLOCK)
        x_ptrs = x_ptr + place.to(tl.int64)[:, None] * x_stride + k[None, :]
        down_ptrs = down_ptr + rank[None, :] * depth + k[:, None]
        first = 0
        if SPLIT:
            first = tl.program_id(2) * PIECE
        end = tl.minimum(first + PIECE, depth)
        total = gathered_product(x_ptrs, down_ptrs, inside, k, first, end, depth, ROWS, BLOCK, DEPTH)
        if not SPLIT:
            for piece in range(1, PIECES):
                begin = piece * PIECE
                end_of_piece = tl.minimum(begin + PIECE, depth)
                total += gathered_product(x_ptrs, down_ptrs, inside, k, begin, end_of_piece, depth, ROWS, BLOCK, DEPTH)
        row = tl.program_id(2).to(tl.int64) * rows + place
        column = part * RANK + start_rank + tl.arange(0, BLOCK)
        tl.store(partial_ptr + row[:, None] * (PARTS * RANK) + column[None, :], total, inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    partial_ptr, up_ptr, ranks_ptr, tiles_ptr, add_ptr, out_ptr, places_ptr, slots_ptr, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = add + up(partial's sum over the pieces); without ``add``, -0.0 where there is no product.

    up [slots + 1, columns, RANK]; tiles [column tiles, 3]: the part, its first column, and one past its last.
    """
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + tile)
    if slot >= 0:
        part = tl.load(tiles_ptr + column_tile * 3)
        column = tl.load(tiles_ptr + column_tile * 3 + 1) + tl.arange(0, COLUMNS)
        end = tl.load(tiles_ptr + column_tile * 3 + 2)
        place = tl.load(places_ptr + tile * ROWS + tl.arange(0, ROWS))
        inside = (place < rows)[:, None] & (column < end)[None, :]
        at = place.to(tl.int64)[:, None] * columns + column[None, :]
        rank = tl.load(ranks_ptr + slot * PARTS + part)
        if rank > 0:
            up_row = slot.to(tl.int64) * columns + tl.minimum(column, end - 1)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, rank, BLOCK):
                r = start + tl.arange(0, BLOCK)
                shrunk_ptrs = partial_ptr + place.to(tl.int64)[:, None] * (PARTS * RANK) + (part * RANK + r)[None, :]
                shrunk = tl.load(shrunk_ptrs, (place < rows)[:, None], other=0.0)
                for piece in tl.static_range(1, PIECES):
                    further = piece * rows.to(tl.int64) * (PARTS * RANK)
                    shrunk += tl.load(shrunk_ptrs + further, (place < rows)[:, None], other=0.0)
                up = tl.load(up_ptr + up_row[None, :] * RANK + r[:, None])
                total = dot(rounded(shrunk, up_ptr.dtype.element_ty), up, total)
            if add_ptr is not None:
                total = tl.load(add_ptr + at, inside, other=0.0) + total
            tl.store(out_ptr + at, total, inside)
        elif add_ptr is None:
            tl.store(out_ptr + at, tl.zeros((ROWS, COLUMNS), tl.float32) * -1.0, inside)


@triton.jit
def _lookup_kernel(
    ids_ptr, down_ptr, up_ptr, ranks_ptr, slots_ptr, out_ptr, first, table_rows, columns, num_slots,
    RANK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out += up(down's row); down [slots, table_rows, RANK], up [slots, columns, RANK]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row = tl.load(ids_ptr + token) - first
    if (slot >= 0) & (slot < num_slots) & (row >= 0) & (row < table_rows):
        rank = tl.load(ranks_ptr + slot)
        if rank > 0:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < columns
            total = tl.zeros((COLUMNS,), tl.float32)
            for start in range(0, rank, BLOCK):
                r = start + tl.arange(0, BLOCK)
                x = tl.load(down_ptr + (slot * table_rows + row) * RANK + r).to(tl.float32)
                up_ptrs = up_ptr + (slot * columns + column)[:, None] * RANK + r[None, :]
                up = tl.load(up_ptrs, inside[:, None], other=0.0).to(tl.float32)
                total += tl.sum(up * x[None, :], axis=1)
            out_ptrs = out_ptr + token * columns + column
            tl.store(out_ptrs, tl.load(out_ptrs, inside, other=0.0) + total, inside)
