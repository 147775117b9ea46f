"""A worker's memory: weights, the largest step, and the KV cache blocks that fit beside them.

The memory of the largest step is estimated on a CPU and measured on a GPU, by running it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from octavo.core.config import EngineConfig
from octavo.core.errors import InsufficientMemoryError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, make_batch
from octavo.layers.context import LayerContext
from octavo.models.sizes import loading_bytes, outline_network
from octavo.runner.cgroups import MemoryLimit, group_limits

GIB = 1 << 30
_DEFAULT_SWAP_SPACE = 4 * GIB
#: Defaults of ``gpu_memory_utilization``: of what is free on a CPU, where other programs live; of all a GPU has.
_CPU_SHARE, _GPU_SHARE = 0.5, 0.9


@dataclass(frozen=True)
class WorkerShare:
    """What a worker may take of its machine: the workers there divide host memory and threads evenly."""

    #: Of this worker among those of its machine, from 0.
    local_rank: int = 0
    #: Workers on the machine.
    local_size: int = 1

    def free_memory(self) -> int:
        """Bytes of host memory; see ``available_memory``."""
        return available_memory() // self.local_size

    def num_threads(self, total: int | None) -> int | None:
        """Of ``total`` threads for the machine (None: its processors) those of this worker; None: all processors."""
        if self.local_size == 1:
            return total
        share, rest = divmod(total or len(os.sched_getaffinity(0)), self.local_size)
        return max(1, share + (self.local_rank < rest))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of what the machine has free, and of what its limits leave.

    ``root``: as for ``memory_limits``.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *(limit.available for limit in memory_limits(root))])


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of this process: those of its control groups (see ``group_limits``), and of its address space."""
    import psutil

    limits = group_limits(root)
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("ulimit -v", addresses, int(psutil.Process().memory_info().vms)))
    return limits


def activation_bytes(config: ModelConfig, options: EngineConfig) -> int:
    """A bound on the bytes that the largest step needs beside weights and cache: activations of one layer, and logits.

    Nothing is kept from one layer to the next but the residual stream, so one layer's tensors bound them all.
    """
    row = 4 * config.hidden_size + config.attention_width + 3 * config.intermediate_size
    logits = 3 * min(options.max_num_seqs, options.token_budget) * config.vocab_size
    return 4 * (options.token_budget * row + logits)


def check_weights_fit(config: ModelConfig, context: LayerContext, free: int) -> None:
    """Refuses a model whose share of ``context`` does not fit into ``free`` bytes, before anything is read.

    Raises:
        InsufficientMemoryError: with what is needed and what is there.
        UnsupportedModelError, ConfigError: there is no such network.
    """
    needed = loading_bytes(outline_network(config, context), copies=context.kernels.copies_weights)
    if needed > free:
        raise InsufficientMemoryError(
            f"the weights need {needed / GIB:.2f} GiB in {context.quantization or context.dtype_name} while they are "
            f"loaded, but only {free / GIB:.2f} GiB of memory are free"
        )


def free_for_caches(config: ModelConfig, options: EngineConfig, share: WorkerShare) -> int:
    """Bytes of the worker's share that are free beside the largest step; to be asked once the weights are loaded."""
    return max(0, share.free_memory() - activation_bytes(config, options))


