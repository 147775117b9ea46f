"""The GPU backend: Triton kernels, and cuBLAS (through torch) for products where any order will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.reference import masked_embedding
from octavo.kernels.triton import activation, attention, cache, matmul, norm, quant, quantize, rotary, rotary_cache
from octavo.kernels.triton.graphs import CudaGraphs, GraphedForward
from octavo.kernels.triton.sampling_backend import TritonSampling


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A linear layer that is not quantised."""

    #: [out, in]
    weight: Tensor
    #: [out] or none.
    bias: Tensor | None


class TritonKernels(Kernels):
    """Kernels for one GPU; under Triton's interpreter, for tests, they compute on the CPU.

    ``deterministic`` takes every product and every attention in one fixed order whatever the batch, so that a row's
    result is bit for bit the same in any company. Without it cuBLAS chooses by the number of rows: a run repeats, a
    batch does not bind.
    """

    name = "triton"

    def __init__(
        self,
        device: str | torch.device,
        *,
        deterministic: bool = False,
        enforce_eager: bool = False,
        graph_capture: str = "lazy",
    ) -> None:
        """See ``EngineConfig`` for the options."""
        self.device = torch.device(device)
        self.deterministic = deterministic
        if self.device.type == "cuda":  # sums of parts of K are added in float32, not in the result's type
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._graphed = self.device.type == "cuda" and not enforce_eager
        self._capture_at_start = graph_capture == "start"

    def describe(self) -> str:
        """Name, device and order."""
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreted on the CPU"
        return f"triton ({where}{', deterministic' if self.deterministic else ''})"

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Torch's threads on the host; None leaves them as torch chose them. There is nothing to pin."""
        if count is not None:
            torch.set_num_threads(count)

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """Decode steps as CUDA graphs, by their number of sequences; the other steps as they are."""
        if not self._graphed:
            return forward
        return GraphedForward(forward, CudaGraphs(), largest, device=self.device, at_start=self._capture_at_start)

    def make_sampling_backend(self, vocab_size: int) -> TritonSampling:
        """On the device: nothing goes to the host but what was chosen."""
        return TritonSampling(vocab_size, self.device)

    # --- cache ------------------------------------------------------------------------------------------------------

    def block_bytes(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer, keys, values and scales."""
        return cache.block_bytes(block_size, kv_heads, head_dim, dtype)

    def make_cache(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[LayerCache]:
        """Views of one pool in which a block of all layers is one piece."""
        return [*cache.make_cache(layers, blocks, block_size, kv_heads, head_dim, dtype, self.device)]

    def make_host_cache(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[LayerCache]:
        """The same layout in pinned memory."""
        return [*cache.make_host_cache(layers, blocks, block_size, kv_heads, head_dim, dtype)]

    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Writes keys and values to their slots."""
        rotary_cache.reshape_and_cache(k, v, cache, slots)

    def rotary_and_cache(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, cos_sin: Tensor, cache: LayerCache
    ) -> Tensor:
        """One launch."""
        return rotary_cache.rotary_and_cache(q, k, v, batch.positions, cos_sin, cache, batch.slot_mapping[cache.group])

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """All layers in one launch."""
        cache.copy_blocks(caches, pairs)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Queues copies on the current stream, one for each run of neighbours."""
        cache.swap_blocks(sources, targets, pairs)

    # --- products ---------------------------------------------------------------------------------------------------

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> DenseLinear:
        """Keeps both as they are."""
        return DenseLinear(weight, bias)

    def quantize_linear(self, weight: Tensor, bias: Tensor | None, kind: str) -> Any:
        """Quantises the weight to "int8", "int4" or "fp8", which products widen again in registers."""
        return quantize.quantize(weight, kind, bias)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x [T, in] to [T, out], of x's type."""
        return self._product(x, weight, x.dtype, None)

    def linear_float32(self, x: Tensor, weight: Any) -> Tensor:
        """As ``linear``, not rounded."""
        return self._product(x, weight, torch.float32, None)

    def linear_add(self, x: Tensor, weight: Any, residual: Tensor) -> Tensor:
        """As ``linear_float32``, added to the residual within the product."""
        return self._product(x, weight, torch.float32, residual)

    def linear_silu_and_mul(self, x: Tensor, weight: Any) -> Tensor:
        """One launch where the weight is quantised and its tiles hold as many gates as what they gate."""
        if isinstance(weight, quantize.TritonQuantizedLinear) and weight.outputs % quantize.COLUMNS == 0:
            return quant.quantized_silu_and_mul(x, weight, deterministic=self.deterministic)
        return super().linear_silu_and_mul(x, weight)

    def _product(self, x: Tensor, weight: Any, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
        if isinstance(weight, quantize.TritonQuantizedLinear):
            return quant.quantized_matmul(x, weight, dtype, residual, deterministic=self.deterministic)
        if self.deterministic:
            return matmul.matmul(x, weight.weight, weight.bias, dtype, residual)
        product = _torch_product(x, weight.weight, dtype, residual)
        return product if weight.bias is None else product.add_(weight.bias)

    # --- the rest of a layer ----------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor, first: int = 0) -> Tensor:
        """Rows of the table, widened."""
        if self.group is not None:
            return masked_embedding(ids, table, first)
        return torch.nn.functional.embedding(ids, table).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm over the last dimension."""
        return norm.rms_norm(x, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates both in place."""
        return rotary.rotary(q, k, positions, cos_sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(gate) * up."""
        return activation.silu_and_mul(x)

    def paged_attention(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, window: int | None
    ) -> Tensor:
        """Decodes with their context split among programs, prefills in tiles of queries."""
        return attention.paged_attention(q, cache, batch, scale, window, deterministic=self.deterministic)


def _torch_product(x: Tensor, weight: Tensor, dtype: torch.dtype, residual: Tensor | None) -> Tensor:
    """x W^T accumulated in float32; with a residual (then ``dtype`` is float32) added into it, in its own memory."""
    transposed = weight.t()
    if dtype == x.dtype:
        return x @ transposed if residual is None else residual.addmm_(x, transposed)
    if not x.is_cuda:  # torch has products with results of another type on GPUs only
        product = x.float() @ transposed.float()
        return product if residual is None else residual.add_(product)
    if residual is None:
        return torch.mm(x, transposed, out_dtype=dtype)
    return torch.addmm(residual, x, transposed, out_dtype=dtype, out=residual)
