"""A worker's memory: weights, the largest step, and the KV cache blocks that fit beside them.

The memory of the largest step is estimated on a CPU and measured on a GPU, by running it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.core.config import EngineConfig
from octavo.core.errors import InsufficientMemoryError
from octavo.core.kv_groups import KVLayout
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, make_batch
from octavo.kernels.interface import Kernels
from octavo.layers.context import LayerContext
from octavo.models.sizes import build_rank_without_weights, weight_bytes
from octavo.runner.cgroups import MemoryLimit, group_limits

GIB = 1 << 30
_DEFAULT_SWAP_SPACE = 4 * GIB
#: Tokens of the longest sequence by default if its length takes no KV cache, as all layers have windows.
_LONGEST_CONTEXT = 1 << 20
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

    Nothing is kept from one layer to the next but the residual stream, so one layer's tensors bound them all. What
    adapters add to a layer's products, and to the logits, is as wide as these.
    """
    row = 4 * config.hidden_size + config.attention_width + config.feed_forward_width
    logits = 3 * config.vocab_size
    if options.enable_lora:
        row += config.hidden_size + config.attention_width + config.feed_forward_width
        logits += config.vocab_size
    tokens = max(options.token_budget, config.max_position) if config.is_encoder else options.token_budget
    # An encoder's layers are as wide as the decoder's, more or less; buffers of both are kept.
    longest = config.longest_input(config.max_position)
    inputs = 0 if longest is None else max(options.encoder_budget, longest)
    return 4 * ((tokens + inputs) * row + min(options.max_num_seqs, options.token_budget) * logits)


def check_weights_fit(config: ModelConfig, context: LayerContext, free: int) -> None:
    """Refuses a model whose share of ``context`` does not fit into ``free`` bytes, before anything is read.

    Raises:
        InsufficientMemoryError: with what is needed and what is there.
        UnsupportedModelError, ConfigError: there is no such network.
    """
    needed = weight_bytes(build_rank_without_weights(config, context))
    if needed > free:
        raise InsufficientMemoryError(
            f"the weights need {needed / GIB:.2f} GiB in {context.quantization or context.dtype} while they are "
            f"loaded, but only {free / GIB:.2f} GiB of memory are free"
        )


