"""Attention of a step over the paged cache."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, LayerCache
from octavo.kernels.triton import interpreted
from octavo.kernels.triton.cache import QUANTIZED, KeysAndValues, TritonLayerCache
from octavo.kernels.triton.elementwise import rounded
from octavo.kernels.triton.matmul import dot

# Common arguments of the attention kernels, and their tile sizes.

_LOG2_E = 1.4426950408889634
_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class AttentionForm(NamedTuple):
    """A compile-time argument of kernels: the attention's constants."""

    #: Query heads per KV head.
    group: int
    kv_heads: int
    head_dim: int
    #: The head size rounded up to a power of two, at least the smallest dimension of a product (16).
    dim: int
    #: Tokens per block.
    block_size: int
    #: 0: none.
    window: int
    #: Whether slopes * (position of the key - position of the query) are added to the scores.
    alibi: bool
    #: Scores become cap * tanh(score / cap); 0: no cap.
    cap: float
    #: Whether the cache has scales.
    quantized: bool
    #: Triton's type of the products' operands.
    compute: Any
    #: Whether a token sees none after it, and if so, whether it is an exception that some do.
    causal: bool = True
    spans: bool = False

    @property
    def wide(self) -> bool:
        """Whether products are computed in float32 rather than 16 bits."""
        return bool(self.compute == tl.float32)


class Context(NamedTuple):
    """What the attention kernels know of a layer."""

    cache: KeysAndValues
    #: ALiBi's slopes, float32 [heads], or None.
    slopes: Tensor | None
    #: The batch's ``sees_until``, or None where it is not read.
    until: Tensor | None
    #: KV group of the layer: index of its block tables in the batch.
    kv_group: int
    #: Argument of ``attend``.
    scale: float
    form: AttentionForm


