"""Products with quantised weights: codes are dequantised in registers and multiplied in the activations' type.

The weights are the left operand of the matrix unit and the transposed activations the right one, which needs less
arithmetic for few rows. The scale of a row of weights is applied to the sum, that of a group to the group's sum.

In a gated product, a tile has equally many outputs of gate and up and applies the activation before the store: the
additions and roundings, and so the bits, are the same as those of the product followed by the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.interface import Activation, PackedWeight
from octavo.kernels.torch_backend import TorchWeight, check_fp8, torch_dtype
from octavo.kernels.triton import interpreted
from octavo.kernels.triton.elementwise import GATED_FUNCTIONS, activate, embedding, rounded
from octavo.kernels.triton.matmul import dot_of_columns, matmul, pieces_of, result_of, splits, tile_place

# Quantisation of weights to 8 or 4 bits, at load.

#: Outputs and inputs are padded with zeros to multiples of these, so that loads of weights need no masks.
COLUMNS = 128
BLOCK = 128

#: Codes tried for the greatest magnitude of a group.
_TARGETS = (-8.5, -8.0, -7.5, -7.0, -6.5, -6.0, 6.0, 6.5, 7.0, 7.5)
#: A group or row whose greatest magnitude is below this counts as zeros: its inverse must be finite.
_LEAST = 1e-30
#: Tiles of rows up to which a product may be cut into pieces of K.
_ROW_TILES = 8
#: Weights that are quantised at once, as they are copied to float32.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class TritonQuantizedLinear:
    """A quantised weight [outputs N, inputs K] with its bias."""

    #: "int8", "int4" or "fp8".
    kind: str
    outputs: int
    inputs: int
    #: Consecutive inputs that share a scale; 0: the whole row.
    group: int
    #: int16 [K padded / 128, N padded, 64 words, or 32 of 4-bit codes].
    codes: Tensor
    #: float32 [N padded]; int4: float32 [K padded / group, N padded].
    scales: Tensor
    #: [N] or none.
    bias: Tensor | None
    #: int32 number of finished pieces of each tile of the output; zero between products.
    arrivals: Tensor


def quantize(weight: Tensor, kind: str, bias: Tensor | None = None, group: int | None = None) -> TritonQuantizedLinear:
    """Quantises a floating-point weight [N, K] on its device.

    8 bits: the scale is the greatest magnitude of the row / 127 (fp8: 448). int4: of ten scales for a group, the one
    with the least squared error.

    Args:
        weight: float32, bfloat16 or float16.
        kind: "int8", "int4" or "fp8".
        bias: [N]; not quantised.
        group: int4 only: weights that share a scale, 128 or 32; default: 128 if K is a multiple of it, else 32.

    Raises:
        WeightError: a weight is infinite or not a number.
    """
    outputs, inputs = weight.shape
    if kind == "int4":
        group = group or (128 if inputs % 128 == 0 else 32)
        if group not in (32, 128) or inputs % group:
            raise ConfigError(f"int4 in groups of {group} (of 32 or 128) needs inputs in multiples of it, not {inputs}")
        encode: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(_int4, group=group)
    elif kind in ("int8", "fp8") and group is None:
        encode = _int8 if kind == "int8" else _fp8
    else:
        raise ConfigError(f"quantization {kind!r} with group {group!r}: expected int8, fp8 or int4 (group 32 or 128)")
    if kind == "fp8":
        check_fp8(weight.device, "fp8")
    rows = max(COLUMNS, _AT_ONCE // max(1, weight.shape[1]) // COLUMNS * COLUMNS)
    padded = (F.pad(x.float(), (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % COLUMNS)) for x in weight.split(rows))
    parts = [encode(part) for part in padded]
    codes = torch.cat([part[0] for part in parts], dim=1)
    scales = torch.cat([part[1] for part in parts], dim=-1)
    if not scales.isfinite().all():
        raise WeightError("a weight is infinite, not a number, or too great to be quantised")
    arrivals = torch.zeros(_ROW_TILES * codes.shape[1] // COLUMNS, dtype=torch.int32, device=weight.device)
    return TritonQuantizedLinear(kind, outputs, inputs, group or 0, codes, scales, bias, arrivals)


def _in_blocks(codes: Tensor) -> Tensor:
    return codes.view(codes.shape[0], -1, BLOCK).transpose(0, 1)


def _over_row_scales(weight: Tensor, greatest: float) -> tuple[Tensor, Tensor]:
    """Weights over the scales of their rows, in -greatest .. greatest, and those scales."""
    magnitude = weight.abs().amax(1)
    # NaN and infinity do not count as zero in this comparison.
    scales = torch.where(magnitude < _LEAST, 0.0, magnitude / greatest)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (weight * inverse[:, None]).clamp_(-greatest, greatest), scales


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _over_row_scales(weight, 127.0)
    return _words_of_bytes(codes.round_().nan_to_num_().to(torch.int8)), scales


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _over_row_scales(weight, 448.0)
    return _words_of_bytes(codes.to(torch.float8_e4m3fn).view(torch.int8)), scales


def _words_of_bytes(codes: Tensor) -> Tensor:
    halves = _in_blocks(codes).unflatten(2, (2, -1))
    return halves.transpose(2, 3).contiguous().view(torch.int16).squeeze(3)


def _int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """For given codes q the best scale is sum(w q) / sum(q q); it leaves the error sum(w w) - sum(w q)^2 / sum(q q)."""
    groups = weight.view(weight.shape[0], -1, group)
    magnitudes, where = groups.abs().max(2)
    extreme = groups.gather(2, where[..., None])
    best_gain = torch.zeros_like(magnitudes)
    scales = torch.where(magnitudes.isfinite(), 0.0, float("nan"))
    for target in _TARGETS:
        codes = (groups * (target / extreme)).round_().clamp_(-8, 7)
        product, square = (groups * codes).sum(2), codes.square().sum(2)
        gain = product * product / square
        better = (gain > best_gain) & (magnitudes >= _LEAST)
        best_gain = torch.where(better, gain, best_gain)
        scales = torch.where(better, product / square, scales)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    codes = ((groups * inverse[..., None]).round_().clamp_(-8, 7) + 8).nan_to_num_().to(torch.int16)
    first, second, third, fourth = _in_blocks(codes.flatten(1)).split(BLOCK // 4, dim=2)
    return first | second << 4 | third << 8 | fourth << 12, scales.t()


# Exact conversion of codes to the activations' type, in registers.

_INTERPRETED = tl.constexpr(interpreted())

# (a & mask) | magic is lop3 with 0xea, (a & mask) ^ magic with 0x6a. In bfloat16 0x4300 is 128 and holds 7 more bits;
# in float16 0x6400 is 1024 and holds 10.


def _int4_to(pair: str, one: str, magic: str, minus: str) -> tl.constexpr:
    """Instructions for pairs of numbers of one type; ``minus`` subtracts magic and the offset 8 of a code."""
    return tl.constexpr(f"""{{
        .reg .b32 s, one, minus;
        mov.b32 one, {one};
        mov.b32 minus, {minus};
        lop3.b32 $0, $4, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 4;
        lop3.b32 $1, s, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 8;
        lop3.b32 $2, s, 0x000f000f, {magic}, 0xea;
        shr.u32 s, $4, 12;
        lop3.b32 $3, s, 0x000f000f, {magic}, 0xea;
        fma.rn.{pair} $0, $0, one, minus;
        fma.rn.{pair} $1, $1, one, minus;
        fma.rn.{pair} $2, $2, one, minus;
        fma.rn.{pair} $3, $3, one, minus;
    }}""")


_INT4_TO_BF16 = _int4_to("bf16x2", one="0x3f803f80", magic="0x43004300", minus="0xc308c308")
_INT4_TO_FP16 = _int4_to("f16x2", one="0x3c003c00", magic="0x64006400", minus="0xe408e408")

# 128 + the low 7 bits, minus 128 or, with the sign bit set, 256.
_INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 s, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, $0;
    shr.u32 s, $2, 8;
    lop3.b32 $1, s, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, s, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, minus, $1;
}""")
# 1024 + 128 + the code, minus 1152.
_INT8_TO_FP16 = tl.constexpr("""{
    .reg .b32 s, one, offset;
    mov.b32 one, 0x3c003c00;
    mov.b32 offset, 0xe480e480;
    lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6a;
    shr.u32 s, $2, 8;
    lop3.b32 $1, s, 0x00ff00ff, 0x64806480, 0x6a;
    fma.rn.f16x2 $0, $0, one, offset;
    fma.rn.f16x2 $1, $1, one, offset;
}""")

