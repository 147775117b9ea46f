"""The batch-invariant matrix product: a row's result does not depend on the number of rows.

Tile shape, number of warps and split of K are the same for any number of rows: K is cut into pieces, whose sums are
added in order, whether a program computes one piece of a tile or all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import interpreted
from octavo.kernels.triton.elementwise import rounded

#: Programs that fill a large GPU: two on each of 132 multiprocessors.
_PROGRAMS = 264
#: Above this many programs, a program computes all pieces of its tile: sums in memory would cost more than they gain.
_MOST_SPLIT_PROGRAMS = 1024
#: Minimum of inputs in a piece of K: fewer would not fill the pipeline of loads.
_LEAST_DEPTH = 256
#: Tiles of rows that are computed with one tile of weights before the next; their inputs stay in the L2 cache.
BAND = tl.constexpr(8)

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, total):
    """total + a b, accumulated in float32; float32 operands are multiplied as they are."""
    if _INTERPRETED:
        # The interpreter multiplies bfloat16 numbers as integers, and numpy sums a row in an order that depends on the
        # row's index: so each row of activations is a product of its own, in float32.
        rows: tl.constexpr = a.shape[0]
        each = tl.broadcast_to(b.to(tl.float32)[None, :, :], (rows, b.shape[0], b.shape[1]))
        return total + tl.reshape(tl.dot(a.to(tl.float32)[:, None, :], each), (rows, b.shape[1]))
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def dot_of_columns(a, b, total):
    """``dot``, if the rows of activations are the columns of b."""
    if _INTERPRETED:
        return tl.trans(dot(tl.trans(b), tl.trans(a), tl.trans(total)))
    return dot(a, b, total)


@triton.jit
def gathered_product(
    x_ptrs, weight_ptrs, inside, k, begin, end, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr = False,
):  # fmt: skip
    """Rows x [ROWS], which lie anywhere, by weights [COLUMNS], over inputs ``begin .. end - 1``: float32, from zero.

    Pointers are those to the inputs ``k``, 0 to DEPTH - 1; rows that are not ``inside`` are zero. EVEN: DEPTH divides
    the inputs.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
        if EVEN:
            x = tl.load(x_ptrs + start, inside[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start)
        else:
            left = k < depth - start
            x = tl.load(x_ptrs + start, inside[:, None] & left[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, left[:, None], other=0.0)
        total = dot(x, weight, total)
    return total


@triton.jit
def tile_place(tile, row_tiles, column_tiles):
    """(row of tiles, column of tiles): bands of BAND rows, each from left to right, top to bottom within."""
    in_band = BAND * column_tiles
    first = tile // in_band * BAND
    height = min(row_tiles - first, BAND)
    return first + tile % in_band % height, tile % in_band // height


def pieces_of(tiles: int, depth: int, block: int) -> tuple[int, int]:
    """(pieces of K, blocks of K in each except perhaps the last), for ``tiles`` tiles of outputs."""
    pieces = max(1, min(_PROGRAMS // max(1, tiles), depth // _LEAST_DEPTH))
    length = triton.cdiv(triton.cdiv(depth, block), pieces)
    return max(1, triton.cdiv(depth, length * block)), length


def splits(tiles: int, pieces: int) -> bool:
    """Whether each piece of ``tiles`` tiles is computed by a separate program."""
    return pieces > 1 and tiles * pieces <= _MOST_SPLIT_PROGRAMS


class _DenseProductTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


#: Two programs of this shape fit a Hopper multiprocessor; at few rows the loads of weights outlast its arithmetic.
_HALF = _DenseProductTile(128, 128, 64, 8, 3)
#: Without tensor cores (float32 as it is).
_SINGLE = _DenseProductTile(64, 64, 32, 4, 2)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, rows, columns, depth, row_tiles, x_stride,
    weight_stride, piece_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """out = x weight^T (+ bias) (+ residual); with SPLIT, partial [PIECES, rows, columns] = one piece of K."""
    row_tile, column_tile = tile_place(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS))
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row_inside = row < rows
    # Columns past the last one read the last one; their results are not stored.
    weight_row = tl.minimum(column, columns - 1).to(tl.int64)
    x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + weight_row[None, :] * weight_stride + k[:, None]
    place = row[:, None] * columns + column[None, :]
    inside = row_inside[:, None] & (column < columns)[None, :]
    if SPLIT:
        piece = tl.program_id(1)
        total = _piece(x_ptrs, weight_ptrs, row_inside, k, depth, piece, piece_blocks, ROWS, COLUMNS, DEPTH, EVEN)
        tl.store(partial_ptr + piece.to(tl.int64) * rows * columns + place, total, inside)
    else:
        total = _piece(x_ptrs, weight_ptrs, row_inside, k, depth, 0, piece_blocks, ROWS, COLUMNS, DEPTH, EVEN)
        for piece in range(1, PIECES):
            total += _piece(x_ptrs, weight_ptrs, row_inside, k, depth, piece, piece_blocks, ROWS, COLUMNS, DEPTH, EVEN)
        _finish(total, bias_ptr, residual_ptr, out_ptr, place, column[None, :], inside, columns)


@triton.jit
def _piece(
    x_ptrs, weight_ptrs, row_inside, k, depth, piece, piece_blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    end = tl.minimum(depth, (piece + 1) * piece_blocks * DEPTH)
    return gathered_product(
        x_ptrs, weight_ptrs, row_inside, k, piece * piece_blocks * DEPTH, end, depth, ROWS, COLUMNS, DEPTH, EVEN
    )


@triton.jit
def _finish(total, bias_ptr, residual_ptr, out_ptr, place, column, inside, columns):
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + place, inside, other=0.0)
    tl.store(out_ptr + place, rounded(total, out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, rows, columns, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row * columns + column
    inside = column < columns
    total = tl.load(partial_ptr + place, inside, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(partial_ptr + piece * rows.to(tl.int64) * columns + place, inside, other=0.0)
    _finish(total, bias_ptr, residual_ptr, out_ptr, place, column, inside, columns)


def result_of(rows: int, columns: int, x: Tensor, out_dtype: torch.dtype | None, residual: Tensor | None) -> Tensor:
    """The output tensor of a product: the residual if the result is float32, else a new tensor."""
    out_dtype = out_dtype or x.dtype
    if residual is not None and out_dtype == torch.float32:
        return residual
    return torch.empty((rows, columns), dtype=out_dtype, device=x.device)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x weight^T + bias (+ residual), accumulated in float32 in the same order for any number of rows.

    Args:
        x: [T, K], rows strided; bfloat16, float16 or float32 (multiplied without tensor cores).
        weight: [N, K], rows strided, of x's type.
        bias: [N]
        out_dtype: of the result [T, N], by default x's.
        residual: float32 [T, N], contiguous. A float32 result reuses its memory.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    out = result_of(rows, columns, x, out_dtype, residual)
    if not out.numel():
        return out
    shape = _SINGLE if x.dtype == torch.float32 else _HALF
    row_tiles, column_tiles = triton.cdiv(rows, shape.rows), triton.cdiv(columns, shape.columns)
    pieces, piece_blocks = pieces_of(column_tiles, depth, shape.depth)
    split = splits(row_tiles * column_tiles, pieces)
    partial = torch.empty((pieces, rows, columns), dtype=torch.float32, device=x.device) if split else None
    # With two sums, registers suffice for one program per multiprocessor, which has all of its shared memory.
    stages = shape.stages + (pieces > 1 and not split)
    _matmul_kernel[(row_tiles * column_tiles, pieces if split else 1)](
        x, weight, bias, residual, out, partial,
        rows, columns, depth, row_tiles, x.stride(0), weight.stride(0), piece_blocks,
        ROWS=shape.rows, COLUMNS=shape.columns, DEPTH=shape.depth, EVEN=depth % shape.depth == 0, PIECES=pieces,
        SPLIT=split, num_warps=shape.warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split:
        block = 512
        _combine_kernel[(rows, triton.cdiv(columns, block))](
            partial, bias, residual, out, rows, columns, PIECES=pieces, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out
