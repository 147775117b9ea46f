"""The KV cache of the GPU kernels: a pool of bytes for each KV group, in which a block of all layers is contiguous.

For each layer, a block has keys, values and, in quantised caches, the scales of keys and of values:
``[kv_heads, block_size, head_dim]`` elements each, scales without the last dimension. So the tokens of a block are
contiguous for each head, and blocks of all types are copied and swapped in large pieces. In a latent cache the values
are parts of the keys; a recurrent state has keys only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.interface import LayerCache, Wait, check_pairs, check_rows, no_wait
from octavo.kernels.torch_backend import check_fp8, host_copy, host_empty, to_torch
from octavo.kernels.triton.elementwise import rounded

#: Types of caches without scales.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
#: Types of caches with a scale for each token and head, and the value to which the largest magnitude is scaled.
QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: A layer's part of a block begins at a multiple of this, and each array in it at a multiple of ``_VECTOR``: loads of
#: 16 bytes need the latter, whole cache lines the former.
_LINE = 128
_VECTOR = 16
#: Eight-byte words that one program copies.
_COPY_WORDS = 2048


class KeysAndValues(NamedTuple):
    """A layer's cache as an argument of kernels."""

    key: Tensor
    value: Tensor
    #: float32 [blocks, KV heads, block size]; None of a cache without scales.
    key_scale: Tensor | None
    value_scale: Tensor | None
    #: Elements between consecutive blocks, of keys and values, and of scales.
    block_stride: int
    scale_stride: int


@dataclass(slots=True)
class TritonLayerCache(LayerCache):
    """``key`` and ``value`` are strided views [blocks, kv_heads, block_size, head_dim] of the pool.

    They are the same numbers in a cache with one vector for each token.
    """

    #: Scales of quantised caches: float32 views [blocks, kv_heads, block_size].
    key_scale: Tensor | None
    value_scale: Tensor | None
    #: uint8 [blocks, bytes of a block in all layers of the group]; the same tensor in all layers.
    pool: Tensor
    dtype: torch.dtype
    block_size: int

    @property
    def argument(self) -> KeysAndValues:
        scale_stride = 0 if self.key_scale is None else self.key_scale.stride(0)
        return KeysAndValues(self.key, self.value, self.key_scale, self.value_scale, self.key.stride(0), scale_stride)


def block_bytes(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, vectors: int = 2) -> int:
    """Bytes of one block of one layer: keys, values, scales and padding; ``vectors``: see ``KVSpec.vectors``."""
    return _offsets(block_size, kv_heads, head_dim, dtype, vectors)[-1]


def make_cache(
    layers: int,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    vectors: int = 2,
) -> list[TritonLayerCache]:
    """The cache of every layer, all zero. On a CPU it uses no memory until it is written."""
    device = torch.device(device)
    size = layers * block_bytes(block_size, kv_heads, head_dim, dtype, vectors)
    if device.type == "cpu":  # torch writes its zeros, calloc does not
        pool = torch.from_numpy(np.zeros(blocks * size, dtype=np.uint8)).view(blocks, size)
    else:
        if dtype == torch.float8_e4m3fn:
            check_fp8(device, "kv_cache_dtype=fp8")
        pool = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
    return _views(pool, layers, block_size, kv_heads, head_dim, dtype, vectors)


def make_host_cache(
    layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, vectors: int = 2
) -> list[TritonLayerCache]:
    """The same layout in host memory, pinned if there is a GPU, so that copies run beside kernels."""
    if not torch.cuda.is_available():
        return make_cache(layers, blocks, block_size, kv_heads, head_dim, dtype, "cpu", vectors)
    size = layers * block_bytes(block_size, kv_heads, head_dim, dtype, vectors)
    pool = host_empty((blocks, size), torch.uint8).zero_()
    return _views(pool, layers, block_size, kv_heads, head_dim, dtype, vectors)


