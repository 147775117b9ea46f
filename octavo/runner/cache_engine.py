"""The KV cache of one worker, on the device and on the host, and the moves of blocks within and between the two."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from octavo.core.plan import StepPlan
from octavo.kernels.interface import Kernels, LayerCache

#: Makes the caches of all layers with so many blocks of each KV group.
MakeCache = Callable[[Sequence[int]], list[LayerCache]]
#: (source, target).
Pairs = list[tuple[int, int]]

#: Tells, once the step is done, the seconds that its swapping took.
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
        block_bytes: int,
        num_blocks: Sequence[int],
        num_host_blocks: Sequence[int],
    ) -> None:
        """Allocates both.

        Args:
            kernels: what moves blocks.
            make: allocates the caches of all layers on the device.
            make_host: as ``make``, in host memory.
            block_bytes: bytes of a block, in all layers together.
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
        """Does the plan's moves: out, in, copies, each in one call for all layers. None if nothing is swapped."""
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

    def _swap(self, plan: StepPlan) -> SwapSeconds:
        start = time.perf_counter()
        self._queue_swaps(plan)
        seconds = time.perf_counter() - start
        return lambda: seconds

    def _queue_swaps(self, plan: StepPlan) -> None:
        for group, pairs in self._by_group(plan.blocks_to_swap_out, self._first, self._first_on_host):
            self._kernels.swap_blocks(self._of_group(self.device, group), self._of_group(self._host, group), pairs)
        for group, pairs in self._by_group(plan.blocks_to_swap_in, self._first_on_host, self._first):
            self._kernels.swap_blocks(self._of_group(self._host, group), self._of_group(self.device, group), pairs)

    def finish_swaps(self) -> None:
        """Returns when every swap that was queued is done."""

    def measure_swap(self) -> float:
        """Seconds to move one block one way, the median of a few; 0.0 without host blocks.

        Blocks of the worker's own are left alone: what is in them stays, and host memory is not taken before it is
        needed. Blocks made for the measurement are moved instead, and dropped.
        """
        if not self._num_host_blocks:
            return 0.0
        count = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // self._block_bytes))
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


class StreamedCacheEngine(CacheEngine):
    """Swaps on a GPU, on a stream of its own, beside what the compute stream does where that is safe.

    All swaps are done one after the other, so a host block is never read before the copy to it is done, nor written
    while it is read. They begin when the steps queued before them are done. The compute stream waits for them where
    their plan swaps in (its sequences go on at once), and where a plan hands out a device block that is still being
    copied to the host; so preempting a sequence does not delay a step that does not need its blocks yet. Every block
    that a step writes to for the first time is in its plan: a target of a copy, or new in a block table.
    """

    def __init__(
        self,
        kernels: Kernels,
        make: MakeCache,
        make_host: MakeCache,
        block_bytes: int,
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

    def move(self, plan: StepPlan) -> SwapSeconds | None:
        """Queues the plan's moves; later work on the current stream waits for those that it depends on."""
        if self._swapping_out:
            if self._swapped.query():
                self._swapping_out.clear()
            elif not plan.blocks_to_swap_in and self._reuses(plan):
                self._wait_for_swaps()
        return super().move(plan)

    def _swap(self, plan: StepPlan) -> SwapSeconds:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record()
            self._queue_swaps(plan)
            end.record()
        self._swapped = end
        self._swapping_out.update(block for block, _ in plan.blocks_to_swap_out)
        if plan.blocks_to_swap_in or self._reuses(plan):
            self._wait_for_swaps()
        # A swap that outlasts its step did not delay it.
        return lambda: begin.elapsed_time(end) / 1e3 if end.query() else 0.0

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
