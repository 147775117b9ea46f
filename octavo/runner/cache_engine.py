"""The KV cache of one worker, on the device and on the host, and the moves of blocks within and between the two."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import StepPlan
from octavo.kernels.cache import LayerCache
from octavo.kernels.interface import Kernels

#: Makes the caches of all layers with so many blocks of each KV group.
MakeCache = Callable[[Sequence[int]], list[LayerCache]]
#: (source, target).
Pairs = list[tuple[int, int]]

#: Tells, once the step is done, the seconds that it waited for its swaps.
SwapSeconds = Callable[[], float]

#: What ``measure_swap`` moves at once: about these bytes, so that it does not measure the processor's own caches, and
#: no more than these blocks.
_SAMPLE_BYTES = 4 << 20
_SAMPLE_BLOCKS = 64
_SAMPLE_ROUNDS = 3


class CacheEngine:
    """Owns the device blocks and the host blocks of all layers.

    A block number means the same block in every layer of a KV group; plans number the blocks of all groups, one group
    after the other, on the device and on the host. Host blocks have the layout of device blocks, so a swap is a copy of
    bytes.
    """

    def __init__(
        self,
        kernels: Kernels,
        make: MakeCache,
        make_host: MakeCache,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
    ) -> None:
        """Allocates both.

        Args:
            kernels: what moves blocks.
            make: allocates the caches of all layers on the device.
            make_host: as ``make``, in host memory.
            block_bytes: bytes of a block of each group, in all of its layers.
            num_blocks: blocks of each group on the device.
            num_host_blocks: blocks of each group on the host; 0: nothing can be swapped.
        """
        self._kernels = kernels
        self._make = make
        self._make_host = make_host
        self._block_bytes = block_bytes
        self._blocks, self._host_blocks = num_blocks, num_host_blocks
        self._first = _first_blocks(num_blocks)
        self._first_on_host = _first_blocks(num_host_blocks)
        self._num_host_blocks = sum(num_host_blocks)
        self._swaps: list[tuple[int, float]] = []
        self.allocate()

    def allocate(self) -> None:
        """Takes the memory of all blocks, which are zero."""
        #: KV cache of each layer.
        self.device = self._make(self._blocks)
        # Memory that nothing was swapped to is never touched, so it is not taken from the system.
        self._host = self._make_host(self._host_blocks)

    def release(self) -> None:
        """Gives the memory of all blocks back, with what is in them, until ``allocate``."""
        self.finish_swaps()
        self.device, self._host = [], []

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Does the plan's moves: out, in, copies, each in one call for all layers. None if it waits for no swap."""
        seconds: SwapSeconds | None = None
        if plan.blocks_to_swap_out or plan.blocks_to_swap_in:
            seconds = self._swap(plan)
        if plan.blocks_to_copy:
            for group, pairs in self._by_group(plan.blocks_to_copy, self._first, self._first):
                self._kernels.copy_blocks(self._of_group(self.device, group), pairs)
        return seconds

    def _by_group(self, pairs: Pairs, first_source: list[int], first_target: list[int]) -> Iterable[tuple[int, Pairs]]:
        """The moves of each group, in the group's own numbers."""
        if len(first_source) == 1:
            return [(0, pairs)]
        groups: dict[int, Pairs] = {}
        for source, target in pairs:
            group = bisect.bisect_right(first_source, source) - 1
            groups.setdefault(group, []).append((source - first_source[group], target - first_target[group]))
        return groups.items()

    def _of_group(self, caches: list[LayerCache], group: int) -> list[LayerCache]:
        return caches if len(self._first) == 1 else [cache for cache in caches if cache.group == group]

    def computes_over(self, tables: NDArray[np.int32]) -> None:
        """The step whose blocks were moved last is about to be computed over these block tables: [G, S, B]."""

    def take_swaps(self) -> list[tuple[int, float]]:
        """Bytes and seconds of each swap that has ended since the last call."""
        swaps, self._swaps = self._swaps, []
        return [swap for swap in swaps if swap[0]]  # a pipeline stage may have no layer of the groups that moved

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        start = time.perf_counter()
        num_bytes = self._queue_swaps(plan)
        seconds = time.perf_counter() - start
        self._swaps.append((num_bytes, seconds))
        return lambda: seconds

    def _queue_swaps(self, plan: StepPlan) -> int:
        """Moves out, then in: how many bytes."""
        num_bytes = 0
        for group, pairs in self._by_group(plan.blocks_to_swap_out, self._first, self._first_on_host):
            self._kernels.swap_blocks(self._of_group(self.device, group), self._of_group(self._host, group), pairs)
            num_bytes += len(pairs) * self._block_bytes[group]
        for group, pairs in self._by_group(plan.blocks_to_swap_in, self._first_on_host, self._first):
            self._kernels.swap_blocks(self._of_group(self._host, group), self._of_group(self.device, group), pairs)
            num_bytes += len(pairs) * self._block_bytes[group]
        return num_bytes

    def finish_swaps(self) -> None:
        """Returns when every swap that was queued is done."""

    def measure_swap(self) -> float:
        """Seconds to move one block one way, the median of a few; 0.0 without host blocks.

        Blocks of the worker's own are left alone: what is in them stays, and host memory is not taken before it is
        needed. Blocks made for the measurement are moved instead, and dropped.
        """
        if not self._num_host_blocks:
            return 0.0
        count = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // sum(self._block_bytes)))
        pairs = [(i, i) for i in range(count)]
        counts = [count] * len(self._first)
        device, host = self._make(counts), self._make_host(counts)
        self.finish_swaps()

        def seconds(sources: list[LayerCache], targets: list[LayerCache]) -> float:
            start = time.perf_counter()
            for group in range(len(self._first)):
                self._kernels.swap_blocks(self._of_group(sources, group), self._of_group(targets, group), pairs)
            self.finish_swaps()
            return (time.perf_counter() - start) / count

        taken = [seconds(*way) for _ in range(1 + _SAMPLE_ROUNDS) for way in ((device, host), (host, device))]
        # The first round touches the memory for the first time, which is slow and happens once.
        return statistics.median(taken[2:])


