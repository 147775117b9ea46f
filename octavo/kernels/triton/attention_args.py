"""Common arguments of the attention kernels, and their tile sizes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.interface import AttentionSpec
from octavo.kernels.triton.cache import QUANTIZED, TritonLayerCache

_LOG2_E = 1.4426950408889634
_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Context:
    """A layer's keys and values, and the attention's constants."""

    kv_heads: int
    #: Query heads per KV head.
    group: int
    #: The head size rounded up to a power of two, at least the smallest dimension of a product (16).
    dim: int
    #: Whether products are computed in float32 rather than 16 bits.
    wide: bool
    #: Keys, values, their scales or None, and ALiBi's slopes [heads] or None.
    pointers: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
    #: KV group of the layer: index of its block tables in the batch.
    kv_group: int
    #: Elements between consecutive blocks, of keys and values, and of scales.
    strides: tuple[int, int]
    #: Argument of ``attend``.
    scale: float
    #: Compile-time constants of kernels.
    constants: dict[str, Any]


def make_context(q: Tensor, cache: TritonLayerCache, spec: AttentionSpec) -> Context:
    """For queries q [T, H, D]."""
    kv_heads, head_dim = cache.key.shape[1], cache.key.shape[3]
    quantized = cache.dtype in QUANTIZED
    # Neither of bfloat16 and float16 includes the other's values; both include those of a quantised cache.
    compute = q.dtype if quantized else torch.promote_types(q.dtype, cache.dtype)
    group = q.shape[1] // kv_heads
    dim = max(16, triton.next_power_of_2(head_dim))
    slopes = None if spec.alibi_slopes is None else _on_device(spec.alibi_slopes, q.device)
    return Context(
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        wide=compute == torch.float32,
        pointers=(cache.key, cache.value, cache.key_scale, cache.value_scale, slopes),
        kv_group=cache.group,
        strides=(cache.key.stride(0), 0 if cache.key_scale is None else cache.key_scale.stride(0)),
        scale=spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * _LOG2_E,
        constants={
            "GROUP": group,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "DIM": dim,
            "BLOCK_SIZE": cache.block_size,
            "WINDOW": spec.window or 0,
            "ALIBI": slopes is not None,
            "CAP": float(spec.soft_cap or 0),
            "QUANTIZED": quantized,
            "COMPUTE": _COMPUTE[compute],
        },
    )


@functools.cache
def _on_device(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Never freed, as captured graphs hold its address."""
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def head_tiles(context: Context, rows: int) -> tuple[int, int]:
    """(query heads, all of one KV head, in a tile of ``rows`` rows; tiles per KV head)."""
    heads = min(context.group, rows)
    return heads, math.ceil(context.group / heads)


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
        size = context.pointers[0].element_size()
        compute_size = 4 if context.wide else 2
        tiles = max(1, self.stages - (self.rows < 64)) * size + (compute_size if size == 1 else 0)
        return (self.rows * compute_size + 2 * self.keys * tiles) * context.dim + 4096


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
