"""The CPU backend: C++ operations, run one by one or recorded once and replayed for every step; see ``OpRunner``."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError
from octavo.kernels.cpu.array import DTYPES, CpuArray, address, cpu, strided
from octavo.kernels.cpu.linear import (
    CpuAdapters,
    CpuDenseWeight,
    CpuExperts,
    CpuHeads,
    CpuQuantizedWeight,
    CpuWeight,
    codes_of_matrix,
    codes_of_rows,
    form_of,
    group_format,
    keeps_bits,
)
from octavo.kernels.cpu.sampling import CompiledSampling
from octavo.kernels.cpu.tape import OpRunner
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.interface import (
    Activation,
    AttentionSpec,
    AttentionTemperature,
    Communicator,
    DeltaHeads,
    Kernels,
    LayerCache,
    PackedHeads,
    PackedWeight,
    PartedForward,
    RoutingSpec,
    ScanChannels,
    ScanHeads,
    StoredForm,
    Wait,
    Xielu,
    check_pairs,
    check_rows,
    no_wait,
)
from octavo.kernels.weight_rows import GGUFRows, GroupQuantizedRows, QuantizedRows, to_values

_PAGE = 4096
#: Types of tables that the lookup reads as they are.
_TABLES = (DType.FLOAT32.numpy, DType.BFLOAT16.numpy)
#: Bytes at the beginning of each array of the KV cache that are in small pages.
_SMALL_PAGES = 2 << 20


class CpuKernels(Kernels):
    """Kernels of ``octavo._cpu``. The results of a row do not depend on other rows."""

    name = "cpu"
    maps_tables = True

    def __init__(self) -> None:
        """Selects the best instruction sets of this processor, or those that ``OCTAVO_CPU_ISA`` names: as
        "FLOATS+INTEGERS", or by one name for each kind that has it, the other keeping its best.
        """
        if isa := os.environ.get("OCTAVO_CPU_ISA"):
            try:
                cpu.choose_isa(isa)
            except ValueError as e:
                raise ConfigError(f"OCTAVO_CPU_ISA: {e}") from None
        self.runner = OpRunner()
        self.adapters: CpuAdapters = CpuAdapters(self.runner)
        self.set_threads(None)

    def describe(self) -> str:
        pinned = ", pinned" if cpu.threads_pinned() else ""
        return f"cpu (float {cpu.float_isa()}, integer {cpu.integer_isa()}, {cpu.num_threads()} threads{pinned})"

    def numerics(self) -> str:
        return f"cpu {cpu.float_isa()} {cpu.integer_isa()}"

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cpu.set_threads(count or available or 1, pin)

    def array(self, values: np.ndarray, dtype: DType | None = None) -> CpuArray:
        out = CpuArray.empty(values.shape, dtype or DType.of(values))
        out.numpy()[...] = values
        return out

    def wrap(self, values: np.ndarray) -> CpuArray:
        return CpuArray.over(values)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CpuArray:
        """In memory that is not touched before it is written."""
        return CpuArray.over(np.zeros(shape, dtype.numpy))

    def write(self, target: CpuArray, values: np.ndarray) -> None:
        target.numpy()[...] = values

    def to_numpy(self, x: CpuArray) -> np.ndarray:
        return x.numpy()

    def take_rows(self, x: CpuArray, rows: np.ndarray) -> CpuArray:
        return CpuArray.over(x.numpy()[rows])

    def put_rows(self, target: CpuArray, rows: np.ndarray, x: CpuArray) -> None:
        target.numpy()[rows] = x.numpy()

    def scatter_columns(self, x: CpuArray, columns: CpuArray, width: int) -> CpuArray:
        out = np.full((len(x), width), -np.inf, np.float32)
        out[:, columns.numpy()] = x.numpy()
        return CpuArray.over(out)

    def mask_clusters(self, logits: CpuArray, scores: CpuArray, clusters: CpuArray, count: int) -> None:
        values, others = logits.numpy(), len(clusters) - count
        best = scores.numpy().argpartition(max(0, others - 1), axis=1)[:, others:]
        columns = clusters.numpy()[best].reshape(len(values), -1)
        kept = np.take_along_axis(values, columns, axis=1)
        values.fill(-np.inf)
        np.put_along_axis(values, columns, kept, axis=1)

    def as_token_ids(self, tokens: np.ndarray) -> CpuArray:
        return CpuArray.over(np.maximum(tokens, 0))

    def put_tokens(self, token_ids: CpuArray, targets: np.ndarray, tokens: np.ndarray, sources: np.ndarray) -> None:
        token_ids.numpy()[targets] = np.maximum(tokens[sources], 0)

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        return self.runner.capture(forward, largest, self)

    def capture_parts(self, forward: Forward, largest: BatchSize) -> PartedForward:
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
        return self.runner.new(batch.token_ids, (len(batch.token_ids), width), DType.FLOAT32)

    def host_call(self, function: Callable[[np.ndarray], None], x: CpuArray) -> CpuArray:
        self.runner.run(cpu.host_call(lambda rows: function(x[:rows].numpy())), x)
        return x

    def all_reduce(self, x: CpuArray, bias: CpuArray | None = None, add: CpuArray | None = None) -> CpuArray:
        if self.group is None:
            assert bias is None and add is None, "products of a single rank add both themselves"
            return x
        self.runner.run(all_reduce_op(self.group, x, bias, add), x)
        return x

    def all_gather(self, x: CpuArray) -> CpuArray:
        if self.group is None:
            return x
        out = self.runner.new(x, (x.shape[0], self.group.size * x.shape[1]), DType.FLOAT32)
        self.runner.run(all_gather_op(self.group, x, out), x)
        return out

    def check_dtype(self, dtype: DType) -> None:
        if dtype not in (DType.FLOAT32, DType.BFLOAT16):
            raise ConfigError(
                f"the CPU kernels compute in float32 or bfloat16, not in {dtype}: set dtype='bfloat16', or "
                "kernels='reference'"
            )

    def make_sampling_backend(self, vocab_size: int) -> CompiledSampling:
        return CompiledSampling()

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return spec.vectors * self._array_block_bytes(spec, block_size)

    def _array_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of the keys, of the values, or of the latents, of one block of one layer."""
        dtype = DType(spec.dtype)
        if dtype not in DTYPES:
            raise ConfigError(
                f"the CPU kernels have no KV cache of type {dtype}; kv_cache_dtype may be auto, float32, bfloat16 or "
                "int8"
            )
        return int(cpu.block_bytes(spec.num_kv_heads, spec.head_dim, block_size, DTYPES[dtype]))

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        stride = self._array_block_bytes(spec, block_size)
        size = -(-blocks * stride // _PAGE) * _PAGE
        count = spec.vectors * layers
        memory = _untouched_zeros(count, size)
        arrays = [CpuArray.over(memory[i * size :][: blocks * stride].reshape(blocks, stride)) for i in range(count)]
        return [
            CpuLayerCache(key, value, spec.num_kv_heads, spec.head_dim, block_size, DType(spec.dtype))
            for key, value in zip(arrays[:: spec.vectors], arrays[spec.vectors - 1 :: spec.vectors], strict=True)
        ]

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
        return not isinstance(rows, GroupQuantizedRows) or group_format(rows) is not None

    def form_of(self, kind: str) -> StoredForm:
        return form_of(kind)

    def pack_heads(self, weight: np.ndarray, dtype: DType) -> CpuHeads:
        return CpuHeads(self.runner, weight, dtype)

    def pack_experts(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        shared: int = 0,
        activation: Activation = "silu",
        *,
        weighs_input: bool = False,
    ) -> CpuExperts:
        return CpuExperts(self.runner, gate_up, down, activation, weighs_input=weighs_input)

    def add_expert_bias(self, x: CpuArray, experts: CpuArray, weights: CpuArray, bias: CpuArray) -> CpuArray:
        op = cpu.add_expert_bias(
            *strided(x), experts.address, weights.address, experts.shape[1], bias.address, x.shape[1]
        )
        self.runner.run(op, x)
        return x

    def route(
        self, logits: CpuArray, spec: RoutingSpec, bias: CpuArray | None = None, factors: CpuArray | None = None
    ) -> tuple[CpuArray, CpuArray]:
        shape = (logits.shape[0], spec.top_k + spec.shared)
        experts, weights = self.runner.new(logits, shape, DType.INT32), self.runner.new(logits, shape, DType.FLOAT32)
        op = cpu.route(
            *strided(logits), address(bias), experts.address, weights.address, logits.shape[1] - spec.shared,
            spec.shared, spec.top_k, spec.num_groups, spec.top_groups, spec.best_of_group,
            getattr(cpu.Scoring, spec.scoring), spec.renormalize, spec.least_sum, spec.scale, spec.jitter,
            address(factors),
        )  # fmt: skip
        self.runner.run(op, logits)
        return experts, weights

    def keep_table(self, tensor: np.ndarray | QuantizedRows, dtype: DType) -> CpuArray | GGUFRows:
        """The tensor itself, in the types that the lookup reads and in GGUF blocks."""
        if isinstance(tensor, GGUFRows):
            return tensor
        if isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous and tensor.dtype in _TABLES:
            return CpuArray.over(tensor)
        return self.array(to_values(tensor), dtype)

    def embedding(
        self,
        ids: CpuArray,
        table: CpuArray | GGUFRows,
        first: int = 0,
        *,
        scale: float = 1.0,
        add: CpuArray | None = None,
        otherwise: int | None = None,
    ) -> CpuArray:
        """While recording, ids must be the batch's token ids, positions or types."""
        out = self.runner.new(ids, (ids.shape[0], table.shape[1]), DType.FLOAT32) if add is None else add
        recording = self.runner.recording
        if isinstance(table, GGUFRows):
            assert add is None and (recording is None or ids is recording.batch.token_ids)
            rows = _decoded_rows(table, out, first, scale, otherwise)
            self.runner.run(cpu.host_call(rows, True), ids, token_ids=ids.address)
            return out
        op = cpu.embedding(
            table.address, *table.shape, out.address, DTYPES[table.dtype], cpu.Dtype.f32, first,
            cpu.Ids.token_ids if recording is None else recording.ids_of(ids), scale, address(add),
            -1 if otherwise is None else otherwise,
        )  # fmt: skip
        self.runner.run(op, ids, token_ids=ids.address)
        return out

    def rms_norm(
        self, x: CpuArray, weight: CpuArray, eps: float, *, out_dtype: DType | None = None, add: CpuArray | None = None
    ) -> CpuArray:
        out = self.runner.new(x, x.shape, out_dtype or weight.dtype) if add is None else add
        source, target = _norm_input(x, weight), _norm_output(x, out, eps)
        op = cpu.rms_norm(*source, *target, add=address(add), weight_head_stride=_head_stride(weight))
        self.runner.run(op, x)
        return out

    def layer_norm(
        self, x: CpuArray, weight: CpuArray, bias: CpuArray | None, eps: float, *, out_dtype: DType | None = None
    ) -> CpuArray:
        out = self.runner.new(x, x.shape, out_dtype or weight.dtype)
        source, dtype, stride, weights, weight_dtype = _norm_input(x, weight)
        op = cpu.layer_norm(
            source, dtype, stride, weights, address(bias), weight_dtype, *_norm_output(x, out, eps),
            weight_head_stride=_head_stride(weight),
        )  # fmt: skip
        self.runner.run(op, x)
        return out

    def clamp(self, x: CpuArray, limit: float, least: float | None = None) -> CpuArray:
        least = -limit if least is None else least
        self.runner.run(cpu.clamp(x.address, x.strides[0], x.shape[1], DTYPES[x.dtype], limit, least), x)
        return x

    def soft_cap(self, x: CpuArray, cap: float) -> CpuArray:
        self.runner.run(cpu.soft_cap(x.address, x.strides[0], x.shape[1], cap), x)
        return x

    def scale(self, x: CpuArray, factor: float) -> CpuArray:
        self.runner.run(cpu.scale(x.address, x.strides[0], x.shape[1], factor), x)
        return x

    def activate(self, x: CpuArray, activation: Activation) -> CpuArray:
        kind = getattr(cpu.Activation, activation)
        self.runner.run(cpu.activate(x.address, x.strides[0], x.address, x.shape[1], DTYPES[x.dtype], kind), x)
        return x

    def multiply(self, x: CpuArray, factors: CpuArray, bias: CpuArray | None = None) -> CpuArray:
        stride = factors.strides[0] if len(factors.shape) > 1 else 0
        dtype = DTYPES[x.dtype]
        op = cpu.multiply(x.address, x.strides[0], x.shape[1], dtype, factors.address, stride, address(bias))
        self.runner.run(op, x)
        return x

    def xielu(self, x: CpuArray, parameters: Xielu) -> CpuArray:
        self.runner.run(cpu.xielu(x.address, x.strides[0], x.shape[1], *parameters), x)
        return x

    def scale_queries(self, q: CpuArray, positions: CpuArray, temperature: AttentionTemperature) -> CpuArray:
        op = cpu.query_scale(
            q.address, *q.strides[:2], *q.shape[1:], DTYPES[q.dtype], temperature.beta, temperature.period,
            temperature.offset,
        )  # fmt: skip
        self.runner.run(op, q, positions=positions.address)
        return q

    def rotary(
        self, q: CpuArray, k: CpuArray, positions: CpuArray, cos_sin: CpuArray, sections: Sequence[int] = ()
    ) -> tuple[CpuArray, CpuArray]:
        op = cpu.rotary(
            *strided(q), *strided(k), q.shape[1], k.shape[1], q.shape[2], cos_sin.shape[1], cos_sin.address,
            DTYPES[q.dtype],
            sections=list(sections), axes=positions.shape[0] if sections else 0,
        )  # fmt: skip
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
        assert isinstance(absorb, CpuHeads)
        (tokens, heads, width), rope, rank = q.shape, k_rope.shape[1], latent.shape[1]
        out = self.runner.new(q, (tokens, heads, rank + rope), q.dtype)
        run = self.runner.run
        run(absorb.operation(q[:, :, : width - rope], out[:, :, :rank]), q)
        q_rope, rotated = q[:, :, width - rope :], out[:, :, rank:]
        rotary = cpu.rotary(
            q_rope.address, q.strides[0], k_rope.address, k_rope.strides[0], heads, 1, rope, cos_sin.shape[1],
            cos_sin.address, DTYPES[q.dtype], q.strides[1], rotated.address, out.strides[0], out.strides[1],
        )  # fmt: skip
        run(rotary, q, positions=batch.positions.address)
        slots = batch.slot_mapping[cache.group].address
        run(write_op(latent[:, None], k_rope[:, None], cache), latent, slots=slots)
        return out

    def reshape_and_cache(self, k: CpuArray, v: CpuArray, cache: LayerCache, slots: CpuArray) -> None:
        self.runner.run(write_op(k, v, cache), k, slots=slots.address)

    def paged_attention(self, q: CpuArray, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> CpuArray:
        """Accumulates each sequence's context in pieces at fixed positions, in order."""
        out = self.runner.new(q, (*q.shape[:2], spec.value_dim or q.shape[2]), q.dtype)
        self.runner.run_step(attention_op(q, cache, out, spec), q, batch)
        return out

    def causal_conv(
        self,
        x: CpuArray,
        weight: CpuArray,
        bias: CpuArray | None,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
        activation: Literal["silu"] | None = None,
        in_gate: CpuArray | None = None,
        out_gate: CpuArray | None = None,
    ) -> CpuArray:
        out = self.runner.new(x, x.shape, x.dtype)
        op = cpu.causal_conv(
            *strided(x), DTYPES[x.dtype], out.address, weight.address, *weight.shape, address(bias),
            *strided(in_gate), *strided(out_gate), activation == "silu", *state_memory(cache), offset,
        )  # fmt: skip
        self.runner.run_step(op, x, batch)
        return out

    def gated_delta_rule(
        self,
        qkv: CpuArray,
        z: CpuArray,
        b: CpuArray,
        a: CpuArray,
        heads: DeltaHeads,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
    ) -> CpuArray:
        out = self.runner.new(qkv, (len(qkv), heads.value_heads * heads.value_dim), qkv.dtype)
        op = cpu.gated_delta(
            *strided(qkv), *strided(z), *strided(b), *strided(a), DTYPES[qkv.dtype], out.address, heads.decay.address,
            heads.dt_bias.address, heads.norm.address, heads.key_heads, heads.value_heads, heads.key_dim,
            heads.value_dim, heads.eps, heads.beta_scale, heads.per_channel, heads.gate == "sigmoid",
            *state_memory(cache), offset,
        )  # fmt: skip
        self.runner.run_step(op, qkv, batch)
        return out

    def sigmoid_gate(self, x: CpuArray, gate: CpuArray) -> CpuArray:
        self.runner.run(cpu.sigmoid_gate(*strided(x), *strided(gate), x.shape[1], DTYPES[x.dtype]), x)
        return x

    def selective_scan(
        self,
        x: CpuArray,
        dt: CpuArray,
        b: CpuArray,
        c: CpuArray,
        z: CpuArray,
        channels: ScanChannels,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        offset: int = 0,
    ) -> CpuArray:
        states, width = channels.decay.shape
        out = self.runner.new(x, x.shape, x.dtype)
        op = cpu.selective_scan(
            *strided(x), *strided(z), DTYPES[x.dtype], out.address, *strided(dt), *strided(b), *strided(c),
            channels.decay.address, channels.dt_bias.address, channels.skip.address, width, states,
            *state_memory(cache), offset,
        )  # fmt: skip
        self.runner.run_step(op, x, batch)
        return out

    def ssd_scan(
        self,
        xbc: CpuArray,
        dt: CpuArray,
        heads: ScanHeads,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        z: CpuArray | None = None,
        offset: int = 0,
        out_dtype: DType | None = None,
    ) -> CpuArray:
        out = self.runner.new(xbc, (len(xbc), heads.heads * heads.head_dim), out_dtype or xbc.dtype)
        op = cpu.ssd_scan(
            *strided(xbc), *strided(dt), *strided(z), DTYPES[xbc.dtype], out.address, DTYPES[out.dtype],
            heads.decay.address, heads.dt_bias.address, heads.skip.address, heads.heads, heads.groups, heads.head_dim,
            heads.state_size, *heads.dt_limits, heads.dt_scale, heads.gate_scale, heads.scale, *state_memory(cache),
            offset,
        )  # fmt: skip
        self.runner.run_step(op, xbc, batch)
        return out

    def silu_gate(self, x: CpuArray, gate: CpuArray, scale: float = 1.0) -> CpuArray:
        out = self.runner.new(gate, gate.shape, gate.dtype)
        op = cpu.silu_gate(*strided(x), *strided(gate), gate.shape[1], scale, DTYPES[gate.dtype], out.address)
        self.runner.run(op, gate)
        return out

    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        for size, arrays in _by_block_bytes(caches).items():
            check_pairs(pairs, len(arrays[0]), len(arrays[0]))
            cpu.copy_blocks([array.address for array in arrays], pairs, size)

    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        to = _by_block_bytes(targets)
        for size, arrays in _by_block_bytes(sources).items():
            check_pairs(pairs, len(arrays[0]), len(to[size][0]))
            cpu.swap_blocks([x.address for x in arrays], [x.address for x in to[size]], pairs, size)

    def read_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        return _move_rows(cpu.read_blocks, caches, blocks, rows)

    def write_blocks(self, caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
        return _move_rows(cpu.write_blocks, caches, blocks, rows)


def _decoded_rows(
    table: GGUFRows, out: CpuArray, first: int, scale: float, otherwise: int | None
) -> Callable[[int, int], None]:
    """Writes scale * rows of the table to ``out``, by the number of tokens and the address of their ids."""

    def read(tokens: int, ids: int) -> None:
        rows = CpuArray(table, ids, (tokens,), DType.INT64).numpy() - first
        held = (rows >= 0) & (rows < len(table.rows))
        values = table.reorder(np.where(held, rows, otherwise or 0)).dequantize()
        values *= np.float32(scale)
        if otherwise is None:
            values[~held] = 0.0
        out[:tokens].numpy()[:] = values

    return read


def _norm_input(x: CpuArray, weight: CpuArray) -> tuple[Any, ...]:
    """Address, type and stride of x, address and type of the weight."""
    return x.address, DTYPES[x.dtype], x.strides[0], weight.address, DTYPES[weight.dtype]


def _head_stride(weight: CpuArray) -> int:
    """Elements from a head's weight to the next's; 0: all heads have the same."""
    return weight.strides[0] if len(weight.shape) == 2 else 0


def _norm_output(x: CpuArray, out: CpuArray, eps: float) -> tuple[Any, ...]:
    """Address and type of out, width, eps, heads and the stride from head to head of x."""
    heads = x.shape[1] if len(x.shape) == 3 else 1
    return out.address, DTYPES[out.dtype], x.shape[-1], eps, heads, x.strides[1] if heads > 1 else 0


@dataclass(slots=True)
class CpuLayerCache(LayerCache):
    """``key`` and ``value`` are uint8 [blocks, bytes of a block]."""

    kv_heads: int
    head_dim: int
    block_size: int
    #: int8: a scale for each token and KV head.
    dtype: DType


def write_op(k: CpuArray, v: CpuArray, cache: LayerCache) -> Any:
    """The operation that writes k and v [T, K, D], tokens strided, or the parts of latents, to the step's slots."""
    assert isinstance(cache, CpuLayerCache)
    return cpu.reshape_and_cache(
        *strided(k), *strided(v), cache.key.address, cache.value.address, cache.kv_heads, cache.head_dim,
        cache.block_size, DTYPES[k.dtype], DTYPES[cache.dtype], cache.group,
        k.shape[2] if cache.value is cache.key else 0,
    )  # fmt: skip


def state_memory(cache: LayerCache) -> tuple[int, int, int, int, int]:
    """Address of the layer's states, float32 numbers from one block to the next, its tokens and drafts, KV group."""
    return cache.key.address, cache.key.strides[0] // 4, cache.state_tokens, cache.draft_tokens, cache.group


def attention_op(q: CpuArray, cache: LayerCache, out: CpuArray, spec: AttentionSpec) -> Any:
    """The operation that computes attention of q [T, H, D], tokens strided, to out, contiguous."""
    assert isinstance(cache, CpuLayerCache)
    return cpu.paged_attention(
        *strided(q), out.address, cache.key.address, cache.value.address, q.shape[1], cache.kv_heads, cache.head_dim,
        cache.block_size, DTYPES[q.dtype], DTYPES[cache.dtype], spec.scale, spec.window or 0, spec.soft_cap or 0.0,
        address(_slopes(spec.alibi_slopes)), spec.causal, cache.group, spec.value_dim or 0,
        *((0, 0, 0) if spec.bias is None else (address(spec.bias.values), *spec.bias.layout)),
        cross=spec.cross, sees_spans=spec.sees_spans, sinks=address(spec.sinks), chunked=spec.chunked,
    )  # fmt: skip


@functools.cache
def _slopes(slopes: tuple[float, ...] | None) -> np.ndarray | None:
    """The slopes as an array that is never freed, as operations hold its address."""
    return None if slopes is None else np.array(slopes, np.float32)


def _arrays(caches: list[LayerCache]) -> list[CpuArray]:
    """The arrays of the caches, in order; a latent cache has one array."""
    return [
        array for cache in caches for array in ((cache.key,) if cache.value is cache.key else (cache.key, cache.value))
    ]


def _move_rows(move: Callable[..., None], caches: list[LayerCache], blocks: list[int], rows: np.ndarray) -> Wait:
    arrays = _arrays(caches)
    sizes = [array.strides[0] for array in arrays]
    check_rows(caches, blocks, rows, sum(sizes))
    move([array.address for array in arrays], sizes, blocks, rows.ctypes.data)
    return no_wait


def _by_block_bytes(caches: list[LayerCache]) -> dict[int, list[CpuArray]]:
    """Arrays of the caches by the bytes of a block, which differ between KV groups."""
    groups: dict[int, list[CpuArray]] = {}
    for array in _arrays(caches):
        groups.setdefault(array.strides[0], []).append(array)
    return groups


def _untouched_zeros(arrays: int, size: int) -> np.ndarray:
    """uint8 [arrays * size] zeros that use no memory until they are written.

    They are in huge pages if the system has them, except the first bytes of each array. A sequence's blocks are
    anywhere in the cache: with small pages each would need an entry in the TLB. The first blocks are written first:
    in huge pages, the first step of an engine would zero a whole page for each layer.
    """
    if not arrays * size:  # a pipeline stage may have no layer of a group
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


# Collectives of ranks on one machine through shared memory, as operations of a tape.


class SharedMemoryCommunicator:
    """One rank of a group on this machine; see ``Communicator``."""

    def __init__(self, memory: Any, rank: int, size: int, *, timeout: float = 60.0) -> None:
        """Joins the group of the ranks that map ``memory``.

        Args:
            memory: writable, zero at first, aligned to 64 bytes, of at least ``bytes_for(size)`` bytes.
            timeout: seconds that a rank waits for the others before a collective fails with a RuntimeError.
        """
        self.rank, self.size = rank, size
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._group = cpu.Communicator(self._memory.ctypes.data, len(self._memory), rank, size, timeout)

    @staticmethod
    def bytes_for(size: int, slot_floats: int = 1 << 18) -> int:
        """Bytes of shared memory for ``size`` ranks that exchange ``slot_floats`` floats at once.

        Rows of ``all_gather`` may not be longer.
        """
        return int(cpu.Communicator.bytes_for(size, slot_floats))

    def all_reduce_op(self, x: CpuArray, bias: CpuArray | None = None, add: CpuArray | None = None) -> Any:
        """The operation that sums x [T, width] over the ranks in place, then adds bias [width] and add [T, width].

        All are float32 and contiguous. The caller keeps them alive.
        """
        return cpu.all_reduce(self._group, x.address, x.shape[1], address(bias), *strided(add))

    def all_gather_op(self, x: CpuArray, out: CpuArray) -> Any:
        """The operation that gathers x [T, width] into out [T, size * width], float32 and contiguous."""
        return cpu.all_gather(self._group, x.address, out.address, x.shape[1])

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        self.all_reduce_op(CpuArray.over(np.asarray(x))).run(cpu.Step(len(x)))
        return x

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), self.size * x.shape[1]), np.float32)
        self.all_gather_op(CpuArray.over(np.asarray(x)), CpuArray.over(out)).run(cpu.Step(len(x)))
        return out


def all_reduce_op(group: Communicator, x: CpuArray, bias: CpuArray | None, add: CpuArray | None) -> Any:
    """``SharedMemoryCommunicator.all_reduce_op`` for any group: other ones are called on the host."""
    if isinstance(group, SharedMemoryCommunicator):
        return group.all_reduce_op(x, bias, add)

    def run(rows: int) -> None:
        part = x[:rows].numpy()
        total = np.asarray(group.all_reduce(part))
        if bias is not None:
            total += bias.numpy()
        if add is not None:
            total += add[:rows].numpy()
        if total is not part:
            part[:] = total

    return cpu.host_call(run)


def all_gather_op(group: Communicator, x: CpuArray, out: CpuArray) -> Any:
    """``SharedMemoryCommunicator.all_gather_op`` for any group: other ones are called on the host."""
    if isinstance(group, SharedMemoryCommunicator):
        return group.all_gather_op(x, out)

    def run(rows: int) -> None:
        out[:rows].numpy()[:] = np.asarray(group.all_gather(x[:rows].numpy()))

    return cpu.host_call(run)
