"""The KV cache of the GPU kernels: a pool of bytes for each KV group, in which a block of all layers is contiguous.

A block is ``layers`` times a layer's part, and a layer's part is keys, values and, for quantised caches, the scales of
keys and of values: ``[kv_heads, block_size, head_dim]`` elements each, scales without the last dimension. So the tokens
of a block are contiguous for each head, and blocks of all types are copied and swapped in large pieces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.cache import LayerCache, check_pairs
from octavo.kernels.torch_pinned import host_copy, host_empty

#: Types of caches without scales.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
#: Types of caches with a scale for each token and head, and the value that the largest magnitude is scaled to.
QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: A layer's part of a block begins at a multiple of this, and each array in it at a multiple of ``_VECTOR``: loads of
#: 16 bytes need the latter, whole cache lines the former.
_LINE = 128
_VECTOR = 16
#: Eight-byte words that one program copies.
_COPY_WORDS = 2048


class KeysAndValues(NamedTuple):
    """An argument of kernels: a layer's cache."""

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
    """``key`` and ``value`` are strided views [blocks, kv_heads, block_size, head_dim] of the pool."""

    #: Scales of quantised caches: float32 views [blocks, kv_heads, block_size].
    key_scale: Tensor | None
    value_scale: Tensor | None
    #: uint8 [blocks, bytes of a block in all layers of the group]; the same tensor in all layers.
    pool: Tensor
    dtype: torch.dtype
    block_size: int

    @property
    def argument(self) -> KeysAndValues:
        """The cache, as kernels take it."""
        scale_stride = 0 if self.key_scale is None else self.key_scale.stride(0)
        return KeysAndValues(self.key, self.value, self.key_scale, self.value_scale, self.key.stride(0), scale_stride)


def block_bytes(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer: keys, values, scales and padding.

    Raises:
        ConfigError: there is no such type of cache.
    """
    return _offsets(block_size, kv_heads, head_dim, dtype)[-1]


def make_cache(
    layers: int,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[TritonLayerCache]:
    """The cache of every layer, all zero. On a CPU it uses no memory until it is written.

    Raises:
        ConfigError: there is no such type of cache, or the GPU has no such type.
    """
    device = torch.device(device)
    size = layers * block_bytes(block_size, kv_heads, head_dim, dtype)
    if device.type == "cpu":  # torch writes its zeros, calloc does not
        pool = torch.from_numpy(np.zeros(blocks * size, dtype=np.uint8)).view(blocks, size)
    else:
        _check_capability(device, dtype)
        pool = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
    return _views(pool, layers, block_size, kv_heads, head_dim, dtype)


def make_host_cache(
    layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[TritonLayerCache]:
    """The same layout in host memory; where there is a GPU pinned, so that copies run beside kernels."""
    if not torch.cuda.is_available():
        return make_cache(layers, blocks, block_size, kv_heads, head_dim, dtype, "cpu")
    size = layers * block_bytes(block_size, kv_heads, head_dim, dtype)
    pool = host_empty((blocks, size), torch.uint8).zero_()
    return _views(pool, layers, block_size, kv_heads, head_dim, dtype)


def copy_blocks(caches: Sequence[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """Copies block to block (source, target), in every layer; all sources are read before any target is written.

    Raises:
        IndexError: there is no such block.
    """
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


def swap_blocks(
    sources: Sequence[LayerCache],
    targets: Sequence[LayerCache],
    pairs: list[tuple[int, int]],
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Queues copies of blocks (source, target) of one cache to another, in every layer, on the current stream.

    Blocks that are neighbours in both caches are one copy. Nothing waits for the copies.

    Args:
        sources: caches of all layers that are read.
        targets: caches of all layers that are written.
        pairs: blocks; no target comes twice.
        stream: queue on this one instead.

    Raises:
        IndexError: there is no such block.
    """
    if not pairs:
        return
    for source, target in zip(_pools(sources), _pools(targets), strict=True):
        check_pairs(pairs, source.shape[0], target.shape[0])
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for first, to, count in _runs(pairs):
                target[to : to + count].copy_(source[first : first + count], non_blocking=True)


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


def _offsets(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Where keys, values, key scales and value scales begin in a layer's part of a block, and where it ends."""
    if dtype not in PLAIN and dtype not in QUANTIZED:
        known = ", ".join(str(known) for known in (*PLAIN, *QUANTIZED))
        raise ConfigError(f"the triton kernels have no KV cache of type {dtype}; known: {known}")
    numbers = _round_up(block_size * kv_heads * head_dim * dtype.itemsize, _VECTOR)
    scales = _round_up(block_size * kv_heads * 4, _VECTOR) if dtype in QUANTIZED else 0
    end = 2 * numbers + 2 * scales
    return 0, numbers, 2 * numbers, 2 * numbers + scales, _round_up(end, _LINE)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _views(
    pool: Tensor, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[TritonLayerCache]:
    key, value, key_scale, value_scale, end = _offsets(block_size, kv_heads, head_dim, dtype)

    def view(start: int, dtype: torch.dtype, *shape: int) -> Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        return pool[:, start : start + size].view(dtype).unflatten(1, shape)

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
    """The pool of each group of layers."""
    pools: dict[int, Tensor] = {}
    for cache in caches:
        assert isinstance(cache, TritonLayerCache)
        pools[id(cache.pool)] = cache.pool
    return list(pools.values())


def _check_capability(device: torch.device, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"kv_cache_dtype=fp8 needs a GPU of compute capability 8.9 or newer; {name} is older: use int8"
        )


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
