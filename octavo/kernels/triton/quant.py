"""Products with quantised weights: codes are dequantised in registers and multiplied in the activations' type.

The weights are the left operand of the matrix unit and the transposed activations the right one, which needs less
arithmetic for few rows. The scale of a row of weights is applied to the sum, that of a group to the group's sum.

In a gated product, a tile has equally many outputs of gate and up and applies the activation before the store: the
additions and roundings, and so the bits, are the same as those of the product followed by the activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.packed_weight import Activation
from octavo.kernels.triton.activation import FUNCTIONS
from octavo.kernels.triton.matmul import result_of
from octavo.kernels.triton.quantize import BLOCK, COLUMNS, TritonQuantizedLinear
from octavo.kernels.triton.rounding import rounded
from octavo.kernels.triton.tiles import dot_of_columns, pieces_of, splits, tile_place
from octavo.kernels.triton.widen import widen_fp8, widen_int4, widen_int8


class _ProductTile(NamedTuple):
    rows: int
    warps: int
    stages: int


#: The only one of ``deterministic``.
_FIXED = _ProductTile(64, 8, 3)
#: Otherwise that of the fewest rows which are enough: at few rows, arithmetic on absent ones would outlast the loads.
_BY_ROWS = (_ProductTile(16, 8, 4), _FIXED, _ProductTile(128, 8, 4))
#: Without tensor cores (float32 as it is).
_SINGLE = _ProductTile(16, 8, 2)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _quantized_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    rows,
    columns,
    padded_columns,
    depth,
    row_tiles,
    x_stride,
    piece_blocks,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PIECES: tl.constexpr,
    SPLIT: tl.constexpr,
    GATE: tl.constexpr,
):
    """out = x weight^T (+ bias) (+ residual); with GATE, GATE(first half) * second half.

    With SPLIT a program computes one piece of K and stores it in partial [PIECES, rows, columns], in which a tile's
    columns are contiguous; the last program of a tile adds all pieces, in order.
    """
    row_tile, column_tile = tile_place(tl.program_id(0), row_tiles, padded_columns // COLUMNS)
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    place_in_row = column_tile * COLUMNS + lane
    column = place_in_row
    if GATE is not None:  # a gate, what it gates, the next gate
        column = column_tile * (COLUMNS // 2) + lane // 2 + lane % 2 * (columns // 2)
    row_inside = (row < rows)[:, None]
    x_ptrs = x_ptr + row[:, None] * x_stride
    place = row[:, None] * columns + place_in_row[None, :]
    inside = row_inside & (place_in_row < columns)[None, :]
    if SPLIT:
        piece = tl.program_id(1)
        total = _piece(
            x_ptrs, codes_ptr, scales_ptr, row_inside, column, padded_columns, depth, piece, piece_blocks,
            KIND, ROWS, COLUMNS, BLOCK, GROUP, EVEN,
        )  # fmt: skip
        size = rows.to(tl.int64) * columns
        tl.store(partial_ptr + piece * size + place, tl.trans(total), inside)
        # This program's stores happen before its arrival, and all arrivals before the loads of the last program.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == PIECES - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            whole = tl.zeros((ROWS, COLUMNS), tl.float32)
            for other in range(PIECES):
                whole += tl.load(partial_ptr + other * size + place, inside, other=0.0, cache_modifier=".cg")
            _finish(
                whole, scales_ptr, bias_ptr, residual_ptr, out_ptr, row, row_inside, column, column_tile, columns,
                GROUP, GATE,
            )  # fmt: skip
    else:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for piece in range(PIECES):
            total += _piece(
                x_ptrs, codes_ptr, scales_ptr, row_inside, column, padded_columns, depth, piece, piece_blocks,
                KIND, ROWS, COLUMNS, BLOCK, GROUP, EVEN,
            )  # fmt: skip
        whole = tl.trans(total)
        _finish(
            whole, scales_ptr, bias_ptr, residual_ptr, out_ptr, row, row_inside, column, column_tile, columns,
            GROUP, GATE,
        )  # fmt: skip


@triton.jit
def _piece(
    x_ptrs,
    codes_ptr,
    scales_ptr,
    row_inside,
    column,
    padded_columns,
    depth,
    piece,
    piece_blocks,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """codes x^T over one piece of K, [COLUMNS, ROWS]; with the scales of groups applied."""
    PARTS: tl.constexpr = 4 if KIND == "int4" else 2
    SIZE: tl.constexpr = BLOCK // PARTS
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    k = tl.arange(0, SIZE)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    zero = tl.zeros((COLUMNS, ROWS), tl.float32)
    first = piece * piece_blocks
    last = tl.minimum(tl.cdiv(depth, BLOCK), first + piece_blocks)
    for block in range(first, last):
        start = block * BLOCK
        row_of_codes = (tl.cast(block, tl.int64) * padded_columns + column)[:, None]
        x_0 = _columns_of(x_ptrs, row_inside, k, start, depth, EVEN)
        x_1 = _columns_of(x_ptrs, row_inside, k, start + SIZE, depth, EVEN)
        if KIND == "int4":
            w_0, w_1, w_2, w_3 = widen_int4(tl.load(codes_ptr + row_of_codes * SIZE + k[None, :]), DTYPE)
            x_2 = _columns_of(x_ptrs, row_inside, k, start + 2 * SIZE, depth, EVEN)
            x_3 = _columns_of(x_ptrs, row_inside, k, start + 3 * SIZE, depth, EVEN)
            if GROUP == BLOCK:
                group = dot_of_columns(w_1, x_1, dot_of_columns(w_0, x_0, zero))
                group = dot_of_columns(w_3, x_3, dot_of_columns(w_2, x_2, group))
                total += group * tl.load(scales_ptr + block * padded_columns + column)[:, None]
            else:
                scale_ptrs = scales_ptr + 4 * block * padded_columns + column
                total += dot_of_columns(w_0, x_0, zero) * tl.load(scale_ptrs)[:, None]
                total += dot_of_columns(w_1, x_1, zero) * tl.load(scale_ptrs + padded_columns)[:, None]
                total += dot_of_columns(w_2, x_2, zero) * tl.load(scale_ptrs + 2 * padded_columns)[:, None]
                total += dot_of_columns(w_3, x_3, zero) * tl.load(scale_ptrs + 3 * padded_columns)[:, None]
        else:
            words = tl.load(codes_ptr + row_of_codes * SIZE + k[None, :])
            if KIND == "int8":
                w_0, w_1 = widen_int8(words, DTYPE)
            else:
                w_0, w_1 = widen_fp8(words, DTYPE)
            total = dot_of_columns(w_1, x_1, dot_of_columns(w_0, x_0, total))
    return total


@triton.jit
def _columns_of(x_ptrs, row_inside, k, start, depth, EVEN: tl.constexpr):
    """A tile of x, transposed."""
    mask = row_inside if EVEN else row_inside & (k < depth - start)[None, :]
    return tl.trans(tl.load(x_ptrs + (start + k)[None, :], mask, other=0.0))


@triton.jit
def _finish(
    whole,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    row,
    row_inside,
    column,
    column_tile,
    columns,
    GROUP: tl.constexpr,
    GATE: tl.constexpr,
):
    """Applies the scales of rows of weights, adds bias and residual, if there are any, rounds and stores.

    With GATE the gated activation is applied to the rounded sums, which leaves half of the columns.
    """
    if GROUP == 0:
        whole *= tl.load(scales_ptr + column)[None, :]
    if bias_ptr is not None:
        whole += tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        HALF: tl.constexpr = whole.shape[1] // 2
        gate, up = tl.split(tl.reshape(rounded(whole, out_ptr.dtype.element_ty), (whole.shape[0], HALF, 2)))
        whole = GATE(gate.to(tl.float32)) * up.to(tl.float32)
        column = column_tile * HALF + tl.arange(0, HALF)
        columns = columns // 2
    place = row[:, None] * columns + column[None, :]
    inside = row_inside & (column < columns)[None, :]
    if residual_ptr is not None:
        whole += tl.load(residual_ptr + place, inside, other=0.0)
    tl.store(out_ptr + place, rounded(whole, out_ptr.dtype.element_ty), inside)


def quantized_matmul(
    x: Tensor,
    packed: TritonQuantizedLinear,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    *,
    deterministic: bool = True,
) -> Tensor:
    """x weight^T + bias (+ residual), accumulated in float32, with a quantised weight.

    Two products with the same weight must not run concurrently on two streams: they share its ``arrivals``.

    Args:
        x: [T, K], rows strided; bfloat16, float16, or float32 (multiplied without tensor cores).
        packed: [N, K], of ``quantize``.
        out_dtype: Of the result; x's if not given.
        residual: float32 [T, N], contiguous; added in float32. A float32 result reuses its memory.
        deterministic: One tile shape for any number of rows, so that a row's result does not depend on it.

    Returns:
        [T, N].
    """
    out = result_of(x.shape[0], packed.outputs, x, out_dtype, residual)
    return _product(x, packed, out, residual, gate=None, deterministic=deterministic)


def quantized_gated(
    x: Tensor, packed: TritonQuantizedLinear, activation: Activation = "silu", *, deterministic: bool = True
) -> Tensor:
    """``activate(quantized_matmul(x, packed), activation, gated=True)``, bit for bit, in one launch.

    Args:
        x: See ``quantized_matmul``.
        packed: [2 * I, K], the rows of the gate first; I is a multiple of half of ``COLUMNS``.
        activation: Of the gate.
        deterministic: See ``quantized_matmul``.

    Returns:
        [T, I] of x's type.
    """
    assert packed.outputs % COLUMNS == 0
    out = torch.empty((x.shape[0], packed.outputs // 2), dtype=x.dtype, device=x.device)
    return _product(x, packed, out, None, gate=FUNCTIONS[activation], deterministic=deterministic)


def _product(
    x: Tensor,
    packed: TritonQuantizedLinear,
    out: Tensor,
    residual: Tensor | None,
    *,
    gate: triton.JITFunction | None,
    deterministic: bool,
) -> Tensor:
    rows, columns, padded_columns = x.shape[0], packed.outputs, packed.scales.shape[-1]
    if not out.numel():
        return out
    shape = _shape_of(x, deterministic)
    row_tiles, column_tiles = triton.cdiv(rows, shape.rows), padded_columns // COLUMNS
    pieces, piece_blocks = pieces_of(column_tiles, packed.inputs, BLOCK)
    tiles = row_tiles * column_tiles
    split = tiles <= packed.arrivals.shape[0] and splits(tiles, pieces)
    if not split and not deterministic:
        pieces, piece_blocks = 1, triton.cdiv(packed.inputs, BLOCK)
    partial = torch.empty((pieces, rows, columns), dtype=torch.float32, device=x.device) if split else None
    _quantized_kernel[(tiles, pieces if split else 1)](
        x,
        packed.codes,
        packed.scales,
        packed.bias,
        residual,
        out,
        partial,
        packed.arrivals if split else None,
        rows,
        columns,
        padded_columns,
        packed.inputs,
        row_tiles,
        x.stride(0),
        piece_blocks,
        KIND=packed.kind,
        ROWS=shape.rows,
        COLUMNS=COLUMNS,
        BLOCK=BLOCK,
        GROUP=packed.group,
        EVEN=packed.inputs % BLOCK == 0,
        PIECES=pieces,
        SPLIT=split,
        GATE=gate,
        num_warps=shape.warps,
        # With two sums, registers suffice for one program per multiprocessor, which then has all of its shared memory.
        # With one sum, two programs fit and hide each other's latencies.
        num_stages=shape.stages + (pieces > 1 and not split),
        maxnreg=128 if split and shape.rows <= _FIXED.rows and packed.group != 32 else None,
        enable_fp_fusion=False,
    )
    return out


def _shape_of(x: Tensor, deterministic: bool) -> _ProductTile:
    if x.dtype == torch.float32:
        return _SINGLE
    if deterministic:
        return _FIXED
    return next((shape for shape in _BY_ROWS if x.shape[0] <= shape.rows), _BY_ROWS[-1])
