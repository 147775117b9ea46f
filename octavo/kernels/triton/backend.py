"""The GPU backend: Triton kernels, and cuBLAS (through torch) for products that need not be batch-invariant."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.kernels.forward_batch import ARRAYS, BatchSize, Forward, ForwardBatch, ForwardOutput, padding_batch
from octavo.kernels.interface import (
    Activation,
    ArrayMaker,
    AttentionSpec,
    LayerCache,
    PackedExperts,
    PackedHeads,
    PackedWeight,
)
from octavo.kernels.torch_backend import TorchKernels, torch_dtype
from octavo.kernels.triton import attention, elementwise, scan, states
from octavo.kernels.triton.cache import (
    block_bytes,
    copy_blocks,
    host_bytes,
    make_cache,
    make_host_cache,
    read_blocks,
    reshape_and_cache,
    rotary_and_cache,
    swap_blocks,
    write_blocks,
)
from octavo.kernels.triton.experts import TritonHeads, pack_experts
from octavo.kernels.triton.lora import TritonAdapters
from octavo.kernels.triton.mxfp4 import TritonMXFP4Weight
from octavo.kernels.triton.quant import TritonDenseWeight, TritonQuantizedWeight, quantize
from octavo.kernels.triton.sampling import TritonSampling
from octavo.kernels.weight_rows import GGUFRows, QuantizedRows

logger = logging.getLogger("octavo")


class TritonKernels(TorchKernels):
    """Kernels for one GPU; under Triton's interpreter, for tests, they compute on the CPU.

    With ``deterministic``, products and attention are computed in an order that does not depend on the batch, so that a
    row's result is bit for bit the same in any batch. Without it cuBLAS chooses the order by the number of rows: a
    repeated run gives the same bits, another batch may not.
    """

    name = "triton"
    reshape_and_cache = staticmethod(reshape_and_cache)
    copy_blocks = staticmethod(copy_blocks)
    swap_blocks = staticmethod(swap_blocks)
    host_bytes = staticmethod(host_bytes)
    read_blocks = staticmethod(read_blocks)
    write_blocks = staticmethod(write_blocks)
    embedding = staticmethod(elementwise.embedding)
    rms_norm = staticmethod(elementwise.rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    causal_conv = staticmethod(states.causal_conv)
    gated_delta_rule = staticmethod(states.gated_delta_rule)
    selective_scan = staticmethod(scan.selective_scan)
    ssd_scan = staticmethod(scan.ssd_scan)
    silu_gate = staticmethod(scan.silu_gate)
    sigmoid_gate = staticmethod(states.sigmoid_gate)

    def __init__(
        self,
        device: str | torch.device,
        *,
        deterministic: bool = False,
        enforce_eager: bool = False,
        graph_capture: str = "lazy",
        cudagraph_capture_sizes: Sequence[int] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.deterministic = deterministic
        if self.device.type == "cuda":  # partial sums over K are added in float32, not in the result's type
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._graphed = self.device.type == "cuda" and not enforce_eager
        self._capture_at_start = graph_capture == "start"
        self._graph_sizes = cudagraph_capture_sizes
        self.adapters: TritonAdapters = TritonAdapters(self.device, deterministic=deterministic)

    def describe(self) -> str:
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreted on the CPU"
        return f"triton ({where}{', deterministic' if self.deterministic else ''})"

    def numerics(self) -> str:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreted"
        return f"triton {triton.__version__} torch {torch.__version__} {device} {self.deterministic}"

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        if not self._graphed:
            return forward
        graphs = self._make_graphs(forward, largest)
        if self._capture_at_start:
            graphs.capture_all()
        return graphs

    def graph_bytes(self, forward: Forward, largest: BatchSize, in_use: Callable[[], int]) -> int:
        return self._make_graphs(forward, largest).total_bytes(in_use) if self._graphed else 0

    def _make_graphs(self, forward: Forward, largest: BatchSize) -> GraphedForward:
        sizes, adapters = self._graph_sizes, self.adapters.count > 0
        return GraphedForward(forward, CudaGraphs(), largest, self, sizes=sizes, adapters=adapters)

    def make_sampling_backend(self, vocab_size: int) -> TritonSampling:
        return TritonSampling(vocab_size, self.device)

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        if spec.draft_tokens:
            raise ConfigError(
                "speculative_config: the triton backend has no draft tokens beside recurrent states: leave it out, or "
                "set kernels='reference'"
            )
        return block_bytes(block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype), spec.vectors)

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        shape = (layers, blocks, block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype))
        return [*make_cache(*shape, self.device, spec.vectors)]

    def make_host_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        shape = (layers, blocks, block_size, spec.num_kv_heads, spec.head_dim, torch_dtype(spec.dtype))
        return [*make_host_cache(*shape, spec.vectors)]

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
        positions, slots = batch.rotary_positions if sections else batch.positions, batch.slot_mapping[cache.group]
        return rotary_and_cache(q, k, v, positions, cos_sin, cache, slots, sections)

    def pack_heads(self, weight: np.ndarray, dtype: DType) -> PackedHeads:
        return TritonHeads(self.array(weight, dtype)) if self.deterministic else super().pack_heads(weight, dtype)

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
        blocks = [part for part in parts if isinstance(part, GGUFRows) and self.has_products(part)]
        matrices = [part for part in parts if isinstance(part, np.ndarray)]
        if len(blocks) == len(parts):
            rows = torch.from_numpy(np.concatenate([part.rows for part in blocks])).to(self.device)
            added = None if bias is None else self.array(bias, dtype)
            return TritonMXFP4Weight(rows, added, torch_dtype(dtype), gated, self.deterministic)
        if len(matrices) < len(parts):
            raise ConfigError(
                "the triton backend has no products in a file's bits but of MXFP4: it cannot serve quantization='gguf'"
            )
        weight, added = self.stack(matrices, bias, dtype)
        if quantization in (None, "gguf"):
            return TritonDenseWeight(weight, added, gated, self.deterministic)
        return TritonQuantizedWeight(quantize(weight, str(quantization), added), gated, self.deterministic)

    def has_products(self, rows: QuantizedRows) -> bool:
        return isinstance(rows, GGUFRows) and rows.kind == "MXFP4" and rows.factors is None

    def pack_experts(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        shared: int = 0,
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> PackedExperts:
        return pack_experts(
            gate_up, down, shared, activation, weighs_input=weighs_input, deterministic=self.deterministic
        )

    def sum_of_rows(self, x: Tensor) -> Tensor:
        if not self.deterministic:
            return super().sum_of_rows(x)
        total = x[:, :1]
        for column in range(1, x.shape[1]):  # torch chooses the order of a sum by the number of rows
            total = total + x[:, column : column + 1]
        return total

    def check_attention(self, spec: AttentionSpec) -> None:
        missing = {
            "relative position bias": spec.bias is not None,
            "cross attention": spec.cross,
            "window of attention that is not causal": not spec.causal and spec.window is not None,
        }
        for feature, is_needed in missing.items():
            if is_needed:
                raise UnsupportedModelError(f"the triton kernels have no {feature}; use kernels='reference'")

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
        return attention.paged_attention(q, cache, batch, spec, deterministic=self.deterministic)


# Decode steps as CUDA graphs: a step is one launch instead of several hundred.

#: Records the work of a function on the device, and returns a function that replays it and the recorded function's
#: output, which each replay overwrites.
Record = Callable[[Callable[[], ForwardOutput]], tuple[Callable[[], None], ForwardOutput]]
#: Dimensions that equal the number of rows in a decode step.
_ROWS = frozenset("TSN")


def graph_sizes(max_seqs: int) -> list[int]:
    """Batch sizes with a graph: closer to each other for small batches, where padding costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_seqs, 32)]
    return [size for size in sizes if size < max_seqs] + [max_seqs]


