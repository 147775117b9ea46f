"""A worker's memory: weights, the largest step, and the KV cache blocks that fit beside them.

The memory of the largest step is estimated on a CPU and measured on a GPU, by running it.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.config.engine_config import EngineConfig
from octavo.config.kv_spec import KVLayout
from octavo.core.errors import InsufficientMemoryError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, make_batch
from octavo.kernels.interface import Kernels, LayerCache
from octavo.layers.layer import LayerContext
from octavo.models.network import build_rank_without_weights, weight_bytes
from octavo.sampling.sampler import TokenTable

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel


# Memory limits of the control groups (cgroups) that this process is in: version 2, version 1, or both.


@dataclass(frozen=True)
class MemoryLimit:
    """A limit, and what counts towards it, in bytes."""

    #: The folder of a control group; or another name, for limits of other kinds.
    source: str
    limit: int
    #: Of a control group: without the page cache that the kernel would drop first.
    used: int

    @property
    def available(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used)


def group_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of this process's groups and of all their parents that can be seen, innermost first.

    None where there are no control groups. ``root`` is where ``proc`` and the mounted hierarchies are.
    """
    return [limit for folder in _folders(root) if (limit := _read_limit(folder)) is not None]


#: The files of each version: the limits, the usage, and the field of memory.stat that counts inactive page cache.
#: Above memory.high a group's processes are slowed down until it holds less, so it counts as a limit.
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
#: Version 1 says "no limit" by the largest multiple of a page below 2**63.
_UNLIMITED = 1 << 62


def _read_limit(folder: Path) -> MemoryLimit | None:
    for limits, usage, cache in (_V2, _V1):
        found = [size for name in limits if (size := _read_int(folder / name)) is not None and size < _UNLIMITED]
        used = _read_int(folder / usage)
        if found and used is not None:
            return MemoryLimit(str(folder), min(found), max(0, used - _read_stat(folder / "memory.stat", cache)))
    return None


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the process's groups in the hierarchies that limit memory, with all their parents."""
    groups = _own_groups(root / "proc/self/cgroup")
    for version, mounted, target in _mounts(root / "proc/self/mountinfo"):
        group = groups.get(version)
        if group is None:
            continue
        top = root / target.lstrip("/")
        # A container sees its own group as the root of the mount, under the name that it has on the host or as "/".
        below = Path(group).relative_to(mounted) if Path(group).is_relative_to(mounted) else Path()
        if ".." in below.parts:  # the process is outside the part of the hierarchy that is mounted
            below = Path()
        yield from (top / part for part in (below, *below.parents))


def _own_groups(file: Path) -> dict[int, str]:
    """By version, the path of the process's group in the hierarchy that may limit memory."""
    groups = {}
    for line in _lines(file):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    return groups


def _mounts(file: Path) -> Iterator[tuple[int, str, str]]:
    """(version, group that is mounted, mount point) of the hierarchies that may limit memory; see proc(5)."""
    for line in _lines(file):
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, _unescaped(fields[3]), _unescaped(fields[4])
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(path: str) -> str:
    r"""Spaces and the like are written as octal numbers: \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


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


def _read_stat(file: Path, name: str) -> int:
    values = (line.split() for line in _lines(file))
    return next((int(value[1]) for value in values if len(value) == 2 and value[0] == name), 0)


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


# How large a KV cache a worker has memory for, beside its weights and the largest step.


class CacheSizing:
    """Answers for one worker; the engine takes the least that any of its workers has memory for."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def kv_groups(self) -> list[tuple[int, int | None]]:
        """For each group of layers with block tables of its own: bytes of a block in all its layers, and its window."""
        return self._loaded.layers.group_bytes()

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, that the memory allows now.

        See ``Device.cache_size``; ``max_num_batched_tokens`` are those of all steps in flight.
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
        """Blocks of each KV group for preempted requests that the memory allows now; see ``Device.num_host_blocks``."""
        if not self._loaded.layers.groups:
            return []
        return self._loaded.device.num_host_blocks(self._layout(max_num_batched_tokens), max_model_len)

    def largest_step(self, max_model_len: int) -> LargestStep:
        """The largest step of sequences that long; none is longer than what all of the memory could hold."""
        layout = self._layout(self._loaded.options.token_budget)
        longest = max(1, layout.longest(self._loaded.device.free_memory(), max_model_len))
        return LargestStep(self._loaded, self._loaded.largest_batch(longest))

    def _layout(self, max_num_batched_tokens: int) -> KVLayout:
        images = self._loaded.config.image_facts
        least_chunk = 1 if images is None else max(1, images.whole)
        return KVLayout.of(self.kv_groups(), self._loaded.options, max_num_batched_tokens, least_chunk)


class LargestStep:
    """The largest step that a worker may be asked for, over a cache of one block, which overwrites itself there."""

    def __init__(self, loaded: LoadedModel, size: BatchSize) -> None:
        self._loaded, self._size = loaded, size

    def run(self) -> None:
        """As many tokens and sequences as allowed, which all sample at random and return logprobs."""
        with self._loaded.mode():
            self._run()

    def _run(self) -> None:
        loaded = self._loaded
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
        """Bytes of the device that captured steps will take beside eager ones; ``in_use`` tells those in use."""
        loaded, kernels = self._loaded, self._loaded.kernels
        with loaded.mode():
            caches, draft_caches = self._caches()
            size = kernels.graph_bytes(lambda batch: loaded.forward(batch, caches), self._size, in_use)
            if (drafter := loaded.drafter) is not None:
                size += kernels.graph_bytes(lambda batch: drafter.forward(batch, draft_caches), self._size, in_use)
            return size

    def _caches(self) -> tuple[list[LayerCache], list[LayerCache]]:
        layers = self._loaded.layers
        return layers.split(layers.make([1] * len(layers.groups)))
