"""The GPU backend: Triton kernels, and cuBLAS (through torch) for products that need not be batch-invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.kv_spec import KVSpec
from octavo.kernels.cache import LayerCache
from octavo.kernels.experts import PackedExperts
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import PackedWeight
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.kernels.torch_arrays import torch_dtype
from octavo.kernels.torch_kernels import TorchKernels
from octavo.kernels.triton import attention, cache, experts, norm, rotary_cache
from octavo.kernels.triton.embedding import embedding
from octavo.kernels.triton.graphs import CudaGraphs, GraphedForward
from octavo.kernels.triton.linear import TritonDenseWeight, TritonQuantizedWeight
from octavo.kernels.triton.lora import TritonAdapters
from octavo.kernels.triton.quantize import quantize
from octavo.kernels.triton.sampling_backend import TritonSampling


class TritonKernels(TorchKernels):
    """Kernels for one GPU; under Triton's interpreter, for tests, they compute on the CPU.

    ``deterministic`` computes products and attention in an order that does not depend on the batch, so that a row's
    result is bit for bit the same in any batch. Without it cuBLAS chooses the order by the number of rows: a repeated
    run gives the same bits, another batch may not.
    """

    name = "triton"

    def __init__(
        self,
        device: str | torch.device,
        *,
        deterministic: bool = False,
        enforce_eager: bool = False,
        graph_capture: str = "lazy",
        cudagraph_capture_sizes: Sequence[int] | None = None,
    ) -> None:
        """See ``EngineConfig`` for the options."""
        self.device = torch.device(device)
        self.deterministic = deterministic
        if self.device.type == "cuda":  # sums of parts of K are added in float32, not in the result's type
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._graphed = self.device.type == "cuda" and not enforce_eager
        self._capture_at_start = graph_capture == "start"
        self._graph_sizes = cudagraph_capture_sizes
        self.adapters: TritonAdapters = TritonAdapters(self.device, deterministic=deterministic)

    def describe(self) -> str:
        """Name, device and order."""
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreted on the CPU"
        return f"triton ({where}{', deterministic' if self.deterministic else ''})"

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets torch's threads on the host, which cannot be pinned; None leaves their number unchanged."""
        if count is not None:
            torch.set_num_threads(count)

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """Captures decode steps as CUDA graphs, by their number of sequences; other steps run eagerly."""
        if not self._graphed:
            return forward
        graphs = self._make_graphs(forward, largest)
        if self._capture_at_start:
            graphs.capture_all()
        return graphs

    def graph_bytes(self, forward: Forward, largest: BatchSize, in_use: Callable[[], int]) -> int:
        """Captures two graphs, see ``GraphedForward.total_bytes``."""
        return self._make_graphs(forward, largest).total_bytes(in_use) if self._graphed else 0

    def _make_graphs(self, forward: Forward, largest: BatchSize) -> GraphedForward:
        sizes, adapters = self._graph_sizes, self.adapters.count > 0
        return GraphedForward(forward, CudaGraphs(), largest, self, sizes=sizes, adapters=adapters)

    def make_sampling_backend(self, vocab_size: int) -> TritonSampling:
        """On the device: only the results are copied to the host."""
        return TritonSampling(vocab_size, self.device)

    # --- cache ------------------------------------------------------------------------------------------------------

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one block of one layer, keys, values and scales."""
        return cache.block_bytes(block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype))

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Views of one pool, in which a block of all layers of the group is contiguous."""
        shape = (layers, blocks, block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype))
        return [*cache.make_cache(*shape, self.device)]

    def make_host_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """The same layout in pinned memory."""
        shape = (layers, blocks, block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype))
        return [*cache.make_host_cache(*shape)]

    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Writes keys and values to their slots."""
        rotary_cache.reshape_and_cache(k, v, cache, slots)

    def rotary_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        cos_sin: Tensor,
        cache: LayerCache,
        sections: Sequence[int] = (),
    ) -> Tensor:
        """One launch."""
        positions, slots = batch.rotary_positions if sections else batch.positions, batch.slot_mapping[cache.group]
        return rotary_cache.rotary_and_cache(q, k, v, positions, cos_sin, cache, slots, sections)

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """All layers in one launch."""
        cache.copy_blocks(caches, pairs)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Queues copies on the current stream, one for each run of consecutive blocks."""
        cache.swap_blocks(sources, targets, pairs)

    # --- products ---------------------------------------------------------------------------------------------------

    def pack(
        self,
        parts: Sequence[np.ndarray | QuantizedRows],
        bias: np.ndarray | None = None,
        quantization: str | None = None,
        *,
        dtype: DType,
        gated: bool = False,
        pieces: int = 1,
    ) -> PackedWeight:
        """Stacks the matrices on the device, or quantises them there to "int8", "int4" or "fp8"."""
        matrices = [part for part in parts if isinstance(part, np.ndarray)]
        if len(matrices) < len(parts):
            raise ConfigError(
                "the triton backend has no products in a file's bits: it cannot serve quantization='gguf'"
            )
        weight, added = self.stack(matrices, bias, dtype)
        if quantization in (None, "gguf"):
            return TritonDenseWeight(weight, added, gated, self.deterministic)
        return TritonQuantizedWeight(quantize(weight, str(quantization), added), gated, self.deterministic)

    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight], shared: int = 0
    ) -> PackedExperts:
        """Stacked, for grouped products; shared experts apart."""
        return experts.pack_experts(gate_up, down, shared, deterministic=self.deterministic)

    # --- the rest of a layer ----------------------------------------------------------------------------------------

    def embedding(
        self, ids: Tensor, table: Tensor, first: int = 0, *, scale: float = 1.0, add: Tensor | None = None
    ) -> Tensor:
        """One launch."""
        return embedding(ids, table, first, scale, add)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        out_dtype: DType | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """One launch."""
        return norm.rms_norm(x, weight, eps, _torch(out_dtype), add)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        out_dtype: DType | None = None,
    ) -> Tensor:
        """One launch."""
        return norm.layer_norm(x, weight, bias, eps, _torch(out_dtype))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Operations of torch, in place."""
        return x.div_(cap).tanh_().mul_(cap)

    def check_attention(self, spec: AttentionSpec) -> None:
        """Refuses latent caches, another context than the tokens' own, and a window on either side."""
        if spec.value_dim is not None:
            raise UnsupportedModelError(
                "the triton kernels have no multi-head latent attention; use kernels='reference'"
            )
        if spec.bias is not None:
            raise UnsupportedModelError("the triton kernels have no relative position bias; use kernels='reference'")
        if spec.cross:
            raise UnsupportedModelError("the triton kernels have no cross attention; use kernels='reference'")
        if not spec.causal and spec.window is not None:
            raise UnsupportedModelError(
                "the triton kernels have no window of attention that is not causal; use kernels='reference'"
            )

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        """Decodes with contexts split among programs, prefills in tiles of queries."""
        return attention.paged_attention(q, cache, batch, spec, deterministic=self.deterministic)


def _torch(dtype: DType | None) -> torch.dtype | None:
    return None if dtype is None else torch_dtype(dtype)