def _first_blocks(counts: Sequence[int]) -> list[int]:
    """The number of each group's first block."""
    return [0, *itertools.accumulate(counts)][:-1]


@dataclass(eq=False)
class _Step:
    """The blocks that a step computes over, by group, or copies; and an event behind its work on the compute stream."""

    copied: list[int]
    tables: NDArray[np.int32] | None = None
    end: Any = None


@dataclass(eq=False)
class _Swap:
    """A swap that is queued, and the events around it."""

    num_bytes: int
    begin: Any
    end: Any


class StreamedCacheEngine(CacheEngine):
    """Swaps on a GPU, on a stream of its own, beside what the compute stream does where that is safe.

    All swaps are done one after the other, so a host block is never read before the copy to it is done, nor written
    while it is read. The compute stream waits for them where their plan swaps in (its sequences go on at once), and
    where a plan hands out a device block that is still being copied to the host; so preempting a sequence does not
    delay a step that does not need its blocks yet. Every block that a step writes to for the first time is in its plan:
    a target of a copy, or new in a block table.

    Swaps begin when the steps queued before them are done, as these write what is to leave, or may use what is to be
    overwritten. Blocks that come in where no step in flight computes begin at once: they travel beside the step before
    the one that needs them. An event for each layer would hide less, as a step is over when its last layer has waited,
    and would cost more: a block of all layers is one contiguous copy, and a captured step waits nowhere within itself.
    """

    def __init__(
        self,
        kernels: Kernels,
        make: MakeCache,
        make_host: MakeCache,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
        cuda: Any = torch.cuda,
    ) -> None:
        """As ``CacheEngine``; ``cuda`` has ``Stream``, ``Event`` and their like: tests give another."""
        super().__init__(kernels, make, make_host, block_bytes, num_blocks, num_host_blocks)
        self._cuda = cuda
        self._stream = cuda.Stream()
        #: Device blocks that may still be read for the host, until the event ``_swapped``.
        self._swapping_out: set[int] = set()
        self._swapped: Any = None
        #: Steps whose work may not be done, and swaps whose seconds were not told yet; oldest first.
        self._steps: deque[_Step] = deque()
        self._queued: deque[_Swap] = deque()

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Queues the plan's moves; later work on the current stream waits for those that it depends on."""
        if self._num_host_blocks:
            self._end_steps()
        if self._swapping_out:
            if self._swapped.query():
                self._swapping_out.clear()
            elif not plan.blocks_to_swap_in and self._reuses(plan):
                self._wait_for_swaps()
        seconds = super().move(plan)
        if self._num_host_blocks:
            self._steps.append(_Step([block for pair in plan.blocks_to_copy for block in pair]))
        return seconds

    def computes_over(self, tables: NDArray[np.int32]) -> None:
        """Keeps the tables until the step is done."""
        if self._steps:
            self._steps[-1].tables = tables

    def _end_steps(self) -> None:
        """Marks the end of the last step's work, and forgets the steps that are done."""
        if self._steps and self._steps[-1].end is None:
            self._steps[-1].end = self._cuda.Event()
            self._steps[-1].end.record()
        while self._steps and self._steps[0].end.query():
            self._steps.popleft()

    def _swap(self, plan: StepPlan) -> SwapSeconds | None:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if plan.blocks_to_swap_out or self._in_use([block for _, block in plan.blocks_to_swap_in]):
            self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record()
            num_bytes = self._queue_swaps(plan)
            end.record()
        self._queued.append(_Swap(num_bytes, begin, end))
        self._swapped = end
        self._swapping_out.update(block for block, _ in plan.blocks_to_swap_out)
        if not (plan.blocks_to_swap_in or self._reuses(plan)):
            return None
        self._wait_for_swaps()
        return lambda: float(begin.elapsed_time(end)) / 1e3

    def _in_use(self, blocks: list[int]) -> bool:
        """Whether a step that may not be done computes over one of these blocks, or copies it."""
        used = np.zeros(sum(self._blocks), dtype=np.bool_)
        for step in self._steps:
            used[step.copied] = True
            if step.tables is not None:
                for first, table in zip(self._first, step.tables, strict=True):
                    used[first + table.reshape(-1)] = True
        return bool(used[blocks].any())

    def take_swaps(self) -> list[tuple[int, float]]:
        """As ``CacheEngine``: a swap may end in a later step than that of its plan."""
        while self._queued and self._queued[0].end.query():
            swap = self._queued.popleft()
            self._swaps.append((swap.num_bytes, swap.begin.elapsed_time(swap.end) / 1e3))
        return super().take_swaps()

    def _reuses(self, plan: StepPlan) -> bool:
        """Whether the plan writes to a block that may still be read for the host."""
        swapping_out = self._swapping_out
        return any(target in swapping_out for _, target in plan.blocks_to_copy) or any(
            not swapping_out.isdisjoint(change.blocks) for change in plan.table_changes
        )

    def _wait_for_swaps(self) -> None:
        """What the current stream does from here on comes after all swaps queued so far."""
        self._cuda.current_stream().wait_event(self._swapped)
        self._swapping_out.clear()

    def finish_swaps(self) -> None:
        """Returns when all that was queued on the device is done."""
        self._cuda.synchronize()
