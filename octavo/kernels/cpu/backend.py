"""The CPU backend: C++ operations, run one by one or recorded once and replayed for every step; see ``OpRunner``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.core.kv_spec import KVSpec
from octavo.kernels.cache import LayerCache, torch_dtype
from octavo.kernels.communicator import Communicator
from octavo.kernels.cpu import attention
from octavo.kernels.cpu.collectives import HostCommunicator, SharedMemoryCommunicator
from octavo.kernels.cpu.compiled import DTYPES, address, cpu, strided
from octavo.kernels.cpu.experts import CpuExperts, route_op
from octavo.kernels.cpu.group_codes import group_format
from octavo.kernels.cpu.linear import (
    CpuDenseWeight,
    CpuHeads,
    CpuQuantizedWeight,
    CpuWeight,
    codes_of_rows,
    codes_of_tensor,
    keeps_bits,
)
from octavo.kernels.cpu.lora import CpuAdapters
from octavo.kernels.cpu.op_runner import OpRunner
from octavo.kernels.cpu.sampling import CompiledSampling
from octavo.kernels.experts import RoutingSpec
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.group_rows import GroupQuantizedRows
from octavo.kernels.interface import AttentionSpec, Kernels
from octavo.kernels.packed_weight import PackedHeads, PackedWeight, stack_rows
from octavo.kernels.quantized_rows import QuantizedRows


class CpuKernels(Kernels):
    """Kernels of ``octavo._cpu``. The results of a row do not depend on other rows."""

    name = "cpu"
    computes_outside_torch = True
    copies_weights = True
    group: SharedMemoryCommunicator | HostCommunicator | None = None

    def __init__(self) -> None:
        """Selects the best instruction set of this processor, or the one that ``OCTAVO_CPU_ISA`` names.

        Raises:
            ConfigError: this processor cannot run that instruction set.
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
        """Name, instruction set and threads."""
        return f"cpu ({cpu.isa()}, {cpu.num_threads()} threads{', pinned' if cpu.threads_pinned() else ''})"

    def set_threads(self, count: int | None, pin: bool = False) -> None:
        """Sets the threads of the kernels' pool. Torch gets one: others would spin after each of its operations."""
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cpu.set_threads(count or available or 1, pin)
        torch.set_num_threads(1)

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """See ``OpRunner.capture``."""
        return self.runner.capture(forward, largest)

    def take_sampled(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """A copy of the rows; recorded operations on it run over the sampled rows."""
        recording = self.runner.recording
        if recording is None:
            return super().take_sampled(hidden, batch)
        out = recording.new_sampled(hidden)
        size = hidden.element_size()
        op = cpu.take_sampled(hidden.data_ptr(), hidden.stride(0) * size, out.data_ptr(), out.stride(0) * size)
        self.runner.run(op, out)
        return out

    def token_rows(self, batch: ForwardBatch, width: int) -> Tensor:
        """See ``Kernels``."""
        return self.runner.new(batch.token_ids, (len(batch.token_ids), width), torch.float32)

    def host_call(self, function: Callable[[Tensor], None], x: Tensor) -> Tensor:
        """The function gets the step's rows of x."""
        self.runner.run(cpu.host_call(lambda rows: function(x[:rows])), x)
        return x

    def join(self, group: Communicator) -> None:
        """See ``Collectives``; groups through other than shared memory are called on the host."""
        self.group = group if isinstance(group, SharedMemoryCommunicator) else HostCommunicator(group)

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        """Through shared memory, with bias and add in one pass."""
        if self.group is None:
            return super().all_reduce(x, bias, add)
        self.runner.run(self.group.all_reduce_op(x, bias, add), x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Through shared memory."""
        if self.group is None:
            return x
        out = self.runner.new(x, (x.shape[0], self.group.size * x.shape[1]), torch.float32)
        self.runner.run(self.group.all_gather_op(x, out), x)
        return out

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuses float16."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"the CPU kernels compute in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}: set "
                "dtype='bfloat16', or kernels='reference'"
            )

    def make_sampling_backend(self, vocab_size: int) -> CompiledSampling:
        """All rows in one call, on the kernels' threads."""
        return CompiledSampling()

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one block of one layer, keys and values, padding and scales included."""
        return spec.vectors * attention.block_bytes(
            spec.num_kv_heads, spec.head_dim, block_size, torch_dtype(spec.dtype)
        )

    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """Keys and values in the layout that ``paged_attention`` reads."""
        dtype = torch_dtype(spec.dtype)
        shape = (spec.num_kv_heads, spec.head_dim, dtype, spec.vectors)
        return attention.make_cache(layers, blocks, block_size, *shape)

    def pack(
        self,
        parts: Sequence[Tensor | QuantizedRows],
        bias: Tensor | None = None,
        quantization: str | None = None,
        *,
        gated: bool = False,
        pieces: int = 1,
    ) -> CpuWeight:
        """Packs for the register tiles: in the tensors' type, in 8 or 4 bits, or with a checkpoint's bits."""
        blocks = [part for part in parts if isinstance(part, QuantizedRows)]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if blocks:
            weight = CpuQuantizedWeight(self.runner, [codes_of_rows(part) for part in blocks], bias, gated)
            weight.has_rows = len(blocks) == 1 and keeps_bits(blocks[0])
            return weight
        if quantization in (None, "gguf"):
            return CpuDenseWeight(self.runner, stack_rows(tensors), bias, gated, pieces)
        return CpuQuantizedWeight(
            self.runner, [codes_of_tensor(part, str(quantization)) for part in tensors], bias, gated
        )

    def has_products(self, rows: QuantizedRows) -> bool:
        """GGUF blocks of all types, and groups of the sizes that ``group_format`` lists."""
        return not isinstance(rows, GroupQuantizedRows) or group_format(rows) is not None

    def pack_heads(self, weight: Tensor) -> CpuHeads:
        """Packs each head's matrix for the register tiles."""
        return CpuHeads(self.runner, weight)

    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight], shared: int = 0
    ) -> CpuExperts:
        """Takes the packed matrices as they are."""
        return CpuExperts(self.runner, gate_up, down)

    def route(self, logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        shape = (logits.shape[0], spec.top_k + spec.shared)
        experts, weights = self.runner.new(logits, shape, torch.int32), self.runner.new(logits, shape, torch.float32)
        self.runner.run(route_op(logits, spec, bias, experts, weights), logits)
        return experts, weights

    def embedding(
        self, ids: Tensor, table: Tensor, first: int = 0, *, scale: float = 1.0, add: Tensor | None = None
    ) -> Tensor:
        """While recording, ids must be the batch's token ids or positions."""
        out = self.runner.new(ids, (ids.shape[0], table.shape[1]), torch.float32) if add is None else add
        recording = self.runner.recording
        op = cpu.embedding(
            table.data_ptr(),
            *table.shape,
            out.data_ptr(),
            DTYPES[table.dtype],
            cpu.Dtype.f32,
            first,
            recording is not None and recording.is_positions(ids),
            scale,
            address(add),
        )
        self.runner.run(op, ids, token_ids=ids.data_ptr())
        return out

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        out_dtype: torch.dtype | None = None,
        add: Tensor | None = None,
    ) -> Tensor:
        """x [T, E], or [T, heads, D] with any strides over the first two."""
        out = self.runner.new(x, tuple(x.shape), out_dtype or weight.dtype) if add is None else add
        self.runner.run(cpu.rms_norm(*_norm_input(x, weight), *_norm_output(x, out, eps), add=address(add)), x)
        return out

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, E], or [T, heads, D] with any strides over the first two."""
        out = self.runner.new(x, tuple(x.shape), out_dtype or weight.dtype)
        source, dtype, stride, weights, weight_dtype = _norm_input(x, weight)
        op = cpu.layer_norm(source, dtype, stride, weights, address(bias), weight_dtype, *_norm_output(x, out, eps))
        self.runner.run(op, x)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        self.runner.run(cpu.soft_cap(x.data_ptr(), x.stride(0), x.shape[1], cap), x)
        return x

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates both in place."""
        op = cpu.rotary(
            *strided(q),
            *strided(k),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            cos_sin.shape[1],
            cos_sin.data_ptr(),
            DTYPES[q.dtype],
        )
        self.runner.run(op, q, positions=positions.data_ptr())
        return q, k

    def latent_rotary_and_cache(
        self,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        absorb: PackedHeads,
        batch: ForwardBatch,
        cos_sin: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        """Both parts of the queries are written to their place in the result."""
        assert isinstance(absorb, CpuHeads)
        (tokens, heads, width), rope, rank = q.shape, k_rope.shape[1], latent.shape[1]
        out = self.runner.new(q, (tokens, heads, rank + rope), q.dtype)
        run = self.runner.run
        run(absorb.operation(q[:, :, : width - rope], out[:, :, :rank]), q)
        q_rope, rotated = q[:, :, width - rope :], out[:, :, rank:]
        rotary = cpu.rotary(
            q_rope.data_ptr(),
            q.stride(0),
            k_rope.data_ptr(),
            k_rope.stride(0),
            heads,
            1,
            rope,
            cos_sin.shape[1],
            cos_sin.data_ptr(),
            DTYPES[q.dtype],
            q.stride(1),
            rotated.data_ptr(),
            out.stride(0),
            out.stride(1),
        )
        run(rotary, q, positions=batch.positions.data_ptr())
        slots = batch.slot_mapping[cache.group].data_ptr()
        run(attention.write_op(latent.unsqueeze(1), k_rope.unsqueeze(1), cache), latent, slots=slots)
        return out

    def reshape_and_cache(self, k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Writes keys and values to their slots."""
        self.runner.run(attention.write_op(k, v, cache), k, slots=slots.data_ptr())

    def paged_attention(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
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


def _norm_input(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Address, type and stride of x, address and type of the weight."""
    return x.data_ptr(), DTYPES[x.dtype], x.stride(0), weight.data_ptr(), DTYPES[weight.dtype]


def _norm_output(x: Tensor, out: Tensor, eps: float) -> tuple[Any, ...]:
    """Address and type of out, width, eps, heads and the stride from head to head of x."""
    heads = x.shape[1] if x.dim() == 3 else 1
    return out.data_ptr(), DTYPES[out.dtype], x.shape[-1], eps, heads, x.stride(1) if heads > 1 else 0