def num_host_blocks(config: ModelConfig, options: EngineConfig, block_bytes: int, free: int, workers: int = 1) -> int:
    """Host blocks of ``block_bytes`` each for what preempted requests hold, of ``free`` bytes of host memory.

    Both are those of one of the machine's ``workers``, which divide ``swap_space``.

    ``num_host_blocks_override`` if given. Else as many as ``swap_space`` holds, by default 4 GiB or a tenth of what is
    free if that is less, or none if the other options never move a block there; and never more than ``max_num_seqs``
    sequences of full length could use.

    Raises:
        InsufficientMemoryError: the ``swap_space`` that was asked for is more than what is free.
    """
    if options.num_host_blocks_override is not None:
        return options.num_host_blocks_override
    free *= workers
    space = _default_swap_space(options, free) if options.swap_space is None else int(options.swap_space * GIB)
    if space > free:
        raise InsufficientMemoryError(
            f"swap_space={options.swap_space:g} GiB is more than the {free / GIB:.3f} GiB that are free beside the "
            "weights and the largest step's activations; lower it (0: preempted requests are recomputed)"
        )
    full_length = -(-config.max_position // options.block_size)
    return min(space // workers // block_bytes, full_length * options.max_num_seqs)


def _default_swap_space(options: EngineConfig, free: int) -> int:
    if options.preemption_mode == "recompute" and not options.host_prefix_cache:
        return 0
    return min(_DEFAULT_SWAP_SPACE, free // 10)


def num_blocks(options: EngineConfig, block_bytes: int, free: int, max_model_len: int, position_bytes: int = 0) -> int:
    """KV cache blocks of ``block_bytes`` each on a CPU, of ``free`` bytes of its memory.

    ``num_gpu_blocks_override`` if given. Else those of ``kv_cache_memory_bytes``, or of the share
    ``gpu_memory_utilization`` of what is free, less ``position_bytes`` for each position of the longest sequence; and
    never more than ``max_num_seqs`` sequences of full length could use.

    Raises:
        InsufficientMemoryError: not one sequence of ``max_model_len`` tokens fits though that length was asked for, or
            not a single block; or less is free than was asked for.
    """
    share = options.gpu_memory_utilization or _CPU_SHARE
    budget = _Budget(
        int(share * free),
        free,
        f"gpu_memory_utilization={share} of the {max(0, free) / GIB:.3f} GiB that are free beside the weights, the "
        "largest step and the swap space gives",
    )
    return _blocks_within(options, block_bytes, budget, max_model_len, position_bytes)


def num_gpu_blocks(
    options: EngineConfig, block_bytes: int, total: int, peak: int, max_model_len: int, position_bytes: int = 0
) -> int:
    """KV cache blocks of ``block_bytes`` each on a GPU with ``total`` bytes of memory.

    As ``num_blocks``, but ``gpu_memory_utilization`` is a share of all memory, and what it leaves beside ``peak``, the
    bytes in use at the peak of the largest step, is for the blocks.

    Raises:
        InsufficientMemoryError: as ``num_blocks``.
    """
    share = options.gpu_memory_utilization or _GPU_SHARE
    budget = _Budget(
        int(share * total) - peak,
        total - peak,
        f"gpu_memory_utilization={share} of the GPU's {total / GIB:.3f} GiB, less {peak / GIB:.3f} GiB for weights and "
        "the largest step, leaves",
    )
    return _blocks_within(options, block_bytes, budget, max_model_len, position_bytes)


@dataclass(frozen=True)
class _Budget:
    """Bytes that are meant for the KV cache, and those that could be had."""

    meant: int
    free: int
    #: Says in an error where ``meant`` comes from.
    source: str


def _blocks_within(
    options: EngineConfig, block_bytes: int, given: _Budget, max_model_len: int, position_bytes: int
) -> int:
    if options.num_gpu_blocks_override is not None:
        return options.num_gpu_blocks_override
    asked, budget, source = options.kv_cache_memory_bytes, given.meant, given.source
    if asked is not None:
        if asked > given.free:
            raise InsufficientMemoryError(
                f"kv_cache_memory_bytes={asked} ({asked / GIB:.3f} GiB) is more than the "
                f"{max(0, given.free) / GIB:.3f} GiB that are free beside the weights and the largest step; lower it"
            )
        budget, source = asked, f"kv_cache_memory_bytes={asked} is"
    else:
        tokens = budget // (block_bytes // options.block_size + position_bytes or 1)
        budget -= position_bytes * max(0, min(tokens, max_model_len))
    per_sequence = -(-max_model_len // options.block_size)
    least = per_sequence if options.max_model_len is not None else 1
    if budget < least * block_bytes:
        what = f"one sequence of {max_model_len} tokens" if least > 1 else "one block"
        raise InsufficientMemoryError(
            f"the KV cache of {what} needs {least * block_bytes / GIB:.3f} GiB, but {source} "
            f"{max(0, budget) / GIB:.3f} GiB; lower max_model_len, max_num_batched_tokens, max_num_seqs or swap_space, "
            "or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    return min(budget // block_bytes, per_sequence * options.max_num_seqs)


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    def reset_peak(self) -> None:
        """Frees cached memory and resets the peak."""

    def peak(self) -> int:
        """Peak of this process's tensors since ``reset_peak``, fragmentation included."""

    def outside(self) -> int:
        """In use by anything but this process's tensors: the driver's context, compiled code, other programs."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """Bytes not in use."""


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def reset_peak(self) -> None:
        """Empties torch's cache of freed memory first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Segments that torch has reserved from the driver, fragmentation included."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def outside(self) -> int:
        """What the driver counts and torch does not."""
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(total - free - torch.cuda.memory_reserved(self._device)))

    def total(self) -> int:
        """As the driver counts it."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """As the driver counts it, plus what torch has cached."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + kept)


def measure_peak(run_largest_step: Callable[[], object], memory: DeviceMemory) -> int:
    """Bytes of the device in use at the peak of the largest step, weights and other programs included.

    The step is run twice: the first time compiles kernels and makes workspaces that stay. Memory that it
    no longer holds is freed, so that the KV cache can use it.

    Raises:
        InsufficientMemoryError: the step does not fit.
    """
    try:
        run_largest_step()
        memory.reset_peak()
        run_largest_step()
    except torch.OutOfMemoryError as e:
        raise InsufficientMemoryError(
            "a step of max_num_batched_tokens tokens and max_num_seqs sequences does not fit beside the weights in the "
            f"GPU's {memory.total() / (1 << 30):.2f} GiB; lower these: {e}"
        ) from None
    peak = memory.peak() + memory.outside()
    memory.reset_peak()
    return peak


def largest_step(size: BatchSize, device: torch.device | str) -> ForwardBatch:
    """A step with as many tokens and as many sequences as there may be, which all sample.

    The last sequences have prompts as long as they may be until the tokens are used up, the others decode. Everything
    lies in block 0 and overwrites itself there, so a cache of one block serves; ``max_seq_len`` is that of the longest
    context, which decides what attention sets aside for its partial results.
    """
    lens = [1] * size.sequences
    left = size.tokens - len(lens)
    for i in reversed(range(len(lens))):
        lens[i] += min(left, size.max_seq_len - 1)
        left -= lens[i] - 1
    tables = torch.zeros(size.shape("GSB"), dtype=torch.int32)
    batch = make_batch(lens, lens, tables, size.block_size, device=device)
    return replace(batch, max_seq_len=size.max_seq_len)