class GraphedForward:
    """A network's forward that replays decode steps and runs others eagerly.

    Owns the graphs and their inputs. Invariant: from row ``_filled`` on, the inputs are padding. A replay overwrites
    the last output, so work that reads an output must be queued on the same stream before the next replay.
    """

    def __init__(
        self,
        forward: Forward,
        record: Record,
        largest: BatchSize,
        kernels: ArrayMaker,
        *,
        sizes: Sequence[int] | None = None,
        adapters: bool = False,
    ) -> None:
        """A graph is captured at the first batch of its size, unless ``capture_all`` comes before.

        ``sizes``: the batch sizes with a graph, by default those of ``graph_sizes``. ``adapters``: whether there are
        also graphs for steps with adapters.
        """
        self._forward = forward
        self._record = record
        self._sizes = sorted(set(sizes)) if sizes else graph_sizes(largest.sequences)
        self._kinds = (True, False) if adapters else (False,)
        #: By size, and whether the step has adapters.
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], ForwardOutput]] = {}
        self._filled = 0
        rows = largest.sequences
        self._inputs = padding_batch(replace(largest, tokens=rows, sampled=rows), kernels)
        #: Seconds that capturing has taken so far.
        self.capture_seconds = 0.0

    def capture_all(self) -> None:
        for size, has_adapters in self._all():
            self._capture(size, has_adapters)
        logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), self.capture_seconds)

    def _all(self) -> list[tuple[int, bool]]:
        """Size and adapters of every graph, the largest first, so that the others fit into its memory."""
        return [(size, kind) for size in reversed(self._sizes) for kind in self._kinds]

    def total_bytes(self, in_use: Callable[[], int]) -> int:
        """See ``Kernels.graph_bytes``.

        Captures two graphs: the first allocates the memory that all share; the second shows the driver's memory for
        one graph, which is about the same for all, as they have the same launches.
        """
        first, *others = self._all()
        before = in_use()
        self._capture(*first)
        with_first = in_use()
        total = sum(array.nbytes for array in self._inputs.arrays()) + max(0, with_first - before)
        if others:
            self._capture(*others[-1])
            total += len(others) * max(0, in_use() - with_first)
        return total

    def __call__(self, batch: ForwardBatch) -> ForwardOutput:
        rows = len(batch.token_ids)
        decodes_alone = batch.num_decodes == rows and batch.all_sampled and not batch.has_spans
        if not decodes_alone or not 0 < rows <= self._sizes[-1]:
            return self._forward(batch)
        size = self._sizes[bisect_left(self._sizes, rows)]
        if (size, batch.has_adapters) not in self._graphs:
            self._capture(size, batch.has_adapters)
            logger.debug(
                "captured the CUDA graph of decode steps of up to %d; %d graphs in %.1f s so far",
                size,
                len(self._graphs),
                self.capture_seconds,
            )
        replay, output = self._graphs[size, batch.has_adapters]
        self._fill(batch, rows)
        replay()
        return output.first(rows, rows)

    def _fill(self, batch: ForwardBatch, rows: int) -> None:
        """Copies the step's inputs to the graphs' buffers, and clears rows that a larger step has filled."""
        pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for array, buffer, values in zip(ARRAYS, self._inputs.arrays(), batch.arrays(), strict=True):
            if array.padding is not None:  # else they are the indices in every decode step
                targets, sources = pairs.setdefault(array.dtype, ([], []))
                targets.append(buffer[tuple(slice(n) for n in values.shape)])
                sources.append(values)
        for targets, sources in pairs.values():
            torch._foreach_copy_(targets, sources)
        if rows < self._filled:
            self._clear(rows)
        self._filled = rows

    def _clear(self, first: int) -> None:
        for array, buffer in zip(ARRAYS, self._inputs.arrays(), strict=True):
            if array.padding is not None:
                self._rows(array.dims, buffer, slice(first, self._filled)).fill_(array.padding)
        self._filled = min(first, self._filled)

    @staticmethod
    def _rows(dims: str, buffer: Tensor, rows: slice) -> Tensor:
        return buffer[tuple(rows if dim in _ROWS else slice(None) for dim in dims)]

    def _capture(self, size: int, has_adapters: bool) -> None:
        """Records a step of ``size`` padding rows, which read and write no block."""
        start = time.perf_counter()
        self._clear(0)
        batch = replace(self._inputs, num_decodes=size, has_adapters=has_adapters)
        for array, buffer in zip(ARRAYS, self._inputs.arrays(), strict=True):
            view = buffer[: size + 1] if array.dims == "s" else self._rows(array.dims, buffer, slice(size))
            setattr(batch, array.name, view)
        self._graphs[size, has_adapters] = self._record(lambda: self._forward(batch))
        self.capture_seconds += time.perf_counter() - start


class CudaGraphs:
    """Records CUDA graphs that share one memory pool. A recorded function is called twice."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
        # Once without recording, so that kernels are compiled and loaded and libraries allocate their workspaces.
        run()
        graph = torch.cuda.CUDAGraph()
        # Entering waits for the device. thread_local: other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output