# The bytes are sorted, low ones first. float16 holds every e4m3 number; from there to bfloat16 the way by float32 is
# the fastest.
_FP8_TO_BF16 = tl.constexpr("""{
    .reg .b32 sorted, halves;
    .reg .b16 low, high, first, second;
    .reg .f32 a, b;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 halves, low;
    mov.b32 {first, second}, halves;
    cvt.f32.f16 a, first;
    cvt.f32.f16 b, second;
    cvt.rn.bf16x2.f32 $0, b, a;
    cvt.rn.f16x2.e4m3x2 halves, high;
    mov.b32 {first, second}, halves;
    cvt.f32.f16 a, first;
    cvt.f32.f16 b, second;
    cvt.rn.bf16x2.f32 $1, b, a;
}""")
_FP8_TO_FP16 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def widen_int4(words, dtype: tl.constexpr):
    """int16 words of four codes (plus 8), from the low bits up: four tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        w = words.to(tl.int32)
        return (
            ((w & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 4 & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 8 & 15) - 8).to(tl.float32).to(dtype),
            ((w >> 12 & 15) - 8).to(tl.float32).to(dtype),
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT4_TO_BF16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def widen_int8(words, dtype: tl.constexpr):
    """int16 words of two int8 codes, the low byte first: two tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        w = words.to(tl.int32)
        return ((w << 24) >> 24).to(tl.float32).to(dtype), (w >> 8).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_TO_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8_TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def widen_fp8(words, dtype: tl.constexpr):
    """int16 words of two e4m3 numbers, the low byte first: two tensors of the words' shape."""
    if dtype == tl.float32 or _INTERPRETED:
        low = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float32).to(dtype), high.to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _FP8_TO_BF16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8_TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


