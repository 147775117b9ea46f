"""The CPU backend: C++ operations, run one by one or recorded once and replayed for every step; see ``OpRunner``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError
from octavo.core.kv_spec import KVSpec
from octavo.kernels.cache import LayerCache
from octavo.kernels.communicator import Communicator
from octavo.kernels.cpu import attention
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.collectives import HostCommunicator, SharedMemoryCommunicator
from octavo.kernels.cpu.compiled import DTYPES, address, cpu, strided
from octavo.kernels.cpu.experts import CpuExperts, route_op
from octavo.kernels.cpu.group_codes import group_format
from octavo.kernels.cpu.linear import (
    CpuDenseWeight,
    CpuHeads,
    CpuQuantizedWeight,
    CpuWeight,
    codes_of_matrix,
    codes_of_rows,
    keeps_bits,
)
from octavo.kernels.cpu.lora import CpuAdapters
from octavo.kernels.cpu.op_runner import OpRunner
from octavo.kernels.cpu.sampling import CompiledSampling
from octavo.kernels.experts import RoutingSpec
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.group_rows import GroupQuantizedRows
from octavo.kernels.interface import AttentionSpec, Kernels, PartedForward
from octavo.kernels.packed_weight import PackedHeads, PackedWeight
from octavo.kernels.quantized_rows import QuantizedRows


class CpuKernels(Kernels):
    """Kernels of ``octavo._cpu``. The results of a row do not depend on other rows."""

    name = "cpu"
    group: SharedMemoryCommunicator | HostCommunicator | None = None

    def __init__(self) -> None:
        """Selects the best instruction sets of this processor, or those that ``OCTAVO_CPU_ISA`` names: as
        "FLOATS+INTEGERS", or by one name for each kind that has it, the other keeping its best.

        Raises:
            ConfigError: there is no such instruction set, this processor cannot run it, or it was not compiled.
        """
        wanted = os.environ.get("OCTAVO_CPU_ISA")
        if wanted:
            try:
                cpu.choose_isa(wanted)
            except ValueError as e:
                raise ConfigError(f"OCTAVO_CPU_ISA: {e}") from None
        self.runner = OpRunner()
        self.adapters: CpuAdapters = CpuAdapters(self.runner)
        self.set_threads(None)

    def describe(self) -> str:
        """Name, instruction sets and threads."""
        pinned = ", pinned" if cpu.threads_pinned() else ""
        return f"cpu (float {cpu.float_isa()}, integer {cpu.integer_isa()}, {cpu.num_threads()} threads{pinned})"

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets the threads of the kernels' pool."""
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cpu.set_threads(count or available or 1, pin)

    def array(self, values: np.ndarray, dtype: DType | None = None) -> CpuArray:
        """In memory of its own."""
        out = CpuArray.empty(values.shape, dtype or DType.of(values))
        out.numpy()[...] = values
        return out

    def wrap(self, values: np.ndarray) -> CpuArray:
        """Over the same memory."""
        return CpuArray.over(values)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CpuArray:
        """In memory that is not touched before it is written."""
        return CpuArray.over(np.zeros(shape, dtype.numpy))

    def write(self, target: CpuArray, values: np.ndarray) -> None:
        """See ``ArrayMaker``."""
        target.numpy()[...] = values

    def to_numpy(self, x: CpuArray) -> np.ndarray:
        """Over the same memory."""
        return x.numpy()

    def take_rows(self, x: CpuArray, rows: np.ndarray) -> CpuArray:
        """See ``ArrayMaker``."""
        return CpuArray.over(x.numpy()[rows])

    def put_rows(self, target: CpuArray, rows: np.ndarray, x: CpuArray) -> None:
        """See ``ArrayMaker``."""
        target.numpy()[rows] = x.numpy()

    def scatter_columns(self, x: CpuArray, columns: CpuArray, width: int) -> CpuArray:
        """See ``ArrayMaker``."""
        out = np.full((len(x), width), -np.inf, np.float32)
        out[:, columns.numpy()] = x.numpy()
        return CpuArray.over(out)

    def as_token_ids(self, tokens: np.ndarray) -> CpuArray:
        """See ``ArrayMaker``."""
        return CpuArray.over(np.maximum(tokens, 0))

    def put_tokens(self, token_ids: CpuArray, targets: np.ndarray, tokens: np.ndarray, sources: np.ndarray) -> None:
        """See ``ArrayMaker``."""
        token_ids.numpy()[targets] = np.maximum(tokens[sources], 0)

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """See ``OpRunner.capture``."""
        return self.runner.capture(forward, largest, self)

    def capture_parts(self, forward: Forward, largest: BatchSize) -> PartedForward:
        """See ``OpRunner.capture_parts``."""
        return self.runner.capture_parts(forward, largest, self)

    def take_sampled(self, hidden: CpuArray, batch: ForwardBatch, rows: int = 1) -> CpuArray:
        """A copy of the rows; recorded operations on it run over the sampled rows."""
        if rows == 1 and self.runner.recording is None and batch.all_sampled:
            return hidden
        assert rows == 1 or hidden.is_contiguous
        out = self.runner.new_sampled(batch, rows * hidden.shape[1], hidden.dtype)
        size = hidden.dtype.itemsize
        op = cpu.take_sampled(hidden.address, hidden.strides[0] * size, out.address, out.strides[0] * size)
        self.runner.run(op, out, sampled_rows=batch.sampled_rows.address)
        return out

    def mean_sampled(self, hidden: CpuArray, batch: ForwardBatch, rows: int) -> CpuArray:
        """See ``Kernels``; recorded operations on it run over the sampled rows."""
        out = self.runner.new_sampled(batch, hidden.shape[1], DType.FLOAT32)
        op = cpu.mean_sampled(hidden.address, hidden.strides[0], out.address, out.shape[1], rows)
        self.runner.run(op, out, sampled_rows=batch.sampled_rows.address)
        return out

    def token_rows(self, batch: ForwardBatch, width: int) -> CpuArray:
        """See ``Kernels``."""
        return self.runner.new(batch.token_ids, (len(batch.token_ids), width), DType.FLOAT32)

    def host_call(self, function: Callable[[np.ndarray], None], x: CpuArray) -> CpuArray:
        """The function gets the step's rows of x."""
        self.runner.run(cpu.host_call(lambda rows: function(x[:rows].numpy())), x)
        return x

    def join(self, group: Communicator) -> None:
        """See ``Collectives``; groups through other than shared memory are called on the host."""
        self.group = group if isinstance(group, SharedMemoryCommunicator) else HostCommunicator(group)

    def all_reduce(self, x: CpuArray, bias: CpuArray | None = None, add: CpuArray | None = None) -> CpuArray:
        """Through shared memory, with bias and add in one pass."""
        if self.group is None:
            assert bias is None and add is None, "products of a single rank add both themselves"
            return x
        self.runner.run(self.group.all_reduce_op(x, bias, add), x)
        return x

    def all_gather(self, x: CpuArray) -> CpuArray:
        """Through shared memory."""
        if self.group is None:
            return x
        out = self.runner.new(x, (x.shape[0], self.group.size * x.shape[1]), DType.FLOAT32)
        self.runner.run(self.group.all_gather_op(x, out), x)
        return out

    def check_dtype(self, dtype: DType) -> None:
        """Refuses float16."""
        if dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise ConfigError(
                f"the CPU kernels compute in float32 or bfloat16, not in {dtype}: set dtype='bfloat16', or "
                "kernels='reference'"
            )

    def make_sampling_backend(self, vocab_size: int) -> CompiledSampling:
        """All rows in one call, on the kernels' threads."""
        return CompiledSampling()

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one block of one layer, keys and values, padding and scales included."""
        return spec.vectors * attention.block_bytes(spec.num_kv_heads, spec.head_dim, block_size, DType(spec.dtype))

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Keys and values in the layout that ``paged_attention`` reads."""
        shape = (spec.num_kv_heads, spec.head_dim, DType(spec.dtype), spec.vectors)
        return attention.make_cache(layers, blocks, block_size, *shape)

    def pack(
        self,
        parts: Sequence[np.ndarray | QuantizedRows],
        bias: np.ndarray | None = None,
        quantization: str | None = None,
        *,
        dtype: DType,
        gated: bool = False,
        pieces: int = 1,
    ) -> CpuWeight:
        """Packs for the register tiles: in ``dtype``, in 8 or 4 bits, or with a checkpoint's bits."""
        blocks = [part for part in parts if isinstance(part, QuantizedRows)]
        matrices = [part for part in parts if isinstance(part, np.ndarray)]
        bias = None if bias is None else rounded(bias, dtype)
        if blocks:
            weight = CpuQuantizedWeight(self.runner, [codes_of_rows(part) for part in blocks], bias, gated)
            weight.has_rows = len(blocks) == 1 and keeps_bits(blocks[0])
            return weight
        if quantization in (None, "gguf"):
            return CpuDenseWeight(self.runner, matrices, dtype, bias, gated, pieces)
        return CpuQuantizedWeight(
            self.runner, [codes_of_matrix(rounded(part, dtype), str(quantization)) for part in matrices], bias, gated
        )

    def has_products(self, rows: QuantizedRows) -> bool:
        """GGUF blocks of all types, and groups of the sizes that ``group_format`` lists."""
        return not isinstance(rows, GroupQuantizedRows) or group_format(rows) is not None

    def pack_heads(self, weight: np.ndarray, dtype: DType) -> CpuHeads:
        """Packs each head's matrix for the register tiles."""
        return CpuHeads(self.runner, weight, dtype)

    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight], shared: int = 0
    ) -> CpuExperts:
        """Takes the packed matrices as they are."""
        return CpuExperts(self.runner, gate_up, down)

    def route(self, logits: CpuArray, spec: RoutingSpec, bias: CpuArray | None = None) -> tuple[CpuArray, CpuArray]:
        """See ``Kernels``."""
        shape = (logits.shape[0], spec.top_k + spec.shared)
        experts, weights = self.runner.new(logits, shape, DType.INT32), self.runner.new(logits, shape, DType.FLOAT32)
        self.runner.run(route_op(logits, spec, bias, experts, weights), logits)
        return experts, weights

    def embedding(
        self, ids: CpuArray, table: CpuArray, first: int = 0, *, scale: float = 1.0, add: CpuArray | None = None
    ) -> CpuArray:
        """While recording, ids must be the batch's token ids, positions or types."""
        out = self.runner.new(ids, (ids.shape[0], table.shape[1]), DType.FLOAT32) if add is None else add
        recording = self.runner.recording
        op = cpu.embedding(
            table.address,
            *table.shape,
            out.address,
            DTYPES[table.dtype],
            cpu.Dtype.f32,
            first,
            cpu.Ids.token_ids if recording is None else recording.ids_of(ids),
            scale,
            address(add),
        )
        self.runner.run(op, ids, token_ids=ids.address)
        return out

    def rms_norm(
        self,
        x: CpuArray,
        weight: CpuArray,
        eps: float,
        *,
        out_dtype: DType | None = None,
        add: CpuArray | None = None,
    ) -> CpuArray:
        """x [T, E], or [T, heads, D] with any strides over the first two."""
        out = self.runner.new(x, x.shape, out_dtype or weight.dtype) if add is None else add
        self.runner.run(cpu.rms_norm(*_norm_input(x, weight), *_norm_output(x, out, eps), add=address(add)), x)
        return out

    def layer_norm(
        self,
        x: CpuArray,
        weight: CpuArray,
        bias: CpuArray | None,
        eps: float,
        *,
        out_dtype: DType | None = None,
    ) -> CpuArray:
        """x [T, E], or [T, heads, D] with any strides over the first two."""
        out = self.runner.new(x, x.shape, out_dtype or weight.dtype)
        source, dtype, stride, weights, weight_dtype = _norm_input(x, weight)
        op = cpu.layer_norm(source, dtype, stride, weights, address(bias), weight_dtype, *_norm_output(x, out, eps))
        self.runner.run(op, x)
        return out

    def soft_cap(self, x: CpuArray, cap: float) -> CpuArray:
        """In place."""
        self.runner.run(cpu.soft_cap(x.address, x.strides[0], x.shape[1], cap), x)
        return x

    def rotary(
        self, q: CpuArray, k: CpuArray, positions: CpuArray, cos_sin: CpuArray, sections: Sequence[int] = ()
    ) -> tuple[CpuArray, CpuArray]:
        """Rotates both in place."""
        op = cpu.rotary(
            *strided(q),
            *strided(k),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            cos_sin.shape[1],
            cos_sin.address,
            DTYPES[q.dtype],
            sections=list(sections),
        )
        if sections:
            self.runner.run(op, q, rotary_positions=positions.address, rotary_stride=positions.strides[0])
        else:
            self.runner.run(op, q, positions=positions.address)
        return q, k

    def latent_rotary_and_cache(
        self,
        q: CpuArray,
        latent: CpuArray,
        k_rope: CpuArray,
        absorb: PackedHeads,
        batch: ForwardBatch,
        cos_sin: CpuArray,
        cache: LayerCache,
    ) -> CpuArray:
        """Both parts of the queries are written to their place in the result."""
        assert isinstance(absorb, CpuHeads)
        (tokens, heads, width), rope, rank = q.shape, k_rope.shape[1], latent.shape[1]
        out = self.runner.new(q, (tokens, heads, rank + rope), q.dtype)
        run = self.runner.run
        run(absorb.operation(q[:, :, : width - rope], out[:, :, :rank]), q)
        q_rope, rotated = q[:, :, width - rope :], out[:, :, rank:]
        rotary = cpu.rotary(
            q_rope.address,
            q.strides[0],
            k_rope.address,
            k_rope.strides[0],
            heads,
            1,
            rope,
            cos_sin.shape[1],
            cos_sin.address,
            DTYPES[q.dtype],
            q.strides[1],
            rotated.address,
            out.strides[0],
            out.strides[1],
        )
        run(rotary, q, positions=batch.positions.address)
        slots = batch.slot_mapping[cache.group].address
        run(attention.write_op(latent[:, None], k_rope[:, None], cache), latent, slots=slots)
        return out

    def reshape_and_cache(self, k: CpuArray, v: CpuArray, cache: LayerCache, slots: CpuArray) -> None:
        """Writes keys and values to their slots."""
        self.runner.run(attention.write_op(k, v, cache), k, slots=slots.address)

    def paged_attention(self, q: CpuArray, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> CpuArray:
        """Accumulates each sequence's context in pieces at fixed positions, in order."""
        out = self.runner.new(q, (*q.shape[:2], spec.value_dim or q.shape[2]), q.dtype)
        self.runner.run_step(attention.attention_op(q, cache, out, spec), q, batch)
        return out

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks in every layer, all sources before any target."""
        attention.copy_blocks(caches, pairs)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks of one cache to another, as bytes."""
        attention.swap_blocks(sources, targets, pairs)


def _norm_input(x: CpuArray, weight: CpuArray) -> tuple[Any, ...]:
    """Address, type and stride of x, address and type of the weight."""
    return x.address, DTYPES[x.dtype], x.strides[0], weight.address, DTYPES[weight.dtype]


def _norm_output(x: CpuArray, out: CpuArray, eps: float) -> tuple[Any, ...]:
    """Address and type of out, width, eps, heads and the stride from head to head of x."""
    heads = x.shape[1] if len(x.shape) == 3 else 1
    return out.address, DTYPES[out.dtype], x.shape[-1], eps, heads, x.strides[1] if heads > 1 else 0
