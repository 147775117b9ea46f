"""Common parts of the matrix products: the order of tiles, the split of K, and the product of a tile.

A product is a grid of tiles of the output. K is cut into pieces that depend on the numbers of outputs and inputs alone;
each piece is accumulated from zero in order, and the pieces are added in order. With few rows, a program computes one
piece and its sums are added in memory, so that enough programs read weights; with many rows, a program computes all
pieces. Both do the same additions and give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.interpreter import interpreted

#: Programs that fill a large card: two on each of 132 multiprocessors.
_PROGRAMS = 264
#: Above this many programs, a program computes all pieces of its tile: sums in memory would cost more than they gain.
_MOST_SPLIT_PROGRAMS = 1024
#: Inputs in a piece of K, at least: fewer would not fill the pipeline of loads.
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
    """As ``dot``, if the rows of activations are the columns of b."""
    if _INTERPRETED:
        return tl.trans(dot(tl.trans(b), tl.trans(a), tl.trans(total)))
    return dot(a, b, total)


@triton.jit
def gathered_product(
    x_ptrs, weight_ptrs, inside, k, begin, end, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """Rows x [ROWS], which lie anywhere, by weights [COLUMNS], over inputs ``begin .. end - 1``: float32, from zero.

    Pointers are those to the inputs ``k``, 0 to DEPTH - 1; rows that are not ``inside`` are zero.
    """
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
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
    wanted = max(1, min(_PROGRAMS // max(1, tiles), depth // _LEAST_DEPTH))
    length = triton.cdiv(triton.cdiv(depth, block), wanted)
    return max(1, triton.cdiv(depth, length * block)), length


def splits(tiles: int, pieces: int) -> bool:
    """Whether each piece of ``tiles`` tiles is computed by a separate program."""
    return pieces > 1 and tiles * pieces <= _MOST_SPLIT_PROGRAMS
