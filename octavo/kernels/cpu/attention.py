"""The KV cache of the CPU kernels.

A layer's keys are one array and its values another, each ``[blocks, bytes of a block]``; csrc/cpu/attention.hpp
describes the layout of a block (transposed panels of 16 tokens, with the scales of an int8 cache). A latent cache has
one array. So blocks of all types of caches are copied and swapped as bytes.
"""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.cache import LayerCache, check_pairs
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import DTYPES, address, cpu, strided
from octavo.kernels.interface import AttentionSpec

_PAGE = 4096
#: Bytes at the beginning of each array of the KV cache that are in small pages.
_SMALL_PAGES = 2 << 20


@dataclass(slots=True)
class CpuLayerCache(LayerCache):
    """``key`` and ``value`` are uint8 [blocks, bytes of a block]."""

    kv_heads: int
    head_dim: int
    block_size: int
    #: int8: a scale for each token and KV head.
    dtype: DType


def block_bytes(kv_heads: int, head_dim: int, block_size: int, dtype: DType) -> int:
    """Bytes of the keys, or of the values, of one block of one layer.

    Raises:
        ConfigError: there is no such type of cache.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"the CPU kernels have no KV cache of type {dtype}; kv_cache_dtype may be auto, float32, bfloat16 or int8"
        )
    return int(cpu.block_bytes(kv_heads, head_dim, block_size, DTYPES[dtype]))


def make_cache(
    layers: int,
    blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DType,
    vectors: int = 2,
) -> list[LayerCache]:
    """The cache of every layer, all zero, each array aligned to a page.

    ``vectors``: 2, or 1 for a latent cache.

    Raises:
        ConfigError: there is no such type of cache.
    """
    stride = block_bytes(kv_heads, head_dim, block_size, dtype)
    size = -(-blocks * stride // _PAGE) * _PAGE
    memory = _untouched_zeros(vectors * layers, size)
    arrays = [
        CpuArray.over(memory[i * size :][: blocks * stride].reshape(blocks, stride)) for i in range(vectors * layers)
    ]
    return [
        CpuLayerCache(key, value, kv_heads, head_dim, block_size, dtype)
        for key, value in zip(arrays[::vectors], arrays[vectors - 1 :: vectors], strict=True)
    ]


def write_op(k: CpuArray, v: CpuArray, cache: LayerCache) -> Any:
    """The operation that writes k and v [T, K, D], tokens strided, or the parts of latents, to the step's slots."""
    assert isinstance(cache, CpuLayerCache)
    return cpu.reshape_and_cache(
        *strided(k),
        *strided(v),
        cache.key.address,
        cache.value.address,
        cache.kv_heads,
        cache.head_dim,
        cache.block_size,
        DTYPES[k.dtype],
        DTYPES[cache.dtype],
        cache.group,
        k.shape[2] if cache.value is cache.key else 0,
    )


@functools.cache
def _slopes(slopes: tuple[float, ...] | None) -> np.ndarray | None:
    """The slopes as an array that is never freed, as operations hold its address."""
    return None if slopes is None else np.array(slopes, np.float32)


def attention_op(q: CpuArray, cache: LayerCache, out: CpuArray, spec: AttentionSpec) -> Any:
    """The operation that computes attention of q [T, H, D], tokens strided, to out, contiguous."""
    assert isinstance(cache, CpuLayerCache)
    return cpu.paged_attention(
        *strided(q),
        out.address,
        cache.key.address,
        cache.value.address,
        q.shape[1],
        cache.kv_heads,
        cache.head_dim,
        cache.block_size,
        DTYPES[q.dtype],
        DTYPES[cache.dtype],
        spec.scale,
        spec.window or 0,
        spec.soft_cap or 0.0,
        address(_slopes(spec.alibi_slopes)),
        spec.causal,
        cache.group,
        spec.value_dim or 0,
        *((0, 0, 0) if spec.bias is None else (address(spec.bias.values), *spec.bias.layout)),
        cross=spec.cross,
        sees_spans=spec.sees_spans,
    )


def copy_blocks(caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """Copies blocks (source, target) in every layer; all sources are read before any target is written."""
    if not pairs:
        return
    for size, group in _by_block_size(caches).items():
        check_pairs(pairs, len(group[0].key), len(group[0].key))
        cpu.copy_blocks(_addresses(group), pairs, size)


def swap_blocks(sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
    """Copies blocks (source, target) from one cache to another of the same type, in every layer."""
    if not pairs:
        return
    to = _by_block_size(targets)
    for size, group in _by_block_size(sources).items():
        check_pairs(pairs, len(group[0].key), len(to[size][0].key))
        cpu.swap_blocks(_addresses(group), _addresses(to[size]), pairs, size)


def _by_block_size(caches: list[LayerCache]) -> dict[int, list[LayerCache]]:
    """Caches by the bytes of their blocks, which differ between KV groups."""
    groups: dict[int, list[LayerCache]] = {}
    for cache in caches:
        groups.setdefault(cache.key.strides[0], []).append(cache)
    return groups


def _addresses(caches: list[LayerCache]) -> list[int]:
    both = ({cache.key.address: None, cache.value.address: None} for cache in caches)  # a latent cache has one
    return [address for addresses in both for address in addresses]


def _untouched_zeros(arrays: int, size: int) -> np.ndarray:
    """uint8 zeros for so many arrays of ``size`` bytes, which use no memory until they are written.

    They are in huge pages if the system has them, but for the first bytes of each array. A sequence's blocks are
    anywhere in the cache: with small pages each would need an entry in the TLB. The first blocks are few, and they are
    the first that are written: of a huge page for each layer all is zeroed in the first step of an engine.
    """
    if size == 0:
        return np.zeros(0, np.uint8)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(arrays * size, np.uint8)
    memory = mmap.mmap(-1, arrays * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        for end in range(size, arrays * size + 1, size):
            begin = -(-(end - size + _SMALL_PAGES) // mmap.PAGESIZE) * mmap.PAGESIZE
            if begin < end:
                memory.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)
    return np.frombuffer(memory, np.uint8)