def copy_blocks(caches: Sequence[LayerCache], pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    for pool in (pool.view(torch.int64) for pool in _pools(caches)):
        check_pairs(pairs, pool.shape[0], pool.shape[0])
        moves = torch.tensor(pairs, dtype=torch.int64)
        moves = (host_copy(moves) if pool.is_cuda else moves).to(pool.device, non_blocking=True)
        if {source for source, _ in pairs} & {target for _, target in pairs}:
            pool.index_copy_(0, moves[:, 1], pool.index_select(0, moves[:, 0]))
            continue
        words = pool.shape[1]
        grid = (len(pairs), triton.cdiv(words, _COPY_WORDS))
        _copy_kernel[grid](pool, moves, words, CHUNK=_COPY_WORDS, num_warps=8, enable_fp_fusion=False)


def swap_blocks(sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """See ``Kernels.swap_blocks``; queues the copies on the current stream, without waiting.

    Blocks that are neighbours in both caches are one copy. No target comes twice.
    """
    if not pairs:
        return
    for source, target in zip(_pools(sources), _pools(targets), strict=True):
        check_pairs(pairs, source.shape[0], target.shape[0])
        for first, to, count in _runs(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)


def host_bytes(count: int) -> np.ndarray:
    """See ``Kernels.host_bytes``; pinned if there is a GPU."""
    if not torch.cuda.is_available():
        return np.empty(count, np.uint8)
    pinned: np.ndarray = host_empty(count, torch.uint8).numpy()
    return pinned


def read_blocks(caches: Sequence[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
    """See ``Kernels.read_blocks``; gathers the blocks on the device, so that they go to the host as one copy."""
    pools = _pools(caches)
    check_rows(caches, blocks, rows, sum(pool.shape[1] for pool in pools))
    if not blocks or not pools:
        return no_wait
    numbers = _numbers(blocks, pools[0].device)
    parts = [pool.index_select(0, numbers) for pool in pools]
    to_torch(rows).copy_(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), non_blocking=True)
    return _wait_for(pools[0].device)


def write_blocks(caches: Sequence[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
    """See ``Kernels.write_blocks``."""
    pools = _pools(caches)
    sizes = [pool.shape[1] for pool in pools]
    check_rows(caches, blocks, rows, sum(sizes))
    if not blocks or not pools:
        return no_wait
    numbers = _numbers(blocks, pools[0].device)
    parts = to_torch(rows).to(pools[0].device, non_blocking=True).split(sizes, dim=1)
    for pool, part in zip(pools, parts, strict=True):
        pool.index_copy_(0, numbers, part)
    return _wait_for(pools[0].device)


def _numbers(blocks: list[int], device: torch.device) -> Tensor:
    numbers = torch.tensor(blocks, dtype=torch.int64)
    return (host_copy(numbers) if device.type == "cuda" else numbers).to(device, non_blocking=True)


def _wait_for(device: torch.device) -> Wait:
    """Waits for what is queued on the current stream now."""
    if device.type != "cuda":
        return no_wait
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first target, blocks) of each run of pairs that are neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        if runs:
            first, to, count = runs[-1]
            if (source, target) == (first + count, to + count):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((source, target, 1))
    return runs


def _offsets(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, vectors: int
) -> tuple[int, int, int, int, int]:
    """Starts of keys, values, key scales and value scales in a layer's part of a block, and its size."""
    if dtype not in PLAIN and dtype not in QUANTIZED:
        names = ", ".join(map(str, (*PLAIN, *QUANTIZED)))
        raise ConfigError(f"the triton kernels have no KV cache of type {dtype}; known: {names}")
    numbers = _round_up(block_size * kv_heads * head_dim * dtype.itemsize, _VECTOR)
    scales = _round_up(block_size * kv_heads * 4, _VECTOR) if dtype in QUANTIZED else 0
    value, end = max(0, vectors - 1) * numbers, vectors * numbers
    return 0, value, end, end + scales, _round_up(end + 2 * scales, _LINE)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _views(
    pool: Tensor, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, vectors: int
) -> list[TritonLayerCache]:
    key, value, key_scale, value_scale, end = _offsets(block_size, kv_heads, head_dim, dtype, vectors)

    def view(start: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return pool[:, start : start + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)

    numbers, scales = (kv_heads, block_size, head_dim), (kv_heads, block_size)
    caches = []
    for layer in range(layers):
        at = layer * end
        quantized = dtype in QUANTIZED
        caches.append(
            TritonLayerCache(
                key=view(at + key, dtype, *numbers),
                value=view(at + value, dtype, *numbers),
                key_scale=view(at + key_scale, torch.float32, *scales) if quantized else None,
                value_scale=view(at + value_scale, torch.float32, *scales) if quantized else None,
                pool=pool,
                dtype=dtype,
                block_size=block_size,
            )
        )
    return caches


def _pools(caches: Sequence[LayerCache]) -> list[Tensor]:
    pools: dict[int, Tensor] = {}
    for cache in caches:
        assert isinstance(cache, TritonLayerCache)
        pools[id(cache.pool)] = cache.pool
    return list(pools.values())


@triton.jit
def _copy_kernel(pool_ptr, pairs_ptr, words, CHUNK: tl.constexpr):
    """Program (i, j) copies piece j of the block that pair i names."""
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < words
    data = tl.load(pool_ptr + source * words + offsets, mask=inside)
    tl.store(pool_ptr + target * words + offsets, data, mask=inside)


# Rotary embedding and cache write in one launch.

#: Approximate number of query elements that a program rotates: 16 per thread, which fit into its registers.
_PROGRAM_ELEMENTS = 2048


class Sections(NamedTuple):
    """The sections of a head as an argument of the kernel, which follow the axes of positions in turn."""

    axes: int
    #: Number of sections of one pair before the others, and the first pair of each of the others but the first.
    single: int
    second: int
    third: int
    fourth: int


class Queries(NamedTuple):
    """The queries and their rotation as an argument of the kernel."""

    q: Tensor
    out: Tensor
    positions: Tensor
    cos_sin: Tensor
    token_stride: int
    head_stride: int
    cos_sin_stride: int
    #: Elements between the positions of consecutive axes.
    axis_stride: int


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    sections: Sequence[int] = (),
) -> Tensor:
    """See ``Kernels.rotary`` and ``Kernels.reshape_and_cache``; returns q rotated, contiguous.

    q, k and v may be views of one tensor, and are not changed. k and v are rounded to q's type before they are written
    to the cache. There are at most four sections behind those of one pair each.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    queries = Queries(q, out, positions, cos_sin, q.stride(0), q.stride(1), cos_sin.stride(0), positions.stride(0))
    _launch(queries, k, v, cache, slots, q.shape[1] // k.shape[1], cos_sin.shape[1], sections)
    return out


def reshape_and_cache(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """See ``Kernels.reshape_and_cache``; k and v may be strided views."""
    if k.shape[2] < cache.key.shape[3]:  # of a latent cache
        k = v = torch.cat((k, v), dim=2)
    _launch(None, k, v, cache, slots, 1, 0)


def _launch(
    queries: Queries | None,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    slots: Tensor,
    group: int,
    rotated: int,
    sections: Sequence[int] = (),
) -> None:
    assert isinstance(cache, TritonLayerCache)
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    dim = triton.next_power_of_2(head_dim)
    kv_tile = min(triton.next_power_of_2(kv_heads), max(1, _PROGRAM_ELEMENTS // (group * dim)))
    kv_tile = 1 << (kv_tile.bit_length() - 1)
    tile = triton.next_power_of_2(kv_tile * group)
    axes = 0 if queries is None or not sections else len(queries.positions)
    single = 0 if len(sections) <= max(axes, 4) else len([*itertools.takewhile(lambda pairs: pairs == 1, sections)])
    ends = [*itertools.accumulate(sections[single:], initial=single)][1:]
    if len(ends) > 4:
        raise ConfigError(
            f"the triton backend has at most four rotary sections behind those of one pair: {[*sections]}"
        )
    section_starts = Sections(axes, single, *ends[:-1], *[sum(sections)] * (3 - len(ends[:-1])))
    _rotary_and_cache_kernel[(tokens, triton.cdiv(kv_heads, kv_tile))](
        queries, k, v, slots, cache.argument, *k.stride()[:2], *v.stride()[:2],
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROTATED=rotated, SECTIONS=section_starts,
        BLOCK_SIZE=cache.block_size, LARGEST=QUANTIZED.get(cache.dtype, 0.0), TILE=tile, KV_TILE=kv_tile, DIM=dim,
        num_warps=min(16, max(1, tile * dim // 512)), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _rotary_and_cache_kernel(
    queries, k_ptr, v_ptr, slots_ptr, cache, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, SECTIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (t, j): the j-th ``KV_TILE`` KV heads of token t, and the query heads that share them."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KV_TILE
    dims = tl.arange(0, DIM)
    if ROTATED > 0:
        angles = tl.where(dims < ROTATED // 2, dims, dims - ROTATED // 2)
        if SECTIONS.axes > 0:
            axis = (angles >= SECTIONS.second).to(tl.int64) + (angles >= SECTIONS.third) + (angles >= SECTIONS.fourth)
            axis = tl.where(angles < SECTIONS.single, angles, SECTIONS.single + axis) % SECTIONS.axes
            at = queries.positions + axis * queries.axis_stride + token
            row = queries.cos_sin + tl.load(at, mask=dims < ROTATED, other=0) * queries.cos_sin_stride
        else:
            row = queries.cos_sin + tl.load(queries.positions + token) * queries.cos_sin_stride
        cos = tl.load(row + angles, mask=dims < ROTATED, other=1.0)
        sin = tl.load(row + ROTATED // 2 + angles, mask=dims < ROTATED, other=0.0)
        sin = tl.where(dims < ROTATED // 2, -sin, sin)

        heads = first * GROUP + tl.arange(0, TILE)
        last = tl.minimum(first + KV_TILE, KV_HEADS) * GROUP
        q_inside = (heads[:, None] < last) & (dims[None, :] < HEAD_DIM)
        q_ptr = queries.q + token * queries.token_stride
        q = _rotated(q_ptr, queries.head_stride, heads, dims, q_inside, cos, sin, ROTATED)
        at = token * (GROUP * KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(queries.out + at, q, mask=q_inside)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        kv_heads = first + tl.arange(0, KV_TILE)
        inside = (kv_heads[:, None] < KV_HEADS) & (dims[None, :] < HEAD_DIM)
        k_ptr += token * k_token_stride
        if ROTATED > 0:
            k = _rotated(k_ptr, k_head_stride, kv_heads, dims, inside, cos, sin, ROTATED)
        else:
            k = _heads_of(k_ptr, k_head_stride, kv_heads, dims, inside)
        v = _heads_of(v_ptr + token * v_token_stride, v_head_stride, kv_heads, dims, inside)
        numbers_at = (
            slot // BLOCK_SIZE * cache.block_stride
            + kv_heads[:, None] * (BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM + dims[None, :]
        )  # fmt: skip
        scale_at = slot // BLOCK_SIZE * cache.scale_stride + kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE
        here = kv_heads < KV_HEADS
        _write(k, inside, cache.key + numbers_at, cache.key_scale, scale_at, here, LARGEST)
        _write(v, inside, cache.value + numbers_at, cache.value_scale, scale_at, here, LARGEST)


@triton.jit
def _heads_of(x_ptr, head_stride, heads, dims, inside):
    """Heads of one token [heads, DIM]."""
    return tl.load(x_ptr + heads[:, None] * head_stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _rotated(x_ptr, head_stride, heads, dims, inside, cos, sin, ROTATED: tl.constexpr):
    """Heads of one token [heads, DIM], rotated, of x's type; ``sin`` is negative in the first half."""
    partners = tl.where(dims < ROTATED // 2, dims + ROTATED // 2, dims - ROTATED // 2)
    x = _heads_of(x_ptr, head_stride, heads, dims, inside)
    partner = _heads_of(x_ptr, head_stride, heads, partners, inside & (dims[None, :] < ROTATED))
    rotated = x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]
    return rounded(rotated, x.dtype)


@triton.jit
def _write(x, inside, cache_ptrs, scale_ptr, scale_at, here, LARGEST: tl.constexpr):
    """Writes x [heads, DIM] to the cache; with ``LARGEST``, each head is scaled to this greatest magnitude."""
    if LARGEST > 0:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 1)
        largest = tl.where(largest < 1e-30, 1e-30, largest)  # keeps NaN, as tl.maximum need not
        tl.store(scale_ptr + scale_at, largest / LARGEST, mask=here)
        x = x * (LARGEST / largest)[:, None]
        x = _to_integer(x) if cache_ptrs.dtype.element_ty == tl.int8 else _to_e4m3(x)
    tl.store(cache_ptrs, rounded(x.to(tl.float32), cache_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _to_integer(x):
    """The nearest integer, ties to even: adding 1.5 * 2^23 rounds off the fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """The nearest e4m3 number, ties to even, so that the following cast is exact (in the interpreter too).

    Four significant bits by Veltkamp's splitting (Dekker 1971); below 2^-6 multiples of 2^-9.
    """
    large = x * 1048577.0  # 2^20 + 1
    normal = large - (large - x)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2^14
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)