class _ProductTile(NamedTuple):
    rows: int
    warps: int
    stages: int


#: The only tile of ``deterministic`` products.
_FIXED = _ProductTile(64, 8, 3)
#: Otherwise the smallest tile that holds all rows: arithmetic on many absent rows would outlast the loads.
_BY_ROWS = (_ProductTile(16, 8, 4), _FIXED, _ProductTile(128, 8, 4))
#: For float32, without tensor cores.
_SINGLE = _ProductTile(16, 8, 2)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _quantized_kernel(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, arrivals_ptr, rows, columns,
    padded_columns, depth, row_tiles, x_stride, piece_blocks,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PIECES: tl.constexpr, SPLIT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """out = x weight^T (+ bias) (+ residual); with GATE, GATE(first half, second half).

    With SPLIT a program computes one piece of K and stores it in partial [PIECES, rows, columns], in which a tile's
    columns are contiguous; the last program of a tile adds all pieces, in order.
    """
    row_tile, column_tile = tile_place(tl.program_id(0), row_tiles, padded_columns // COLUMNS)
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    place_in_row = column_tile * COLUMNS + lane
    column = place_in_row
    if GATE is not None:  # columns of gate and up by turns
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
    x_ptrs, codes_ptr, scales_ptr, row_inside, column, padded_columns, depth, piece, piece_blocks,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
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
    mask = row_inside if EVEN else row_inside & (k < depth - start)[None, :]
    return tl.trans(tl.load(x_ptrs + (start + k)[None, :], mask, other=0.0))


@triton.jit
def _finish(
    whole, scales_ptr, bias_ptr, residual_ptr, out_ptr, row, row_inside, column, column_tile, columns,
    GROUP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
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
        whole = GATE(gate.to(tl.float32), up.to(tl.float32))
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
        out_dtype, residual: see ``matmul``.
        deterministic: one tile shape for any number of rows, so that a row's result does not depend on it.
    """
    out = result_of(x.shape[0], packed.outputs, x, out_dtype, residual)
    return _product(x, packed, out, residual, gate=None, deterministic=deterministic)


def quantized_gated(
    x: Tensor, packed: TritonQuantizedLinear, activation: Activation = "silu", *, deterministic: bool = True
) -> Tensor:
    """``activate(quantized_matmul(x, packed), activation, gated=True)``, bit for bit, in one launch.

    packed [2 * I, K] has the rows of the gate first; I is a multiple of half of ``COLUMNS``. The result is [T, I] of
    x's type.
    """
    assert packed.outputs % COLUMNS == 0
    out = torch.empty((x.shape[0], packed.outputs // 2), dtype=x.dtype, device=x.device)
    return _product(x, packed, out, None, gate=GATED_FUNCTIONS[activation], deterministic=deterministic)


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
    # With two sums, registers suffice for one program per multiprocessor, which then has all of its shared memory.
    # With one sum, two programs fit and hide each other's latencies.
    stages = shape.stages + (pieces > 1 and not split)
    registers = 128 if split and shape.rows <= _FIXED.rows and packed.group != 32 else None
    _quantized_kernel[(tiles, pieces if split else 1)](
        x, packed.codes, packed.scales, packed.bias, residual, out, partial, packed.arrivals if split else None,
        rows, columns, padded_columns, packed.inputs, row_tiles, x.stride(0), piece_blocks,
        KIND=packed.kind, ROWS=shape.rows, COLUMNS=COLUMNS, BLOCK=BLOCK, GROUP=packed.group,
        EVEN=packed.inputs % BLOCK == 0, PIECES=pieces, SPLIT=split, GATE=gate,
        num_warps=shape.warps, num_stages=stages, maxnreg=registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _shape_of(x: Tensor, deterministic: bool) -> _ProductTile:
    if x.dtype == torch.float32:
        return _SINGLE
    if deterministic:
        return _FIXED
    return next((shape for shape in _BY_ROWS if x.shape[0] <= shape.rows), _BY_ROWS[-1])


# Packed weights: their products are batch-invariant, or computed by cuBLAS.


@dataclass(frozen=True, slots=True)
class TritonDenseWeight(TorchWeight):
    deterministic: bool

    def __call__(
        self, x: Tensor, out_dtype: DType | None = None, add: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        dtype = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        x = x.to(self.weight.dtype)
        if activation is None:
            return self._product(x, dtype, add)
        product = self._product(x, x.dtype, add)
        return activate(product, activation, gated=self.gated).to(dtype)

    def rows(self, ids: Tensor, first: int, *, scale: float, dtype: DType) -> Tensor:
        return embedding(ids, self.weight, first, scale=scale)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        if self.deterministic:
            return matmul(x, self.weight, self.bias, dtype, add)
        product = _torch_product(x, self.weight, dtype if add is None else torch.float32, add)
        return (product if self.bias is None else product.add_(self.bias)).to(dtype)


@dataclass(frozen=True, slots=True)
class TritonQuantizedWeight(PackedWeight):
    """A quantised weight, which products dequantise in registers."""

    codes: TritonQuantizedLinear
    gated: bool
    deterministic: bool

    def __call__(
        self, x: Tensor, out_dtype: DType | None = None, add: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        """One launch for a gated product if nothing is added and the outputs fill whole tiles."""
        dtype = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        if activation is None:
            return quantized_matmul(x, self.codes, dtype, add, deterministic=self.deterministic)
        if self.gated and add is None and self.codes.outputs % COLUMNS == 0:
            return quantized_gated(x, self.codes, activation, deterministic=self.deterministic).to(dtype)
        product = quantized_matmul(x, self.codes, x.dtype, add, deterministic=self.deterministic)
        return activate(product, activation, gated=self.gated).to(dtype)


def _torch_product(x: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
    """x W^T accumulated in float32; with a residual (then ``dtype`` is float32) added in place."""
    transposed = weight.t()
    if dtype == x.dtype:
        return x @ transposed if residual is None else residual.addmm_(x, transposed)
    if not x.is_cuda:  # torch has products with results of another type on GPUs only
        product = x.float() @ transposed.float()
        return product if residual is None else residual.add_(product)
    if residual is None:
        return torch.mm(x, transposed, out_dtype=dtype)
    return torch.addmm(residual, x, transposed, out_dtype=dtype, out=residual)