def make_context(q: Tensor, cache: TritonLayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Context:
    """For queries q [T, H, D] of a step."""
    spans = spec.sees_spans and batch.has_spans
    kv_heads, head_dim = cache.key.shape[1], cache.key.shape[3]
    quantized = cache.dtype in QUANTIZED
    # Neither of bfloat16 and float16 includes the other's values; both include those of a quantised cache.
    compute = q.dtype if quantized else torch.promote_types(q.dtype, cache.dtype)
    form = AttentionForm(
        group=q.shape[1] // kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dim=max(16, triton.next_power_of_2(head_dim)),
        block_size=cache.block_size,
        window=spec.window or 0,
        alibi=spec.alibi_slopes is not None,
        cap=float(spec.soft_cap or 0),
        quantized=quantized,
        compute=_COMPUTE[compute],
        causal=spec.causal,
        spans=spans,
    )
    return Context(
        cache.argument,
        None if spec.alibi_slopes is None else _on_device(spec.alibi_slopes, q.device),
        batch.sees_until if spans else None,
        cache.group,
        spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * _LOG2_E,
        form,
    )


@functools.cache
def _on_device(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Never freed, as captured graphs hold its address."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def head_tiles(context: Context, rows: int) -> tuple[int, int]:
    """(query heads, all of one KV head, in a tile of ``rows`` rows; tiles that all heads need)."""
    heads = min(context.form.group, rows)
    return heads, context.form.kv_heads * math.ceil(context.form.group / heads)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of a program, ``rows`` queries and ``keys`` keys, and its launch options."""

    rows: int
    keys: int
    warps: int
    #: Pipeline stages: tiles of keys and values in flight or in use. All but one of them are in shared memory; all of
    #: them if the matrix unit reads them there (tiles of 64 rows and more).
    stages: int

    def fitted(self, context: Context, device: torch.device) -> Tiling:
        """This tiling, with fewer stages or smaller tiles if the device's shared memory is too small."""
        tiling = self
        while tiling._bytes(context) > _shared_memory(device):
            if tiling.stages > 2:
                tiling = replace(tiling, stages=tiling.stages - 1)
            elif tiling.keys > 16:
                tiling = replace(tiling, keys=tiling.keys // 2)
            elif tiling.rows > 16:
                tiling = replace(tiling, rows=tiling.rows // 2)
            else:
                break
        return tiling

    def _bytes(self, context: Context) -> int:
        size = context.cache.key.element_size()
        compute_size = 4 if context.form.wide else 2
        tiles = max(1, self.stages - (self.rows < 64)) * size + (compute_size if size == 1 else 0)
        return (self.rows * compute_size + 2 * self.keys * tiles) * context.form.dim + 4096


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a program; under the interpreter those of a Hopper GPU."""
    if device.type != "cuda":
        return 232448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 under the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


# The online softmax over tiles of keys and values (Milakov & Gimelshein 2018), for all attention kernels.

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


# Attention of one token per sequence, with its context split among programs (flash decoding: Dao et al. 2023).

#: Programs that run side by side on one multiprocessor, and how many times these are wanted over.
_RESIDENT = 3
_ROUNDS = 2
#: More parts than this take longer to combine than they save.
_MOST_PARTS = 64
_COMBINE_PARTS = 32


def decode(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context) -> None:
    """Attention of the batch's decodes.

    Args:
        q: [T, H, D], all rows of the step; the first ``batch.num_decodes`` are used.
        out: [T, H, D], contiguous; those rows are written.
        batch: the step.
        context: of the layer.
    """
    sequences, form = batch.num_decodes, context.form
    tiling = _decode_tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    parts = count_parts(sequences * columns, batch.max_seq_len, tiling.keys, q.device)
    total_heads = form.kv_heads * form.group
    partial = sums = None
    if parts > 1:
        partial = torch.empty(sequences, total_heads, parts, form.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(sequences, total_heads, 2, parts, dtype=torch.float32, device=q.device)
    _decode_kernel[(parts, columns, sequences)](
        q,
        out,
        partial,
        sums,
        batch.positions,
        batch.seq_lens,
        batch.block_tables[context.kv_group],
        context.cache,
        context.slopes,
        *q.stride()[:2],
        batch.block_tables.stride(1),
        context.scale,
        FORM=form,
        HEADS=heads,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        SPLIT=parts > 1,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        _combine_kernel[(sequences * total_heads,)](
            partial,
            sums,
            out,
            parts,
            HEAD_DIM=form.head_dim,
            DIM=form.dim,
            CHUNK=_COMBINE_PARTS,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _decode_tiling(context: Context) -> Tiling:
    """A tiling that fits three programs on a multiprocessor, each with one or two tiles in flight."""
    form = context.form
    rows = min(64, max(16, triton.next_power_of_2(form.group)))
    if form.wide:
        return Tiling(rows, 32, 4, 1)
    # Conversion of bytes is limited by instructions, not bandwidth: larger tiles have less overhead.
    keys = 128 if form.quantized else 64
    return Tiling(rows, keys if form.dim <= 128 else keys // 2, 4, 3)


def count_parts(programs: int, max_seq_len: int, tile: int, device: torch.device) -> int:
    """Parts of each context, for the given number of programs without a split; none is shorter than a tile."""
    wanted = -(-_RESIDENT * _ROUNDS * processors(device) // programs)
    return max(1, min(wanted, _MOST_PARTS, -(-max_seq_len // tile)))


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    positions_ptr,
    seq_lens_ptr,
    tables_ptr,
    cache,
    slopes_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (i, h, s): part i of sequence s's context, for ``HEADS`` query heads of one KV head."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    kv_head = tl.program_id(1) % FORM.kv_heads
    sequence = tl.program_id(2).to(tl.int64)
    # Keys up to the query, which need not be the last token of the context; a padding row has none.
    length = tl.minimum(tl.load(seq_lens_ptr + sequence), tl.load(positions_ptr + sequence) + 1).to(tl.int32)
    rows = tl.arange(0, ROWS)
    group_heads = tl.program_id(1) // FORM.kv_heads * HEADS + rows
    heads = kv_head * FORM.group + group_heads
    in_group = (rows < HEADS) & (group_heads < FORM.group)
    dims = tl.arange(0, FORM.dim)
    inside = in_group[:, None] & (dims[None, :] < FORM.head_dim)
    q_at = sequence * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0).to(FORM.compute)

    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if FORM.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=in_group, other=0.0)

    first = 0
    if FORM.window > 0:
        first = tl.maximum(length - FORM.window, 0) // TILE
    share = ((length + TILE - 1) // TILE - first + parts - 1) // parts
    begin = (first + part * share) * TILE
    end = tl.minimum(begin + share * TILE, length)

    table_ptr = tables_ptr + sequence * table_stride
    positions = length - 1 + rows * 0
    acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, positions, begin, end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
    )  # fmt: skip
    row = sequence * (FORM.kv_heads * FORM.group) + heads
    if SPLIT:
        at = (row[:, None] * parts + part) * FORM.dim + dims[None, :]
        tl.store(partial_ptr + at, acc, mask=(in_group & (l != 0.0))[:, None])
        tl.store(sums_ptr + row * 2 * parts + part, m, mask=in_group)
        tl.store(sums_ptr + (row * 2 + 1) * parts + part, l, mask=in_group)
    else:
        store_attended(out_ptr, acc, l, row, in_group, FORM)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    partial_ptr, sums_ptr, out_ptr, parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr
):
    """Program r: row r of the flattened [sequences, heads], its parts ``CHUNK`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)
    acc = tl.full([DIM], 0.0, dtype=tl.float32)
    total = 0.0
    greatest = NOTHING
    for start in range(0, parts, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        m = tl.load(sums_ptr + row * 2 * parts + chunk, mask=chunk < parts, other=NOTHING)
        l = tl.load(sums_ptr + (row * 2 + 1) * parts + chunk, mask=chunk < parts, other=0.0)  # noqa: E741
        at = (row * parts + chunk)[:, None] * DIM + dims[None, :]
        values = tl.load(partial_ptr + at, mask=(chunk < parts)[:, None], other=0.0)
        values = tl.where((l != 0.0)[:, None], values, 0.0)  # a part without keys has not written its values
        new_greatest = tl.maximum(greatest, tl.max(m, 0))
        weights = tl.exp2(m - new_greatest)
        kept = tl.exp2(greatest - new_greatest)
        acc = acc * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(l * weights, 0)
        greatest = new_greatest
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, rounded(acc, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# Tiles of queries of sequences with several tokens: tokens times query heads of one KV head.


def count_tiles(tokens: int, sequences: int, tile: int) -> int:
    """Tiles that suffice for these tokens, however they are distributed among the sequences; see ``find_tile``."""
    return tokens // tile + sequences


@triton.jit
def find_tile(query_start_ptr, first, sequences, TOKENS: tl.constexpr):
    """Finds the sequence of the program's tile: the tiles of sequences follow each other, each with a spare tile.

    The last tiles, which have the longest contexts, are started first, so that programs end at about the same time.

    Returns:
        The sequence, the tile's number in it, the sequence's first row, and its number of rows.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    origin = tl.load(query_start_ptr + first)
    low = first
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + middle) - origin) // TOKENS + middle - first
        if start <= tile:
            low = middle
        else:
            high = middle
    row = tl.load(query_start_ptr + low)
    start = (row - origin) // TOKENS + low - first
    return low, tile - start, row, tl.load(query_start_ptr + low + 1) - row


@triton.jit
def position_of(positions_ptr, row, queries, length):
    """The position of the query in ``row``, the first of ``queries`` of its sequence; negative for a padding row."""
    return tl.minimum(tl.load(positions_ptr + row), length - queries).to(tl.int32)


@triton.jit
def load_queries(
    q_ptr,
    token_stride,
    head_stride,
    positions_ptr,
    until_ptr,
    slopes_ptr,
    local,
    row,
    queries,
    length,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of the program's tile: ``TOKENS`` tokens with ``HEADS`` query heads of a KV head each.

    Args:
        q_ptr: [T, heads, head_dim]
        token_stride: elements between consecutive tokens; ``head_stride`` likewise.
        head_stride: see above.
        positions_ptr: of all tokens.
        until_ptr: see ``Context``; ``slopes_ptr`` likewise.
        slopes_ptr: see above.
        local: number of the tile in the sequence.
        row: the sequence's first token in q; ``queries`` follow each other from there.
        queries: see above.
        length: of the sequence's context.
        FORM: see ``attention_args``.
        HEADS: see above.
        TOKENS: see above.
        ROWS: ``TOKENS * HEADS`` rounded up to a power of two.

    Returns:
        q [ROWS, ``FORM.dim``] of type ``FORM.compute``, 0 in unused elements; for each row its token in q (int64), its
        query head, whether the row is used, its position in the context, the last position that it attends to (int32)
        and its slope (0 without ALiBi); then the position of the tile's first token, and the position past the last
        that a row attends to.
    """
    rows = tl.arange(0, ROWS)
    tokens = local * TOKENS + rows // HEADS
    group_heads = tl.program_id(0) // FORM.kv_heads * HEADS + rows % HEADS
    valid = (tokens < queries) & (rows < TOKENS * HEADS) & (group_heads < FORM.group)
    flat = (row + tokens).to(tl.int64)
    heads = tl.program_id(0) % FORM.kv_heads * FORM.group + group_heads
    dims = tl.arange(0, FORM.dim)
    at = flat[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dims[None, :] < FORM.head_dim), other=0.0).to(FORM.compute)
    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if FORM.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0)

    first = position_of(positions_ptr, row, queries, length)
    oldest = first + local * TOKENS
    positions = first + tokens
    last = positions
    end = tl.minimum(oldest + TOKENS, first + queries)
    if not FORM.causal:
        last = positions * 0 + length - 1
        end = length
    elif FORM.spans:
        last = tl.maximum(positions, tl.load(until_ptr + flat, mask=valid, other=-1))
        end = tl.minimum(tl.maximum(end, tl.max(tl.where(valid, last, -1), 0) + 1), length)
    return q, flat, heads, valid, positions, last, slopes, oldest, end


# Batch-invariant attention: a row's bits are the same in any batch, as a decode or within a prefill.

#: Tokens of a piece.
PIECE = 512
#: Largest memory for the states of pieces, in bytes; above it they are not split among programs.
_MAX_BYTES = 64 << 20


def fixed_order(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context) -> None:
    """Attention of all sequences of the batch: q [T, H, D] to out [T, H, D], contiguous."""
    sequences, form = batch.seq_lens.shape[0], context.form
    tiling = _fixed_tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0], sequences, tokens)
    flat_rows, pieces = q.shape[0] * q.shape[1], -(-batch.max_seq_len // PIECE)
    parts = count_parts(tiles * columns, batch.max_seq_len, PIECE, q.device)
    if flat_rows * pieces * form.dim * 4 > _MAX_BYTES:
        parts = 1
    partial = sums = None
    if parts > 1:
        partial = torch.empty(flat_rows, pieces, form.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(flat_rows, pieces, 2, dtype=torch.float32, device=q.device)
    _pieces_kernel[(columns, tiles, parts)](
        q,
        out,
        partial,
        sums,
        batch.query_start_loc,
        batch.positions,
        batch.seq_lens,
        batch.block_tables[context.kv_group],
        context.cache,
        context.slopes,
        context.until,
        *q.stride()[:2],
        batch.block_tables.stride(1),
        context.scale,
        sequences,
        pieces,
        FORM=form,
        PIECE_TOKENS=PIECE,
        HEADS=heads,
        TOKENS=tokens,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        SPLIT=parts > 1,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=False,
    )
    if parts > 1:
        _merge_kernel[(q.shape[0], form.kv_heads)](
            partial,
            sums,
            out,
            batch.query_start_loc,
            batch.positions,
            batch.seq_lens,
            context.until,
            sequences,
            pieces,
            FORM=form,
            PIECE_TOKENS=PIECE,
            ROWS=triton.next_power_of_2(form.group),
            num_warps=4,
            enable_fp_fusion=False,
        )


def _fixed_tiling(context: Context) -> Tiling:
    """The tiling, which does not depend on the batch, as it determines the order of sums."""
    form = context.form
    if form.wide:
        return Tiling(32, 32, 8, 1)
    return Tiling(64, 32, 8, 2) if form.dim > 128 else Tiling(64, 64, 4, 3)


@triton.jit(do_not_specialize=["table_stride", "sequences", "pieces"])
def _pieces_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    query_start_ptr,
    positions_ptr,
    seq_lens_ptr,
    tables_ptr,
    cache,
    slopes_ptr,
    until_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    sequences,
    pieces,
    FORM: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (h, t, i): ``TOKENS`` tokens of a sequence, ``HEADS`` heads of one KV head, part i of the pieces."""
    sequence, local, row, queries = find_tile(query_start_ptr, 0, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % FORM.kv_heads
    q, flat, heads, valid, positions, last_key, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        FORM, HEADS, TOKENS, ROWS,
    )  # fmt: skip

    begin = 0
    if FORM.window > 0:
        begin = tl.maximum(oldest - FORM.window + 1, 0) // TILE * TILE
    first = begin // PIECE_TOKENS
    # An empty sequence has one piece, without keys.
    count = tl.maximum((end + PIECE_TOKENS - 1) // PIECE_TOKENS - first, 1)
    share = (count + tl.num_programs(2) - 1) // tl.num_programs(2)
    first += tl.program_id(2) * share
    last = tl.minimum(first + share, begin // PIECE_TOKENS + count)

    dims = tl.arange(0, FORM.dim)
    flat_row = flat * (FORM.kv_heads * FORM.group) + heads
    total_acc, total_l, total_m = state_of_nothing(ROWS, FORM)
    for piece in range(first, last):
        acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
        piece_begin = tl.maximum(piece * PIECE_TOKENS, begin)
        piece_end = tl.minimum((piece + 1) * PIECE_TOKENS, end)
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last_key, piece_begin, piece_end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
        )  # fmt: skip
        if SPLIT:
            at = flat_row * pieces + piece
            tl.store(partial_ptr + at[:, None] * FORM.dim + dims[None, :], acc, mask=valid[:, None])
            tl.store(sums_ptr + 2 * at, l, mask=valid)
            tl.store(sums_ptr + 2 * at + 1, m, mask=valid)
        else:
            total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    if not SPLIT:
        store_attended(out_ptr, total_acc, total_l, flat_row, valid, FORM)


@triton.jit(do_not_specialize=["sequences", "pieces"])
def _merge_kernel(
    partial_ptr,
    sums_ptr,
    out_ptr,
    query_start_ptr,
    positions_ptr,
    seq_lens_ptr,
    until_ptr,
    sequences,
    pieces,
    FORM: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (t, k): merges the pieces that token t attends to, in order, for the query heads of KV head k."""
    token = tl.program_id(0)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    left = tl.load(query_start_ptr + low + 1) - token
    length = tl.load(seq_lens_ptr + low)
    position = position_of(positions_ptr, token, left, length)
    last_key = position
    if FORM.spans:
        last_key = tl.maximum(position, tl.load(until_ptr + token))
    if not FORM.causal:
        last_key = length - 1
    rows = tl.arange(0, ROWS)
    valid = rows < FORM.group
    dims = tl.arange(0, FORM.dim)
    flat_row = token.to(tl.int64) * (FORM.kv_heads * FORM.group) + tl.program_id(1) * FORM.group + rows
    first = 0
    if FORM.window > 0:
        first = tl.maximum(position - FORM.window + 1, 0) // PIECE_TOKENS
    last = tl.maximum(last_key // PIECE_TOKENS, 0) + 1
    total_acc, total_l, total_m = state_of_nothing(ROWS, FORM)
    for piece in range(first, last):
        at = flat_row * pieces + piece
        acc = tl.load(partial_ptr + at[:, None] * FORM.dim + dims[None, :], mask=valid[:, None], other=0.0)
        l = tl.load(sums_ptr + 2 * at, mask=valid, other=0.0)  # noqa: E741
        m = tl.load(sums_ptr + 2 * at + 1, mask=valid, other=NOTHING)
        total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    store_attended(out_ptr, total_acc, total_l, flat_row, valid, FORM)


# Attention of several tokens per sequence: tiles of queries over the paged context (Dao 2023, FlashAttention-2).


def prefill(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context, first: int) -> None:
    """Attention of the batch's sequences from number ``first`` on, which follow its decodes.

    Args:
        q: [T, H, D], all rows of the step.
        out: [T, H, D], contiguous; the rows of those sequences are written.
        batch: the step.
        context: of the layer.
        first: sequences before it have one token each.
    """
    sequences, form = batch.seq_lens.shape[0], context.form
    tiling = _prefill_tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0] - first, sequences - first, tokens)
    _prefill_kernel[(columns, tiles)](
        q,
        out,
        batch.query_start_loc,
        batch.positions,
        batch.seq_lens,
        batch.block_tables[context.kv_group],
        context.cache,
        context.slopes,
        context.until,
        *q.stride()[:2],
        batch.block_tables.stride(1),
        context.scale,
        first,
        sequences,
        FORM=form,
        HEADS=heads,
        TOKENS=tokens,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )


def _prefill_tiling(context: Context) -> Tiling:
    """The tiling with the highest utilisation of Hopper's matrix units that does not spill registers."""
    form = context.form
    if form.wide:
        return Tiling(32, 32, 8, 1)
    if form.dim > 128:
        return Tiling(128, 32, 8, 2)
    if form.quantized or form.alibi:
        return Tiling(128, 64, 8, 3)
    return Tiling(128, 128, 8, 3 if form.dim <= 64 else 2)


@triton.jit(do_not_specialize=["table_stride", "first", "sequences"])
def _prefill_kernel(
    q_ptr,
    out_ptr,
    query_start_ptr,
    positions_ptr,
    seq_lens_ptr,
    tables_ptr,
    cache,
    slopes_ptr,
    until_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    first,
    sequences,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (h, t): ``TOKENS`` tokens of a sequence, for ``HEADS`` query heads of one KV head."""
    sequence, local, row, queries = find_tile(query_start_ptr, first, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % FORM.kv_heads
    q, flat, heads, valid, positions, last, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        FORM, HEADS, TOKENS, ROWS,
    )  # fmt: skip
    acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
    if FORM.window > 0:
        masked_from = tl.maximum(oldest - FORM.window + 1, 0) // TILE * TILE
    else:
        # Keys that all rows attend to; the remaining ones, on the diagonal or of a span, are masked.
        masked_from = (oldest + 1 if FORM.causal else length) // TILE * TILE
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last, 0, masked_from, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, False, TILE,
        )  # fmt: skip
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, last, masked_from, end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
    )  # fmt: skip
    store_attended(out_ptr, acc, l, flat * (FORM.kv_heads * FORM.group) + heads, valid, FORM)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    spec: AttentionSpec,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Attention of each token over its sequence's cached context: causal, of spans or of all of it.

    Args:
        q: [T, H, D], tokens and heads strided.
        cache: keys and values, with those of this step.
        batch: the step; the output of an empty sequence (``seq_lens`` 0) is 0.
        spec: not causal without a window only; its scale is positive.
        deterministic: a row's bits are the same in any batch; see ``attention_fixed``.

    Returns:
        [T, H, D] of q's type, contiguous.
    """
    assert isinstance(cache, TritonLayerCache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = batch.seq_lens.shape[0]
    if not sequences:
        return out
    context = make_context(q, cache, batch, spec)
    if deterministic:
        fixed_order(q, out, batch, context)
        return out
    # A decode sees nothing after its token.
    decodes = batch.num_decodes if context.form.causal and not context.form.spans else 0
    if decodes:
        decode(q, out, batch, context)
    if decodes < sequences:
        prefill(q, out, batch, context, decodes)
    return out
