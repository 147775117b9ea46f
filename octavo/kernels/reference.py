"""The reference backend in plain torch: slow, short, and the standard for faster backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.kv_spec import KVSpec
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import Activation
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.kernels.torch_arrays import torch_dtype
from octavo.kernels.torch_attention import plain_attention
from octavo.kernels.torch_kernels import TorchKernels, TorchWeight
from octavo.kernels.torch_lora import TorchAdapters
from octavo.kernels.torch_sampling import TorchLogits

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class PlainWeight(TorchWeight):
    """A weight of this backend, as it is in the checkpoint."""

    def rows(self, ids: Tensor, first: int, *, scale: float, dtype: DType) -> Tensor:
        """See ``PackedWeight``."""
        rows = masked_embedding(ids, self.weight, first)
        return rows if scale == 1.0 else rows.mul_(scale)

    def __call__(
        self,
        x: Tensor,
        out_dtype: DType | None = None,
        add: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Computed in float32 and rounded once, except a plain product in the type of x."""
        to = x.dtype if out_dtype is None else torch_dtype(out_dtype)
        x = x.to(self.weight.dtype)
        if to == x.dtype and add is None and activation is None:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        product = F.linear(x.float(), self.weight.float(), bias)
        if add is not None:
            product += add
        if self.gated:
            assert activation is not None
            gate, up = product.chunk(2, dim=-1)
            product = _ACTIVATIONS[activation](gate) * up
        elif activation is not None:
            product = _ACTIVATIONS[activation](product)
        return product.to(to)


class ReferenceKernels(TorchKernels):
    """Plain torch on any device."""

    name = "reference"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.adapters = TorchAdapters()

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets torch's threads, which cannot be pinned; None leaves their number unchanged."""
        if count is not None:
            torch.set_num_threads(count)

    def make_sampling_backend(self, vocab_size: int) -> TorchLogits:
        """The numpy backend, on the host."""
        return TorchLogits(vocab_size)

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Keys and values without padding.

        Raises:
            ConfigError: the dtype is not a floating-point type; this backend has no scales.
        """
        dtype = torch_dtype(spec.dtype)
        if not DType(spec.dtype).is_float:
            raise ConfigError(
                f"the reference backend has no KV cache of type {spec.dtype}; kv_cache_dtype may be auto, float32, "
                "bfloat16 or float16"
            )
        return spec.vectors * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Keys and values [blocks, block_size, kv_heads, head_dim] of each layer, of a latent cache one; all zero."""
        shape, dtype = (blocks, block_size, spec.num_kv_heads, spec.head_dim), torch_dtype(spec.dtype)
        arrays = [_untouched_zeros(shape, dtype, self.device) for _ in range(spec.vectors * layers)]
        pairs = zip(arrays[:: spec.vectors], arrays[spec.vectors - 1 :: spec.vectors], strict=True)
        return [LayerCache(key, value) for key, value in pairs]

    def pack(
        self,
        parts: Sequence[np.ndarray | QuantizedRows],
        bias: np.ndarray | None = None,
        quantization: str | None = None,
        *,
        dtype: DType,
        gated: bool = False,
        pieces: int = 1,
    ) -> PlainWeight:
        """Stacks the tensors."""
        matrices = [part for part in parts if isinstance(part, np.ndarray)]
        if len(matrices) < len(parts) or quantization not in (None, "gguf"):
            raise ConfigError(
                f"the {self.name} backend has no quantised products: it cannot serve "
                f"quantization={quantization or 'gguf'!r}"
            )
        return PlainWeight(*self.stack(matrices, bias, dtype), gated)

    def embedding(
        self, ids: Tensor, table: Tensor, first: int = 0, *, scale: float = 1.0, add: Tensor | None = None
    ) -> Tensor:
        """Rows of the table, float32 [T, E]."""
        rows = masked_embedding(ids, table, first)
        rows = rows if scale == 1.0 else rows.mul_(scale)
        return rows if add is None else rows.add_(add)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        out_dtype: DType | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """Computed in float32, rounded once."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps) * weight
        return normed.to(_result(out_dtype, weight)) if add is None else normed.float() + add

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        out_dtype: DType | None = None,
    ) -> Tensor:
        """Computed in float32, rounded once."""
        floats = None if bias is None else bias.float()
        normed = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), floats, eps)
        return normed.to(_result(out_dtype, weight))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        return x.div_(cap).tanh_().mul_(cap)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, sections: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Rotates in float32 and rounds once; the results are new, and views of one tensor."""
        cos, sin = _angles(positions, cos_sin, sections).unsqueeze(1).chunk(2, dim=-1)
        heads, half = (q.shape[1], k.shape[1]), cos.shape[-1]
        x = torch.cat((q, k), dim=1)
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        # Both are computed before either is written: if x is float32, first and second are views of it.
        rotated = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin
        x[..., :half] = rotated
        rotated_q, rotated_k = x.split(heads, dim=1)
        return rotated_q, rotated_k

    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Writes k and v [T, K, D] to their slots, or as one vector to a latent cache."""
        written = slots >= 0
        slots, k, v = slots[written], k[written], v[written]
        if cache.value is cache.key:
            cache.key.view(-1, *cache.key.shape[2:]).index_copy_(0, slots, torch.cat((k, v), dim=2))
            return
        cache.key.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        cache.value.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """In plain torch."""
        return plain_attention(q, cache, batch, spec)

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """All sources are read before any target is written."""
        self.swap_blocks(caches, caches, pairs)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """A gather and a scatter for each tensor."""
        if not pairs:
            return
        read, written = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            target.key.index_copy_(0, written, source.key.index_select(0, read))
            if source.value is not source.key:
                target.value.index_copy_(0, written, source.value.index_select(0, read))


def _result(dtype: DType | None, weight: Tensor) -> torch.dtype:
    return weight.dtype if dtype is None else torch_dtype(dtype)


def masked_embedding(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """``Kernels.embedding`` in plain torch."""
    ids = ids - first
    outside = (ids < 0) | (ids >= table.shape[0])
    return F.embedding(ids.masked_fill(outside, 0), table).float().masked_fill_(outside.unsqueeze(1), 0.0)


def _angles(positions: Tensor, cos_sin: Tensor, sections: Sequence[int]) -> Tensor:
    """The rows of the table for positions [T], or composed of a section from each row for positions [sections, T]."""
    if not sections:
        return cos_sin.index_select(0, positions)
    halves = cos_sin[positions].unflatten(-1, (2, -1)).split([*sections], dim=-1)  # of all positions
    return torch.cat([part[axis] for axis, part in enumerate(halves)], dim=-1).flatten(1)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they use no memory until they are written (calloc, where torch writes zeros)."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:  # torch cannot view an empty array as another type
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
