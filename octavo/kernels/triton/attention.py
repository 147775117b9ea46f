"""Attention of a step over the paged cache. Read ``paged_attention`` first, then ``attend``, shared by all kernels."""

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

_LOG2_E = 1.4426950408889634
_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def paged_attention(
    q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec, *, deterministic: bool = False
) -> Tensor:
    """See ``Kernels.paged_attention``; the output of an empty sequence (``seq_lens`` 0) is 0.

    Args:
        q: tokens and heads strided.
        spec: its scale is positive; a window only if causal.
        deterministic: a row's bits are the same in any batch.
    """
    assert isinstance(cache, TritonLayerCache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = batch.seq_lens.shape[0]
    if sequences:
        args = make_args(q, cache, batch, spec)
        # A decode sees nothing after its token.
        decodes = batch.num_decodes if args.config.causal and not args.config.spans else 0
        if deterministic:
            fixed_order(q, out, batch, args)
        else:
            if decodes:
                decode(q, out, batch, args)
            if decodes < sequences:
                prefill(q, out, batch, args, decodes)
    # Over a latent cache the whole key is summed: its end, the rotated part, is a ninth of it.
    return out if spec.value_dim is None else out[:, :, : spec.value_dim].contiguous()


# Arguments of the attention kernels, and their tile sizes.


class AttentionConfig(NamedTuple):
    """A compile-time argument of kernels: the attention's constants."""

    #: Query heads per KV head.
    group: int
    kv_heads: int
    head_dim: int
    #: ``head_dim`` rounded up to a power of two, at least the smallest dimension of a product (16).
    dim: int
    block_size: int
    #: 0: none.
    window: int
    alibi: bool
    #: Soft cap of the scores; 0: none.
    cap: float
    #: Whether the cache has scales.
    quantized: bool
    #: Triton's type of the products' operands.
    compute: Any
    causal: bool = True
    #: Whether some tokens see later ones although attention is causal.
    spans: bool = False
    sinks: bool = False
    #: See ``AttentionSpec.chunked``.
    chunked: bool = False

    @property
    def wide(self) -> bool:
        return bool(self.compute == tl.float32)

    @property
    def large(self) -> bool:
        """Whether sums of more than 16 rows exceed the registers, as over latent caches."""
        return self.dim > 256


class AttentionArgs(NamedTuple):
    """Arguments of the attention kernels that are constant for a layer and step."""

    cache: KeysAndValues
    #: ALiBi's slopes, float32 [heads], or None.
    slopes: Tensor | None
    #: The batch's ``sees_until``, or None where it is not read.
    until: Tensor | None
    #: See ``LayerCache.group``.
    kv_group: int
    #: See ``attend``.
    scale: float
    config: AttentionConfig
    #: See ``AttentionSpec``.
    sinks: Tensor | None = None


def make_args(q: Tensor, cache: TritonLayerCache, batch: ForwardBatch, spec: AttentionSpec) -> AttentionArgs:
    spans = spec.sees_spans and batch.has_spans
    kv_heads, head_dim = cache.key.shape[1], cache.key.shape[3]
    quantized = cache.dtype in QUANTIZED
    # Neither of bfloat16 and float16 includes the other's values; both include those of a quantised cache.
    compute = q.dtype if quantized else torch.promote_types(q.dtype, cache.dtype)
    config = AttentionConfig(
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
        sinks=spec.sinks is not None,
        chunked=spec.chunked,
    )
    return AttentionArgs(
        cache.argument,
        None if spec.alibi_slopes is None else _on_device(spec.alibi_slopes, q.device),
        batch.sees_until if spans else None,
        cache.group,
        spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * _LOG2_E,
        config,
        spec.sinks,
    )


@functools.cache
def _on_device(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Never freed, as captured graphs hold its address."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def head_tiles(args: AttentionArgs, rows: int) -> tuple[int, int]:
    """(query heads, all of one KV head, in a tile of ``rows`` rows; tiles that all heads need)."""
    heads = min(args.config.group, rows)
    return heads, args.config.kv_heads * math.ceil(args.config.group / heads)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of a program, ``rows`` queries and ``keys`` keys, and its launch options."""

    rows: int
    keys: int
    warps: int
    #: Pipeline stages: tiles of keys and values in flight or in use. All but one of them are in shared memory; all of
    #: them if the matrix unit reads them there (tiles of 64 rows and more).
    stages: int

    def fitted(self, args: AttentionArgs, device: torch.device) -> Tiling:
        """This tiling, with fewer stages or smaller tiles if the device's shared memory is too small."""
        tiling = self
        while tiling._bytes(args) > _shared_memory(device):
            if tiling.stages > 2:
                tiling = replace(tiling, stages=tiling.stages - 1)
            elif tiling.keys > 16:
                tiling = replace(tiling, keys=tiling.keys // 2)
            elif tiling.rows > 16:
                tiling = replace(tiling, rows=tiling.rows // 2)
            else:
                break
        return tiling

    def _bytes(self, args: AttentionArgs) -> int:
        size = args.cache.key.element_size()
        compute_size = 4 if args.config.wide else 2
        tiles = max(1, self.stages - (self.rows < 64)) * size + (compute_size if size == 1 else 0)
        return (self.rows * compute_size + 2 * self.keys * tiles) * args.config.dim + 4096


#: See ``AttentionConfig.large``.
_LARGE = Tiling(16, 32, 8, 2)


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
NO_KEYS = tl.constexpr(-1.0e30)


@triton.jit
def state_of_nothing(ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """(acc, l, m) of rows before their first key."""
    acc = tl.full([ROWS, CONFIG.dim], 0.0, dtype=tl.float32)
    return acc, tl.full([ROWS], 0.0, dtype=tl.float32), tl.full([ROWS], NO_KEYS, dtype=tl.float32)


@triton.jit
def first_key(position, CONFIG: tl.constexpr):
    """The first position that tokens at ``position`` attend to, with a window."""
    if CONFIG.chunked:  # noqa: SIM108
        first = position // CONFIG.window * CONFIG.window
    else:
        first = tl.maximum(position - CONFIG.window + 1, 0)
    return first


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
    CONFIG: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The state after the keys at positions ``begin .. end - 1``, tile by tile.

    Args:
        acc: float32 [rows, dim]
        l: float32 [rows]
        m: float32 [rows]
        q: [rows, dim] of the compute type, 0 past ``head_dim``.
        positions: int32 [rows]: with a window a row attends to keys from ``first_key`` of its position on.
        last: int32 [rows]: the last key that a row attends to; most often its position.
        begin: first position of the first tile, a multiple of ``TILE``.
        end: position past the last key; a partial last tile is computed as a whole.
        length: tokens in the context; the cache past them is ignored, whatever it contains.
        table_ptr: the sequence's block table.
        scale: of scores, times log2 e or, with a cap, divided by the cap.
        slopes: float32 [rows]: with ``alibi``, slope * (position of the key - position of the query) * log2 e is added.
        MASKED: whether keys must be masked for some rows.
        TILE: keys, a power of two.
    """
    head = kv_head * CONFIG.block_size * CONFIG.head_dim
    key_ptr, value_ptr = cache.key + head, cache.value + head
    if CONFIG.quantized:
        key_scale_ptr = cache.key_scale + kv_head * CONFIG.block_size
        value_scale_ptr = cache.value_scale + kv_head * CONFIG.block_size
    # Block ids are loaded an iteration ahead: the addresses of keys and values are then known, and as many of these
    # loads are in flight as there are stages.
    following = _blocks_of(table_ptr, begin, length, CONFIG.block_size, TILE)
    for start in range(begin, end, TILE):
        block = following.to(tl.int64)
        following = _blocks_of(table_ptr, start + TILE, length, CONFIG.block_size, TILE)
        keys = start + tl.arange(0, TILE)
        offsets = keys % CONFIG.block_size
        at = block * cache.block_stride + offsets * CONFIG.head_dim

        k = _load(key_ptr, at, keys, length, CONFIG, False)
        scores = dot(q, tl.trans(_widen(k, q.dtype)), tl.full([q.shape[0], TILE], 0.0, dtype=tl.float32))
        if CONFIG.quantized:
            scale_at = block * cache.scale_stride + offsets
            scores *= tl.load(key_scale_ptr + scale_at)[None, :]
        scores, factor = _cap_and_bias(scores, scale, keys, positions, slopes, CONFIG)
        if MASKED:
            seen = keys[None, :] <= last[:, None]
            if CONFIG.window > 0:
                seen = seen & (keys[None, :] >= first_key(positions, CONFIG)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        p = tl.exp2(scores * factor - new_m[:, None])
        kept = tl.exp2(m - new_m)
        l = l * kept + tl.sum(p, 1)  # noqa: E741
        m = new_m

        # Values past the context are those of other sequences, possibly NaN, and 0 * NaN is NaN.
        v = _load(value_ptr, at, keys, length, CONFIG, MASKED)
        if CONFIG.quantized:
            if MASKED:
                p *= tl.load(value_scale_ptr + scale_at, mask=keys < length, other=0.0)[None, :]
            else:
                p *= tl.load(value_scale_ptr + scale_at)[None, :]
        acc = dot(rounded(p, q.dtype), _widen(v, q.dtype), acc * kept[:, None])
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
def _load(ptr, at, keys, length, CONFIG: tl.constexpr, MASKED: tl.constexpr):
    """[keys, dim] of the cache, 0 past ``head_dim``; if ``MASKED``, 0 past the context, too."""
    dims = tl.arange(0, CONFIG.dim)
    ptrs = ptr + at[:, None] + dims[None, :]
    if MASKED:
        return tl.load(ptrs, mask=(keys[:, None] < length) & (dims[None, :] < CONFIG.head_dim), other=0.0)
    elif CONFIG.head_dim == CONFIG.dim:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dims[None, :] < CONFIG.head_dim, other=0.0)


@triton.jit
def _cap_and_bias(scores, scale, keys, positions, slopes, CONFIG: tl.constexpr):
    """(scores with cap and slopes applied, their factor in exponents of two)."""
    if CONFIG.cap > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1); the factor of the result is part of the exponential.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.8853900817779268)) + 1.0)
        scale = CONFIG.cap * 1.4426950408889634
    if CONFIG.alibi:
        distance = (keys[None, :] - positions[:, None]).to(tl.float32)
        scores = scores * scale + slopes[:, None] * distance * 1.4426950408889634
        scale = 1.0
    return scores, scale


@triton.jit
def merge(acc, l, m, other_acc, other_l, other_m):  # noqa: E741
    new_m = tl.maximum(m, other_m)
    kept = tl.exp2(m - new_m)
    added = tl.exp2(other_m - new_m)
    return acc * kept[:, None] + other_acc * added[:, None], l * kept + other_l * added, new_m


@triton.jit
def with_sinks(l, m, sinks):  # noqa: E741
    """(factor of the results, sum) with a sink for each row, once all keys are summed."""
    sinks *= 1.4426950408889634
    new_m = tl.maximum(m, sinks)
    kept = tl.exp2(m - new_m)
    return kept, l * kept + tl.exp2(sinks - new_m)


@triton.jit
def store_attended(out_ptr, sinks_ptr, acc, l, m, row, valid, CONFIG: tl.constexpr):  # noqa: E741
    """Writes the results of valid rows, numbers ``row`` of out [T * H, head_dim]; 0 of rows without keys."""
    dims = tl.arange(0, CONFIG.dim)
    if CONFIG.sinks:
        kept, l = with_sinks(l, m, tl.load(sinks_ptr + row % (CONFIG.kv_heads * CONFIG.group), valid, other=0.0))  # noqa: E741
        acc *= kept[:, None]
    attended = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    inside = valid[:, None] & (dims[None, :] < CONFIG.head_dim)
    at = row[:, None] * CONFIG.head_dim + dims[None, :]
    tl.store(out_ptr + at, rounded(attended, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _widen(x, dtype: tl.constexpr):
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


# Decodes: one token per sequence, its context split among programs (flash decoding: Dao et al. 2023).

#: Concurrent programs on one multiprocessor, and rounds of them that a launch should have.
_RESIDENT = 3
_ROUNDS = 2
#: More parts take longer to combine than they save.
_MOST_PARTS = 64
_COMBINE_PARTS = 32


def decode(q: Tensor, out: Tensor, batch: ForwardBatch, args: AttentionArgs) -> None:
    """Attention of the batch's decodes: the first ``batch.num_decodes`` rows of q [T, H, D] to those of out."""
    sequences, config = batch.num_decodes, args.config
    tiling = _decode_tiling(args).fitted(args, q.device)
    heads, columns = head_tiles(args, tiling.rows)
    parts = count_parts(sequences * columns, batch.max_seq_len, tiling.keys, q.device)
    total_heads = config.kv_heads * config.group
    partial = sums = None
    if parts > 1:
        partial = torch.empty(sequences, total_heads, parts, config.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(sequences, total_heads, 2, parts, dtype=torch.float32, device=q.device)
    _decode_kernel[(parts, columns, sequences)](
        q, out, partial, sums, batch.positions, batch.seq_lens, batch.block_tables[args.kv_group], args.cache,
        args.slopes, args.sinks, *q.stride()[:2], batch.block_tables.stride(1), args.scale,
        CONFIG=config, HEADS=heads, ROWS=tiling.rows, TILE=tiling.keys, SPLIT=parts > 1, num_warps=tiling.warps,
        num_stages=tiling.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[(sequences * total_heads,)](
            partial, sums, out, args.sinks, parts, total_heads,
            HEAD_DIM=config.head_dim, DIM=config.dim, CHUNK=_COMBINE_PARTS // (8 if config.large else 1), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


def _decode_tiling(args: AttentionArgs) -> Tiling:
    """A tiling that fits three programs on a multiprocessor, each with one or two tiles in flight."""
    config = args.config
    if config.large:
        return _LARGE
    rows = min(64, max(16, triton.next_power_of_2(config.group)))
    if config.wide:
        return Tiling(rows, 32, 4, 1)
    # Conversion of bytes is limited by instructions, not bandwidth: larger tiles have less overhead.
    keys = 128 if config.quantized else 64
    return Tiling(rows, keys if config.dim <= 128 else keys // 2, 4, 3)


def count_parts(programs: int, max_seq_len: int, tile: int, device: torch.device) -> int:
    """Parts of each context, none shorter than a tile, if there are ``programs`` programs without a split."""
    parts = -(-_RESIDENT * _ROUNDS * processors(device) // programs)
    return max(1, min(parts, _MOST_PARTS, -(-max_seq_len // tile)))


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr, out_ptr, partial_ptr, sums_ptr, positions_ptr, seq_lens_ptr, tables_ptr, cache, slopes_ptr, sinks_ptr,
    q_token_stride, q_head_stride, table_stride, scale,
    CONFIG: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (i, h, s): part i of sequence s's context, for ``HEADS`` query heads of one KV head."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    kv_head = tl.program_id(1) % CONFIG.kv_heads
    sequence = tl.program_id(2).to(tl.int64)
    # Keys up to the query, which need not be the last token of the context; a padding row has none.
    length = tl.minimum(tl.load(seq_lens_ptr + sequence), tl.load(positions_ptr + sequence) + 1).to(tl.int32)
    rows = tl.arange(0, ROWS)
    group_heads = tl.program_id(1) // CONFIG.kv_heads * HEADS + rows
    heads = kv_head * CONFIG.group + group_heads
    in_group = (rows < HEADS) & (group_heads < CONFIG.group)
    dims = tl.arange(0, CONFIG.dim)
    inside = in_group[:, None] & (dims[None, :] < CONFIG.head_dim)
    q_at = sequence * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0).to(CONFIG.compute)

    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if CONFIG.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=in_group, other=0.0)

    first = 0
    if CONFIG.window > 0:
        first = first_key(length - 1, CONFIG) // TILE
    share = ((length + TILE - 1) // TILE - first + parts - 1) // parts
    begin = (first + part * share) * TILE
    end = tl.minimum(begin + share * TILE, length)

    table_ptr = tables_ptr + sequence * table_stride
    positions = length - 1 + rows * 0
    acc, l, m = state_of_nothing(ROWS, CONFIG)  # noqa: E741
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, positions, begin, end, length, kv_head, table_ptr, cache, scale, slopes,
            CONFIG, True, TILE,
    )  # fmt: skip
    row = sequence * (CONFIG.kv_heads * CONFIG.group) + heads
    if SPLIT:
        at = (row[:, None] * parts + part) * CONFIG.dim + dims[None, :]
        tl.store(partial_ptr + at, acc, mask=(in_group & (l != 0.0))[:, None])
        tl.store(sums_ptr + row * 2 * parts + part, m, mask=in_group)
        tl.store(sums_ptr + (row * 2 + 1) * parts + part, l, mask=in_group)
    else:
        store_attended(out_ptr, sinks_ptr, acc, l, m, row, in_group, CONFIG)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    partial_ptr, sums_ptr, out_ptr, sinks_ptr, parts, heads,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program r: row r of the flattened [sequences, heads], its parts ``CHUNK`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)
    acc = tl.full([DIM], 0.0, dtype=tl.float32)
    total = 0.0
    greatest = NO_KEYS
    for start in range(0, parts, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        m = tl.load(sums_ptr + row * 2 * parts + chunk, mask=chunk < parts, other=NO_KEYS)
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
    if sinks_ptr is not None:
        kept, total = with_sinks(total, greatest, tl.load(sinks_ptr + row % heads))
        acc *= kept
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, rounded(acc, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# Tiles of queries for sequences with several tokens: tokens times query heads of one KV head.


def count_tiles(tokens: int, sequences: int, tile: int) -> int:
    """Tiles that suffice for ``tokens``, however they are distributed among the sequences; see ``find_tile``."""
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
    q_ptr, token_stride, head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
    CONFIG: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of the program's tile: ``TOKENS`` tokens with ``HEADS`` query heads of a KV head each.

    Args:
        q_ptr: [T, heads, head_dim]
        local: number of the tile in the sequence.
        row: the sequence's first token in q; ``queries`` tokens follow from there.
        length: of the sequence's context.
        ROWS: ``TOKENS * HEADS`` rounded up to a power of two.

    Returns:
        q [ROWS, ``CONFIG.dim``] of type ``CONFIG.compute``, 0 in unused elements; for each row its token in q (int64),
        its query head, whether the row is used, its position in the context, the last position that it attends to
        (int32) and its slope (0 without ALiBi); then the position of the tile's first token, and the position past the
        last that a row attends to.
    """
    rows = tl.arange(0, ROWS)
    tokens = local * TOKENS + rows // HEADS
    group_heads = tl.program_id(0) // CONFIG.kv_heads * HEADS + rows % HEADS
    valid = (tokens < queries) & (rows < TOKENS * HEADS) & (group_heads < CONFIG.group)
    flat = (row + tokens).to(tl.int64)
    heads = tl.program_id(0) % CONFIG.kv_heads * CONFIG.group + group_heads
    dims = tl.arange(0, CONFIG.dim)
    at = flat[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dims[None, :] < CONFIG.head_dim), other=0.0).to(CONFIG.compute)
    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if CONFIG.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0)

    first = position_of(positions_ptr, row, queries, length)
    oldest = first + local * TOKENS
    positions = first + tokens
    last = positions
    end = tl.minimum(oldest + TOKENS, first + queries)
    if not CONFIG.causal:
        last = positions * 0 + length - 1
        end = length
    elif CONFIG.spans:
        last = tl.maximum(positions, tl.load(until_ptr + flat, mask=valid, other=-1))
        end = tl.minimum(tl.maximum(end, tl.max(tl.where(valid, last, -1), 0) + 1), length)
    return q, flat, heads, valid, positions, last, slopes, oldest, end


# Batch-invariant attention: a row's bits are the same in any batch, as a decode or within a prefill.

#: Tokens of a piece of the context, whose state does not depend on the batch.
PIECE = 512
#: Above this number of bytes for the states of pieces, they are not split among programs.
_MAX_BYTES = 64 << 20


def fixed_order(q: Tensor, out: Tensor, batch: ForwardBatch, args: AttentionArgs) -> None:
    """Attention of all sequences of the batch: q [T, H, D] to out [T, H, D], contiguous."""
    sequences, config = batch.seq_lens.shape[0], args.config
    tiling = _fixed_tiling(args).fitted(args, q.device)
    heads, columns = head_tiles(args, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0], sequences, tokens)
    flat_rows, pieces = q.shape[0] * q.shape[1], -(-batch.max_seq_len // PIECE)
    parts = count_parts(tiles * columns, batch.max_seq_len, PIECE, q.device)
    if flat_rows * pieces * config.dim * 4 > _MAX_BYTES:
        parts = 1
    partial = sums = None
    if parts > 1:
        partial = torch.empty(flat_rows, pieces, config.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(flat_rows, pieces, 2, dtype=torch.float32, device=q.device)
    _pieces_kernel[(columns, tiles, parts)](
        q, out, partial, sums, batch.query_start_loc, batch.positions, batch.seq_lens,
        batch.block_tables[args.kv_group], args.cache, args.slopes, args.until, args.sinks, *q.stride()[:2],
        batch.block_tables.stride(1), args.scale, sequences, pieces,
        CONFIG=config, PIECE_TOKENS=PIECE, HEADS=heads, TOKENS=tokens, ROWS=tiling.rows, TILE=tiling.keys,
        SPLIT=parts > 1, num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if parts > 1:
        rows = triton.next_power_of_2(min(config.group, 16) if config.large else config.group)
        _merge_kernel[(q.shape[0], config.kv_heads * -(-config.group // rows))](
            partial, sums, out, batch.query_start_loc, batch.positions, batch.seq_lens, args.until, args.sinks,
            sequences, pieces,
            CONFIG=config, PIECE_TOKENS=PIECE, ROWS=rows, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def _fixed_tiling(args: AttentionArgs) -> Tiling:
    """Independent of the batch, as it determines the order of sums."""
    config = args.config
    if config.large:
        return _LARGE
    if config.wide:
        return Tiling(32, 32, 8, 1)
    return Tiling(64, 32, 8, 2) if config.dim > 128 else Tiling(64, 64, 4, 3)


@triton.jit(do_not_specialize=["table_stride", "sequences", "pieces"])
def _pieces_kernel(
    q_ptr, out_ptr, partial_ptr, sums_ptr, query_start_ptr, positions_ptr, seq_lens_ptr, tables_ptr, cache, slopes_ptr,
    until_ptr, sinks_ptr, q_token_stride, q_head_stride, table_stride, scale, sequences, pieces,
    CONFIG: tl.constexpr, PIECE_TOKENS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (h, t, i): ``TOKENS`` tokens of a sequence, ``HEADS`` heads of one KV head, part i of the pieces."""
    sequence, local, row, queries = find_tile(query_start_ptr, 0, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % CONFIG.kv_heads
    q, flat, heads, valid, positions, last_key, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        CONFIG, HEADS, TOKENS, ROWS,
    )  # fmt: skip

    begin = 0
    if CONFIG.window > 0:
        begin = first_key(oldest, CONFIG) // TILE * TILE
    first = begin // PIECE_TOKENS
    # An empty sequence has one piece, without keys.
    count = tl.maximum((end + PIECE_TOKENS - 1) // PIECE_TOKENS - first, 1)
    share = (count + tl.num_programs(2) - 1) // tl.num_programs(2)
    first += tl.program_id(2) * share
    last = tl.minimum(first + share, begin // PIECE_TOKENS + count)

    dims = tl.arange(0, CONFIG.dim)
    flat_row = flat * (CONFIG.kv_heads * CONFIG.group) + heads
    total_acc, total_l, total_m = state_of_nothing(ROWS, CONFIG)
    for piece in range(first, last):
        acc, l, m = state_of_nothing(ROWS, CONFIG)  # noqa: E741
        piece_begin = tl.maximum(piece * PIECE_TOKENS, begin)
        piece_end = tl.minimum((piece + 1) * PIECE_TOKENS, end)
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last_key, piece_begin, piece_end, length, kv_head, table_ptr, cache, scale, slopes,
            CONFIG, True, TILE,
        )  # fmt: skip
        if SPLIT:
            at = flat_row * pieces + piece
            tl.store(partial_ptr + at[:, None] * CONFIG.dim + dims[None, :], acc, mask=valid[:, None])
            tl.store(sums_ptr + 2 * at, l, mask=valid)
            tl.store(sums_ptr + 2 * at + 1, m, mask=valid)
        else:
            total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    if not SPLIT:
        store_attended(out_ptr, sinks_ptr, total_acc, total_l, total_m, flat_row, valid, CONFIG)


@triton.jit(do_not_specialize=["sequences", "pieces"])
def _merge_kernel(
    partial_ptr, sums_ptr, out_ptr, query_start_ptr, positions_ptr, seq_lens_ptr, until_ptr, sinks_ptr, sequences,
    pieces,
    CONFIG: tl.constexpr, PIECE_TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (t, k): merges the pieces that token t attends to, in order, for ``ROWS`` query heads of a KV head."""
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
    if CONFIG.spans:
        last_key = tl.maximum(position, tl.load(until_ptr + token))
    if not CONFIG.causal:
        last_key = length - 1
    rows = tl.program_id(1) // CONFIG.kv_heads * ROWS + tl.arange(0, ROWS)
    valid = rows < CONFIG.group
    dims = tl.arange(0, CONFIG.dim)
    kv_head = tl.program_id(1) % CONFIG.kv_heads
    flat_row = token.to(tl.int64) * (CONFIG.kv_heads * CONFIG.group) + kv_head * CONFIG.group + rows
    first = 0
    if CONFIG.window > 0:
        first = first_key(position, CONFIG) // PIECE_TOKENS
    last = tl.maximum(last_key // PIECE_TOKENS, 0) + 1
    total_acc, total_l, total_m = state_of_nothing(ROWS, CONFIG)
    for piece in range(first, last):
        at = flat_row * pieces + piece
        acc = tl.load(partial_ptr + at[:, None] * CONFIG.dim + dims[None, :], mask=valid[:, None], other=0.0)
        l = tl.load(sums_ptr + 2 * at, mask=valid, other=0.0)  # noqa: E741
        m = tl.load(sums_ptr + 2 * at + 1, mask=valid, other=NO_KEYS)
        total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    store_attended(out_ptr, sinks_ptr, total_acc, total_l, total_m, flat_row, valid, CONFIG)


# Prefills: several tokens per sequence, in tiles of queries over the paged context (Dao 2023, FlashAttention-2).


def prefill(q: Tensor, out: Tensor, batch: ForwardBatch, args: AttentionArgs, first: int) -> None:
    """Attention of the sequences from number ``first`` on, which follow as many decodes: rows of q to those of out."""
    sequences, config = batch.seq_lens.shape[0], args.config
    tiling = _prefill_tiling(args).fitted(args, q.device)
    heads, columns = head_tiles(args, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0] - first, sequences - first, tokens)
    _prefill_kernel[(columns, tiles)](
        q, out, batch.query_start_loc, batch.positions, batch.seq_lens, batch.block_tables[args.kv_group],
        args.cache, args.slopes, args.until, args.sinks, *q.stride()[:2], batch.block_tables.stride(1), args.scale,
        first, sequences,
        CONFIG=config, HEADS=heads, TOKENS=tokens, ROWS=tiling.rows, TILE=tiling.keys, num_warps=tiling.warps,
        num_stages=tiling.stages, enable_fp_fusion=True,
    )  # fmt: skip


def _prefill_tiling(args: AttentionArgs) -> Tiling:
    """The tiling with the highest utilisation of Hopper's matrix units that does not spill registers."""
    config = args.config
    if config.large:
        return _LARGE
    if config.wide:
        return Tiling(32, 32, 8, 1)
    if config.dim > 128:
        return Tiling(128, 32, 8, 2)
    if config.quantized or config.alibi:
        return Tiling(128, 64, 8, 3)
    return Tiling(128, 128, 8, 3 if config.dim <= 64 else 2)


@triton.jit(do_not_specialize=["table_stride", "first", "sequences"])
def _prefill_kernel(
    q_ptr, out_ptr, query_start_ptr, positions_ptr, seq_lens_ptr, tables_ptr, cache, slopes_ptr, until_ptr, sinks_ptr,
    q_token_stride, q_head_stride, table_stride, scale, first, sequences,
    CONFIG: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (h, t): ``TOKENS`` tokens of a sequence, for ``HEADS`` query heads of one KV head."""
    sequence, local, row, queries = find_tile(query_start_ptr, first, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % CONFIG.kv_heads
    q, flat, heads, valid, positions, last, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        CONFIG, HEADS, TOKENS, ROWS,
    )  # fmt: skip
    acc, l, m = state_of_nothing(ROWS, CONFIG)  # noqa: E741
    if CONFIG.window > 0:
        masked_from = first_key(oldest, CONFIG) // TILE * TILE
    else:
        # Keys that all rows attend to; the remaining ones, on the diagonal or of a span, are masked.
        masked_from = (oldest + 1 if CONFIG.causal else length) // TILE * TILE
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last, 0, masked_from, length, kv_head, table_ptr, cache, scale, slopes,
            CONFIG, False, TILE,
        )  # fmt: skip
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, last, masked_from, end, length, kv_head, table_ptr, cache, scale, slopes,
            CONFIG, True, TILE,
    )  # fmt: skip
    row = flat * (CONFIG.kv_heads * CONFIG.group) + heads
    store_attended(out_ptr, sinks_ptr, acc, l, m, row, valid, CONFIG)
