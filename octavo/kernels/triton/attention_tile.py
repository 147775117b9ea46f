"""The online softmax over tiles of keys and values (Milakov & Gimelshein 2018), for all attention kernels.

A row's state is the greatest score so far ``m`` (times log2 e, as all exponentials are powers of two), the sum ``l`` of
its weights relative to that, and ``acc``, the sum of its weighted values. Before the first key, ``m`` is ``NOTHING``:
finite, so that no difference is NaN, and so low that its weight relative to any score is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.interpreter import interpreted
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
def state_of_nothing(ROWS: tl.constexpr, FORM: tl.constexpr):
    """(acc, l, m) of rows before their first key."""
    acc = tl.full([ROWS, FORM.dim], 0.0, dtype=tl.float32)
    return acc, tl.full([ROWS], 0.0, dtype=tl.float32), tl.full([ROWS], NOTHING, dtype=tl.float32)


@triton.jit
def attend(
    acc,
    l,  # noqa: E741
    m,
    q,
    positions,
    last,
    begin,
    end,
    length,
    kv_head,
    table_ptr,
    cache,
    scale,
    slopes,
    FORM: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The state after the keys at positions ``begin .. end - 1``, tile by tile.

    Args:
        acc: float32 [rows, dim]
        l: float32 [rows]
        m: float32 [rows]
        q: [rows, dim] of the compute type, 0 past ``head_dim``.
        positions: int32 [rows]: with a window a row attends to keys from its position less ``window - 1`` on.
        last: int32 [rows]: the last key that a row attends to; most often its position.
        begin: first position of the first tile, a multiple of ``TILE``.
        end: position past the last key; a partial last tile is computed as a whole.
        length: tokens in the context; the cache past them is ignored, whatever it contains.
        kv_head: the KV head.
        table_ptr: the sequence's block table.
        cache: ``KeysAndValues`` of ``triton.cache``.
        scale: of scores, times log2 e or, with a cap, divided by the cap.
        slopes: float32 [rows]: with ``alibi``, slope * (position of the key - position of the query) * log2 e is added.
        FORM: see ``attention_args``.
        MASKED: whether keys must be masked for some rows.
        TILE: keys, a power of two.
    """
    head = kv_head * FORM.block_size * FORM.head_dim
    key_ptr, value_ptr = cache.key + head, cache.value + head
    if FORM.quantized:
        key_scale_ptr = cache.key_scale + kv_head * FORM.block_size
        value_scale_ptr = cache.value_scale + kv_head * FORM.block_size
    # Block ids are loaded an iteration ahead: the addresses of keys and values are then known, and as many of these
    # loads are in flight as there are stages.
    following = _blocks_of(table_ptr, begin, length, FORM.block_size, TILE)
    for start in range(begin, end, TILE):
        block = following.to(tl.int64)
        following = _blocks_of(table_ptr, start + TILE, length, FORM.block_size, TILE)
        keys = start + tl.arange(0, TILE)
        offsets = keys % FORM.block_size
        at = block * cache.block_stride + offsets * FORM.head_dim

        k = _load(key_ptr, at, keys, length, FORM, False)
        scores = dot(q, tl.trans(_widened(k, q.dtype)), tl.full([q.shape[0], TILE], 0.0, dtype=tl.float32))
        if FORM.quantized:
            scale_at = block * cache.scale_stride + offsets
            scores *= tl.load(key_scale_ptr + scale_at)[None, :]
        scores, factor = _shaped(scores, scale, keys, positions, slopes, FORM)
        if MASKED:
            seen = keys[None, :] <= last[:, None]
            if FORM.window > 0:
                seen = seen & (keys[None, :] > positions[:, None] - FORM.window)
            scores = tl.where(seen, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        p = tl.exp2(scores * factor - new_m[:, None])
        kept = tl.exp2(m - new_m)
        l = l * kept + tl.sum(p, 1)  # noqa: E741
        m = new_m

        # Values past the context are those of other sequences, possibly NaN, and 0 * NaN is NaN.
        v = _load(value_ptr, at, keys, length, FORM, MASKED)
        if FORM.quantized:
            if MASKED:
                p *= tl.load(value_scale_ptr + scale_at, mask=keys < length, other=0.0)[None, :]
            else:
                p *= tl.load(value_scale_ptr + scale_at)[None, :]
        acc = dot(rounded(p, q.dtype), _widened(v, q.dtype), acc * kept[:, None])
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
def _load(ptr, at, keys, length, FORM: tl.constexpr, MASKED: tl.constexpr):
    """[keys, dim] of the cache, 0 past ``head_dim``; if ``MASKED``, 0 past the context, too."""
    dims = tl.arange(0, FORM.dim)
    ptrs = ptr + at[:, None] + dims[None, :]
    if MASKED:
        return tl.load(ptrs, mask=(keys[:, None] < length) & (dims[None, :] < FORM.head_dim), other=0.0)
    elif FORM.head_dim == FORM.dim:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dims[None, :] < FORM.head_dim, other=0.0)


@triton.jit
def _shaped(scores, scale, keys, positions, slopes, FORM: tl.constexpr):
    """Products of queries and keys with cap and slopes, and the factor that makes them exponents of two."""
    if FORM.cap > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factor of the result is part of the exponential.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.8853900817779268)) + 1.0)
        scale = FORM.cap * 1.4426950408889634
    if FORM.alibi:
        distance = (keys[None, :] - positions[:, None]).to(tl.float32)
        scores = scores * scale + slopes[:, None] * distance * 1.4426950408889634
        scale = 1.0
    return scores, scale


@triton.jit
def merge(acc, l, m, other_acc, other_l, other_m):  # noqa: E741
    """Merges the states of two ranges of keys."""
    new_m = tl.maximum(m, other_m)
    kept = tl.exp2(m - new_m)
    added = tl.exp2(other_m - new_m)
    return acc * kept[:, None] + other_acc * added[:, None], l * kept + other_l * added, new_m


@triton.jit
def store_attended(out_ptr, acc, l, row, valid, FORM: tl.constexpr):  # noqa: E741
    """Writes the results of valid rows, numbers ``row`` of out [T * H, head_dim]; 0 of rows without keys."""
    dims = tl.arange(0, FORM.dim)
    attended = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    inside = valid[:, None] & (dims[None, :] < FORM.head_dim)
    at = row[:, None] * FORM.head_dim + dims[None, :]
    tl.store(out_ptr + at, rounded(attended, out_ptr.dtype.element_ty), mask=inside)


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
