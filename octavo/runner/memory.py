"""A worker's memory: the KV cache blocks that fit beside the weights and the largest step.

``CacheSizing`` is where to begin. The memory of the largest step is estimated on a CPU; on a GPU the step is run to
measure it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import GroupShape, KVLayout
from octavo.core.errors import InsufficientMemoryError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, make_batch
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.sampling import ROWS_AT_ONCE, SCRATCH_ROWS
from octavo.layers.layer import LayerContext
from octavo.models.network import build_rank_without_weights, weight_bytes
from octavo.sampling.sampler import TokenTable

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel


GIB = 1 << 30
_DEFAULT_SWAP_SPACE = 4 * GIB
#: Default of max_model_len if all layers have windows, so that a longer sequence takes no more KV cache.
_LONGEST_CONTEXT = 1 << 20
#: Defaults of ``gpu_memory_utilization``: a share of a CPU's free memory, and of all memory of a GPU.
_CPU_SHARE, _GPU_SHARE = 0.5, 0.9


class CacheSizing:
    """Sizes the KV cache of one worker; the engine takes the minimum over its workers."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def kv_groups(self) -> list[GroupShape]:
        return self._loaded.layers.shapes()

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, for which there is memory now.

        ``max_num_batched_tokens``: of all steps in flight together.
        """
        loaded = self._loaded
        if not loaded.layers.groups:
            return max_model_len, []
        with loaded.timed("memory profile"):
            size = loaded.device.cache_size(
                self._layout(max_num_batched_tokens),
                loaded.network.position_bytes() + (loaded.drafter.position_bytes() if loaded.drafter else 0),
                max_model_len,
                lambda: self.largest_step(max_model_len),
            )
        return size.max_model_len, size.num_blocks

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        if not self._loaded.layers.groups:
            return []
        return self._loaded.device.num_host_blocks(self._layout(max_num_batched_tokens), max_model_len)

    def largest_step(self, max_model_len: int) -> LargestStep:
        """The largest step, of sequences no longer than all of the memory could hold."""
        layout = self._layout(self._loaded.options.token_budget)
        longest = max(1, layout.longest(self._loaded.device.free_memory(), max_model_len))
        return LargestStep(self._loaded, self._loaded.largest_batch(longest))

    def _layout(self, max_num_batched_tokens: int) -> KVLayout:
        images = self._loaded.config.image_facts
        least_chunk = 1 if images is None else max(1, images.whole)
        return KVLayout.of(self.kv_groups(), self._loaded.options, max_num_batched_tokens, least_chunk)


class LargestStep:
    """The largest step of a worker, over a cache of one block (vLLM's ``profile_run``)."""

    def __init__(self, loaded: LoadedModel, size: BatchSize) -> None:
        self._loaded, self._size = loaded, size

    def run(self) -> None:
        loaded = self._loaded
        with loaded.mode():
            batch = largest_step(self._size, loaded.kernels, loaded.context.max_loras)
            caches, draft_caches = self._caches()
            if loaded.drafter is not None:
                loaded.drafter.forward(batch, draft_caches)
            output = loaded.forward(batch, caches)
            if output.logits is None:
                return
            rows = np.arange(len(batch.seq_lens))
            sampler = loaded.make_sampler(TokenTable(len(rows), 1))
            for row in rows.tolist():
                sampler.add(row, NewSequence(row, [0], 1, 0, Generate(SamplingParams(top_p=0.9, logprobs=1), row)))
            sampler.start(output.logits, rows).wait()

    def graph_bytes(self, in_use: Callable[[], int]) -> int:
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` counts the bytes in use."""
        loaded, kernels = self._loaded, self._loaded.kernels
        with loaded.mode():
            caches, draft_caches = self._caches()
            size = 0
            if loaded.network.is_recordable:
                size = kernels.graph_bytes(lambda batch: loaded.forward(batch, caches), self._size, in_use)
            if (drafter := loaded.drafter) is not None:
                size += kernels.graph_bytes(lambda batch: drafter.forward(batch, draft_caches), self._size, in_use)
            return size

    def _caches(self) -> tuple[list[LayerCache], list[LayerCache]]:
        layers = self._loaded.layers
        return layers.split(layers.make([1] * len(layers.groups)))


@dataclass(frozen=True)
class WorkerShare:
    """A worker's share of its machine: the workers of a machine divide host memory and threads evenly."""

    local_rank: int = 0
    local_size: int = 1

    def free_memory(self) -> int:
        return available_memory() // self.local_size

    def num_threads(self, total: int | None) -> int | None:
        """This worker's share of ``total`` threads (None: one per processor); None: all processors."""
        if self.local_size == 1:
            return total
        share, rest = divmod(total or len(os.sched_getaffinity(0)), self.local_size)
        return max(1, share + (self.local_rank < rest))


def activation_bytes(config: ModelConfig, options: EngineConfig, kernels: str) -> int:
    """A bound on the bytes of the largest step beside weights and cache: activations of one layer, and logits.

    Only the residual stream is kept from one layer to the next, so one layer's tensors bound them all. An adapter's
    results are as wide as the products and logits to which they are added. ``kernels``: the backend.
    """
    row = 4 * config.hidden_size + config.attention_width + config.feed_forward_width
    if options.enable_lora:
        row += config.hidden_size + config.attention_width + config.feed_forward_width
    tokens = max(options.token_budget, config.max_position) if config.is_encoder else options.token_budget
    # An encoder's layers are about as wide as the decoder's; buffers of both are kept.
    longest = config.longest_input(config.max_position)
    inputs = 0 if longest is None else max(options.encoder_budget, longest)
    logits = _rows_of_logits(options, kernels) * config.vocab_size if config.head == "lm" else 0
    return 4 * ((tokens + inputs) * row + logits)


def _rows_of_logits(options: EngineConfig, kernels: str) -> int:
    """Rows of a vocabulary's float32 numbers that a step needs: logits, and what sampling makes of them."""
    sampled = min(options.max_num_seqs * (1 + options.kept_draft_tokens), options.token_budget)
    of_adapters = sampled if options.enable_lora else 0
    if kernels != "cpu":
        return 3 * sampled + of_adapters
    # The compiled kernels sample in place.
    threads = options.num_threads or len(os.sched_getaffinity(0))
    return sampled + of_adapters + min(ROWS_AT_ONCE, options.token_budget) + SCRATCH_ROWS * min(threads, sampled)


def check_weights_fit(config: ModelConfig, context: LayerContext, free: int) -> None:
    """Refuses a model whose share of ``context`` does not fit into ``free`` bytes, before anything is read."""
    needed = weight_bytes(build_rank_without_weights(config, context), maps_tables=context.kernels.maps_tables)
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
    """Host blocks of each KV group for swapped blocks, in ``free`` bytes of host memory; zeros: the options never swap.

    ``num_host_blocks_override`` if given: with several groups, the memory of that number of blocks of each. Else the
    blocks that ``swap_space`` holds, by default 4 GiB or a tenth of the free memory if that is less; and never more
    than ``max_num_seqs`` sequences of ``max_model_len`` tokens could use. By default no more than ``device_blocks``
    either: preempted blocks were on the device (Kwon et al. 2023, section 4.5), and more would let swapping win by
    memory that the device does not have; a ``host_prefix_cache`` uses them all.

    ``layout`` and ``free`` are one worker's of the machine's ``workers``, which divide ``swap_space``;
    ``device_blocks``: of each group, if the device has memory of its own.
    """
    if not options.moves_blocks_to_host:
        return [0] * len(layout.groups)
    if (override := options.num_host_blocks_override) is not None:
        beside = "the weights and the largest step"
        return _override("num_host_blocks_override", override, layout, max_model_len, free, beside)
    free *= workers
    space = min(_DEFAULT_SWAP_SPACE, free // 10) if options.swap_space is None else int(options.swap_space * GIB)
    if space > free:
        raise InsufficientMemoryError(
            f"swap_space={options.swap_space:g} GiB is more than the {free / GIB:.3f} GiB that are free beside the "
            "weights and the largest step's activations; lower it (0: preempted requests are recomputed)"
        )
    counts = layout.split(space // workers, layout.longest(space // workers, max_model_len))
    if device_blocks is None or options.swap_space is not None or options.host_prefix_cache:
        return counts
    return [*map(min, counts, device_blocks)]


def _override(option: str, num_blocks: int, layout: KVLayout, max_model_len: int, free: int, beside: str) -> list[int]:
    """Divides the memory of ``num_blocks`` blocks of each KV group among the groups."""
    counts, num_bytes = [num_blocks], num_blocks * sum(layout.block_bytes)
    if len(layout.groups) > 1:
        counts = layout.split(num_bytes, layout.longest(num_bytes, max_model_len), limited=False)
    needed, free = layout.size(counts), max(0, free)
    if needed > free:
        raise InsufficientMemoryError(
            f"{option}={num_blocks} takes {needed / GIB:.3f} GiB, but only {free / GIB:.3f} GiB are free beside "
            f"{beside}; at most {num_blocks * free // needed} fit"
        )
    return counts


@dataclass(frozen=True)
class CacheSize:
    max_model_len: int
    #: Of each KV group.
    num_blocks: list[int]


def cache_size(
    layout: KVLayout,
    options: EngineConfig,
    free: int,
    max_model_len: int,
    position_bytes: int = 0,
    total: int | None = None,
) -> CacheSize:
    """The KV cache in ``free`` bytes, for sequences of up to ``max_model_len`` tokens.

    ``num_gpu_blocks_override`` blocks if given: with several groups, the memory of that number of blocks of each. Else
    the blocks that ``kv_cache_memory_bytes`` holds, or the share ``gpu_memory_utilization``: on a CPU of ``free``, on a
    GPU of its ``total`` bytes with those in use; less ``position_bytes`` for each position of the longest sequence; and
    never more than ``max_num_seqs`` sequences of full length could use.

    Raises:
        InsufficientMemoryError: not one sequence of the given ``max_model_len`` fits, or not one block; or an option
            asks for more than is free.
    """
    share = options.gpu_memory_utilization or (_CPU_SHARE if total is None else _GPU_SHARE)
    beside = "the weights, the largest step" + (" and the swap space" if total is None else "")
    whole = free if total is None else total
    budget = int(share * whole) - (whole - free)
    if options.max_model_len is None and all(
        group.window is not None for group in layout.groups
    ):  # windows alone set no limit
        max_model_len = min(max_model_len, _LONGEST_CONTEXT)
    if (override := options.num_gpu_blocks_override) is not None:
        longest = layout.longest(override * sum(layout.block_bytes), max_model_len)
        return CacheSize(longest, _override("num_gpu_blocks_override", override, layout, max_model_len, free, beside))
    if (requested := options.kv_cache_memory_bytes) is not None:
        if requested > free:
            raise InsufficientMemoryError(
                f"kv_cache_memory_bytes={requested} ({requested / GIB:.3f} GiB) is more than the "
                f"{max(0, free) / GIB:.3f} GiB that are free beside {beside}; lower it"
            )
        budget, source = requested, f"kv_cache_memory_bytes={requested} is"
    else:
        used = "" if total is None else f", less {(total - free) / GIB:.3f} GiB for {beside},"
        source = f"gpu_memory_utilization={share} of {max(0, whole) / GIB:.3f} GiB{used} leaves"
        budget -= position_bytes * _positions(layout, budget, max_model_len, position_bytes)
    holds, counts = "one block", [1] * len(layout.groups)
    if options.max_model_len is not None:
        holds, counts = f"one sequence of {max_model_len} tokens", layout.held(max_model_len)
    if budget < (least := layout.size(counts)):
        raise InsufficientMemoryError(
            f"the KV cache of {holds} needs {least / GIB:.3f} GiB{_states(layout, counts)}, but {source} "
            f"{max(0, budget) / GIB:.3f} GiB; lower max_model_len, max_num_batched_tokens, max_num_seqs or swap_space, "
            "or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    longest = layout.longest(budget, max_model_len)
    return CacheSize(longest, layout.split(budget, longest))


def _states(layout: KVLayout, counts: Sequence[int]) -> str:
    """The share of recurrent states in these blocks, in words; empty without states."""
    states = [(count, g.block_bytes) for count, g in zip(counts, layout.groups, strict=True) if g.state_tokens]
    if not states:
        return ""
    size, number = sum(count * size for count, size in states), max(count for count, _ in states)
    return f", of which {number} recurrent state{'s take' if number > 1 else ' takes'} {size / GIB:.3f} GiB"


def _positions(layout: KVLayout, budget: int, max_model_len: int, position_bytes: int) -> int:
    """Tokens of the longest sequence that the budget holds, its rows in the tables of positions included."""
    kept = sum(group.block_bytes for group in layout.groups if group.window is None)
    if not kept:  # with windows alone, the KV cache of a sequence is bounded: half of the budget at most for the tables
        budget //= 2
    return max(0, min(max_model_len, budget // (kept // layout.block_size + position_bytes or 1)))


def largest_step(size: BatchSize, kernels: Kernels, num_slots: int = 0) -> ForwardBatch:
    """A step with the maximum of tokens and sequences, which all sample.

    The last sequences have prompts of full length until the tokens are used up, the others decode. All tokens lie in
    block 0 and overwrite each other, so a cache of one block is enough. ``max_seq_len`` is that of the longest context,
    for which attention allocates its partial results. With ``num_slots`` of adapters every sequence has a slot, maybe
    an empty one: the memory of its products is the same.
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


# --- limits of the machine and of control groups (cgroups, version 1 and 2) -------------------------------------------


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of the machine's free memory and of the process's limits."""
    import psutil

    return min([int(psutil.virtual_memory().available), *(limit.available for limit in memory_limits(root))])


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    import psutil

    limits = group_limits(root)
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        limits.append(MemoryLimit("ulimit -v", addresses, int(psutil.Process().memory_info().vms)))
    return limits


@dataclass(frozen=True)
class MemoryLimit:
    #: The folder of a control group, or the name of another limit.
    source: str
    limit: int
    #: Without the page cache that the kernel would drop first.
    used: int

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used)


#: The files of a version: the limits, the usage, and the field of memory.stat that counts inactive page cache.
_Files = tuple[tuple[str, ...], str, str]
#: Above memory.high a group's processes are slowed down until it holds less, so it counts as a limit.
_V2: _Files = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1: _Files = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
#: Version 1 writes the largest multiple of a page below 2**63 for "no limit".
_UNLIMITED = 1 << 62


def group_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of this process's control groups and of all visible parents, innermost first; empty without groups.

    ``root``: the folder of ``proc`` and ``sys``. A container sees its own group as the root of the hierarchy, under the
    name that it has on the host or as "/".
    """
    memory_limits = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, (limits, usage, cache) = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, (limits, usage, cache) = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (top / part for part in (group, *group.parents)):
            sizes = [size for name in limits if (size := _read_int(folder / name)) is not None and size < _UNLIMITED]
            used = _read_int(folder / usage)
            if sizes and used is not None:
                stat = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
                memory_limits.append(MemoryLimit(str(folder), min(sizes), max(0, used - int(stat.get(cache, 0)))))
    return memory_limits


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