def num_host_blocks(
    layout: KVLayout,
    options: EngineConfig,
    free: int,
    max_model_len: int,
    workers: int = 1,
    device_blocks: Sequence[int] | None = None,
) -> list[int]:
    """Host blocks of each KV group for what preempted requests hold, of ``free`` bytes of host memory.

    ``layout`` and ``free`` are those of one of the machine's ``workers``, which divide ``swap_space``.
    ``device_blocks``: of each group, of a device with memory of its own.

    None if the options never move a block there. ``num_host_blocks_override`` if given: with several groups, the memory
    of so many blocks of each. Else as many as ``swap_space`` holds, by default 4 GiB or a tenth of what is free if that
    is less; and never more than ``max_num_seqs`` sequences of ``max_model_len`` tokens could use. By default no more
    than ``device_blocks`` either: what is preempted was on the device (Kwon et al. 2023, section 4.5), and more would
    let swapping win by memory that the device does not have; a ``host_prefix_cache`` uses them all.

    Raises:
        InsufficientMemoryError: what was asked for is more than what is free.
    """
    if not options.moves_blocks_to_host:
        return [0] * len(layout.windows)
    if (override := options.num_host_blocks_override) is not None:
        counts = _override(layout, override, max_model_len)
        _check_override(
            "num_host_blocks_override", override, layout.size(counts), free, "the weights and the largest step"
        )
        return counts
    free *= workers
    given = options.swap_space
    space = min(_DEFAULT_SWAP_SPACE, free // 10) if given is None else int(given * GIB)
    if space > free:
        raise InsufficientMemoryError(
            f"swap_space={options.swap_space:g} GiB is more than the {free / GIB:.3f} GiB that are free beside the "
            "weights and the largest step's activations; lower it (0: preempted requests are recomputed)"
        )
    counts = layout.split(space // workers, layout.longest(space // workers, max_model_len))
    if device_blocks is None or options.swap_space is not None or options.host_prefix_cache:
        return counts
    return [*map(min, counts, device_blocks)]


def _check_override(option: str, num_blocks: int, needed: int, free: int, beside: str) -> None:
    """Refuses a number of blocks that was asked for and takes more bytes than are free."""
    free = max(0, free)
    if needed > free:
        raise InsufficientMemoryError(
            f"{option}={num_blocks} takes {needed / GIB:.3f} GiB, but only {free / GIB:.3f} GiB are free beside "
            f"{beside}; at most {num_blocks * free // needed} fit"
        )


def _override(layout: KVLayout, num_blocks: int, max_model_len: int) -> list[int]:
    """The memory of so many blocks of each KV group, divided among the groups."""
    if len(layout.windows) == 1:
        return [num_blocks]
    num_bytes = num_blocks * sum(layout.block_bytes)
    return layout.split(num_bytes, layout.longest(num_bytes, max_model_len), limited=False)


@dataclass(frozen=True)
class CacheSize:
    """The KV cache that a worker has memory for."""

    #: Tokens of the longest sequence that it holds.
    max_model_len: int
    #: Of each KV group.
    num_blocks: list[int]


def cache_size(
    layout: KVLayout, options: EngineConfig, free: int, max_model_len: int, position_bytes: int = 0
) -> CacheSize:
    """The KV cache on a CPU, of ``free`` bytes of its memory, for sequences of up to ``max_model_len`` tokens.

    ``num_gpu_blocks_override`` blocks if given, and if they fit: with several groups, the memory of so many blocks of
    each. Else those of ``kv_cache_memory_bytes``, or of the share ``gpu_memory_utilization`` of what is free, less
    ``position_bytes`` for each position of the longest sequence; and never more than ``max_num_seqs`` sequences of full
    length could use.

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
        "the weights, the largest step and the swap space",
    )
    return _size_within(layout, options, budget, max_model_len, position_bytes)


def gpu_cache_size(
    layout: KVLayout, options: EngineConfig, total: int, peak: int, max_model_len: int, position_bytes: int = 0
) -> CacheSize:
    """The KV cache on a GPU with ``total`` bytes of memory.

    As ``cache_size``, but ``gpu_memory_utilization`` is a share of all memory, and what it leaves beside ``peak``, the
    bytes in use at the peak of the largest step, is for the blocks.

    Raises:
        InsufficientMemoryError: as ``cache_size``.
    """
    share = options.gpu_memory_utilization or _GPU_SHARE
    budget = _Budget(
        int(share * total) - peak,
        total - peak,
        f"gpu_memory_utilization={share} of the GPU's {total / GIB:.3f} GiB, less {peak / GIB:.3f} GiB for weights and "
        "the largest step, leaves",
        "the weights and the largest step",
    )
    return _size_within(layout, options, budget, max_model_len, position_bytes)


@dataclass(frozen=True)
class _Budget:
    """Bytes that are meant for the KV cache, and those that could be had."""

    meant: int
    free: int
    #: Say in an error where ``meant`` comes from, and what ``free`` is beside.
    source: str
    beside: str


def _size_within(
    layout: KVLayout, options: EngineConfig, given: _Budget, max_model_len: int, position_bytes: int
) -> CacheSize:
    if options.max_model_len is None and None not in layout.windows:  # windows alone set no limit
        max_model_len = min(max_model_len, _LONGEST_CONTEXT)
    if (override := options.num_gpu_blocks_override) is not None:
        longest = layout.longest(override * sum(layout.block_bytes), max_model_len)
        counts = _override(layout, override, max_model_len)
        _check_override("num_gpu_blocks_override", override, layout.size(counts), given.free, given.beside)
        return CacheSize(longest, counts)
    asked, budget, source = options.kv_cache_memory_bytes, given.meant, given.source
    if asked is not None:
        if asked > given.free:
            raise InsufficientMemoryError(
                f"kv_cache_memory_bytes={asked} ({asked / GIB:.3f} GiB) is more than the "
                f"{max(0, given.free) / GIB:.3f} GiB that are free beside {given.beside}; lower it"
            )
        budget, source = asked, f"kv_cache_memory_bytes={asked} is"
    else:
        budget -= position_bytes * _positions(layout, budget, max_model_len, position_bytes)
    given_length = options.max_model_len is not None
    least = layout.size(layout.held(max_model_len)) if given_length else sum(layout.block_bytes)
    if budget < least:
        what = f"one sequence of {max_model_len} tokens" if given_length else "one block"
        raise InsufficientMemoryError(
            f"the KV cache of {what} needs {least / GIB:.3f} GiB, but {source} "
            f"{max(0, budget) / GIB:.3f} GiB; lower max_model_len, max_num_batched_tokens, max_num_seqs or swap_space, "
            "or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    longest = layout.longest(budget, max_model_len)
    return CacheSize(longest, layout.split(budget, longest))


def _positions(layout: KVLayout, budget: int, max_model_len: int, position_bytes: int) -> int:
    """Positions of the longest sequence that the budget holds, its row in the tables of positions included."""
    kept = sum(size for size, window in zip(layout.block_bytes, layout.windows, strict=True) if window is None)
    if not kept:  # what windows hold is no larger for a longer sequence: half of the budget at most for the tables
        budget //= 2
    return max(0, min(max_model_len, budget // (kept // layout.block_size + position_bytes or 1)))


def largest_step(size: BatchSize, kernels: Kernels, num_slots: int = 0) -> ForwardBatch:
    """A step with as many tokens and as many sequences as there may be, which all sample.

    The last sequences have prompts as long as they may be until the tokens are used up, the others decode. Everything
    lies in block 0 and overwrites itself there, so a cache of one block serves; ``max_seq_len`` is that of the longest
    context, which decides what attention sets aside for its partial results. With ``num_slots`` of adapters every
    sequence has one of them, which may be empty: what their products need is set aside all the same.
    """
    lens = [1] * size.sequences
    left = size.tokens - len(lens)
    for i in reversed(range(len(lens))):
        lens[i] += min(left, size.max_seq_len - 1)
        left -= lens[i] - 1
    tables = np.zeros(size.shape("GSB"), np.int32)
    adapters = [i % num_slots for i in range(len(lens))] if num_slots else None
    batch = make_batch(lens, lens, tables, size.block_size, kernels, adapters=adapters)
    return replace(batch, max_seq_len=size.max_seq_len)
