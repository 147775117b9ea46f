"""Common arguments of the attention kernels, and their tile sizes."""

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
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.triton.cache import QUANTIZED, KeysAndValues, TritonLayerCache

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
