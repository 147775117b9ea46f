"""The online softmax over tiles of keys and values (Milakov & Gimelshein 2018), for all attention kernels.

A row's state is the greatest score so far ``m`` (times log2 e, as all exponentials are powers of two), the sum ``l`` of
its weights relative to that, and ``acc``, the sum of its weighted values. Before the first key, ``m`` is ``NOTHING``:
finite, so that no difference is NaN, and so low that its weight relative to any score is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels import interpreted
from octavo.kernels.triton.rounding import rounded
from octavo.kernels.triton.tiles import dot

_INTERPRETED = tl.constexpr(interpreted())

# Four codes in a word, two a result: 128 + the low 7 bits, minus 128 or, with the sign bit set, 256. Conversions of
# integers one by one would take longer than their way from memory.
_INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 s, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 s, $2, 0, 0x4140;
    lop3.b32 sign, s, 0x00800080, 0x43004300, 0xea;
    lop3.b32 s, s, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, s;
    prmt.b32 s, $2, 0, 0x4342;
    lop3.b32 sign, s, 0x00800080, 0x43004300, 0xea;
    lop3.b32 s, s, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, minus, s;
}""")

#: ``m`` of a row without keys.
NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def attend(
    acc,
    l,  # noqa: E741
    m,
    q,
    positions,
    begin,
    end,
    length,
    kv_head,
    table_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_stride,
    scale_block_stride,
    scale,
    slopes,
    ALIBI: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """The state after the keys at positions ``begin .. end - 1``, tile by tile.

    Args:
        acc: float32 [rows, DIM]
        l: float32 [rows]
        m: float32 [rows]
        q: [rows, DIM] of the compute type, 0 past ``HEAD_DIM``.
        positions: int32 [rows]: a row attends to keys up to its position, with a window to the last ``WINDOW`` of them.
        begin: first position of the first tile, a multiple of ``TILE``.
        end: position past the last key; a partial last tile is computed as a whole.
        length: tokens in the context; the cache past them is ignored, whatever it contains.
        kv_head: the KV head.
        table_ptr: the sequence's block table.
        key_ptr: block 0 of the keys; ``value_ptr`` and the scales likewise.
        value_ptr: see above.
        key_scale_ptr: float32 [KV heads, BLOCK_SIZE] per block, if ``QUANTIZED``.
        value_scale_ptr: see above.
        block_stride: elements between consecutive blocks; ``scale_block_stride`` likewise.
        scale_block_stride: see above.
        scale: of scores, times log2 e or, with ``CAP``, divided by the cap.
        slopes: float32 [rows]: with ``ALIBI``, slope * (position of the key - position of the query) * log2 e is added.
        ALIBI: see above.
        CAP: scores become cap * tanh(score / cap); 0: no cap.
        WINDOW: 0: none.
        BLOCK_SIZE: tokens per block.
        HEAD_DIM: head size.
        MASKED: whether keys must be masked for some rows.
        QUANTIZED: the cache has scales.
        TILE: keys, a power of two.
        DIM: ``HEAD_DIM`` rounded up to a power of two.
    """
    key_ptr += kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr += kv_head * BLOCK_SIZE * HEAD_DIM
    if QUANTIZED:
        key_scale_ptr += kv_head * BLOCK_SIZE
        value_scale_ptr += kv_head * BLOCK_SIZE
    # Block ids are loaded an iteration ahead: the addresses of keys and values are then known, and as many of these
    # loads are in flight as there are stages.
    block = _blocks_of(table_ptr, begin, length, BLOCK_SIZE, TILE)
    for start in range(begin, end, TILE):
        following = _blocks_of(table_ptr, start + TILE, length, BLOCK_SIZE, TILE)
        acc, l, m = _attend_to_tile(  # noqa: E741
            acc, l, m, q, positions, start, length, block, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
            block_stride, scale_block_stride, scale, slopes,
            ALIBI, CAP, WINDOW, BLOCK_SIZE, HEAD_DIM, MASKED, QUANTIZED, TILE, DIM,
        )  # fmt: skip
        block = following
    return acc, l, m


@triton.jit
def _blocks_of(table_ptr, start, length, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of a tile's keys: int32 [TILE], or one for all of them; block 0 past the context."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < length, other=0)
    else:
        keys = start + tl.arange(0, TILE)
        return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < length, other=0)


@triton.jit
def _attend_to_tile(
    acc,
    l,  # noqa: E741
    m,
    q,
    positions,
    start,
    length,
    block,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_stride,
    scale_block_stride,
    scale,
    slopes,
    ALIBI: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """``attend`` for the ``TILE`` keys from ``start`` on, in the blocks of ``_blocks_of``."""
    keys = start + tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    offsets = keys % BLOCK_SIZE
    block = block.to(tl.int64)
    at = block * block_stride + offsets * HEAD_DIM

    if HEAD_DIM == DIM:
        k = tl.load(key_ptr + at[:, None] + dims[None, :])
    else:
        k = tl.load(key_ptr + at[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
    scores = dot(q, tl.trans(_widened(k, q.dtype)), tl.full([q.shape[0], TILE], 0.0, dtype=tl.float32))
    if QUANTIZED:
        scale_at = block * scale_block_stride + offsets
        scores *= tl.load(key_scale_ptr + scale_at)[None, :]
    if CAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factor of the result is part of the exponential.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.8853900817779268)) + 1.0)
        scale = CAP * 1.4426950408889634
    if ALIBI:
        distance = (keys[None, :] - positions[:, None]).to(tl.float32)
        scores = scores * scale + slopes[:, None] * distance * 1.4426950408889634
        scale = 1.0
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - new_m[:, None])
    kept = tl.exp2(m - new_m)
    l = l * kept + tl.sum(p, 1)  # noqa: E741
    acc = acc * kept[:, None]

    # Values past the context are those of other sequences, possibly NaN, and 0 * NaN is NaN.
    if MASKED:
        inside = (keys[:, None] < length) & (dims[None, :] < HEAD_DIM)
        v = tl.load(value_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0)
    elif HEAD_DIM == DIM:
        v = tl.load(value_ptr + at[:, None] + dims[None, :])
    else:
        v = tl.load(value_ptr + at[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
    if QUANTIZED:
        if MASKED:
            p *= tl.load(value_scale_ptr + scale_at, mask=keys < length, other=0.0)[None, :]
        else:
            p *= tl.load(value_scale_ptr + scale_at)[None, :]
    acc = dot(rounded(p, q.dtype), _widened(v, q.dtype), acc)
    return acc, l, new_m


@triton.jit
def merge(acc, l, m, other_acc, other_l, other_m):  # noqa: E741
    """Merges the states of two ranges of keys."""
    new_m = tl.maximum(m, other_m)
    kept = tl.exp2(m - new_m)
    added = tl.exp2(other_m - new_m)
    return acc * kept[:, None] + other_acc * added[:, None], l * kept + other_l * added, new_m


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Values of a cache in the compute type; exact."""
    if x.dtype == tl.int8:
        if dtype == tl.bfloat16 and not _INTERPRETED:
            return tl.inline_asm_elementwise(_INT8_TO_BF16, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            return x.to(tl.float32).to(dtype)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16).to(tl.float32).to(dtype)  # faster than the direct conversion
    else:
        return x.to(dtype)
