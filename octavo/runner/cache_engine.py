"""The KV cache of one worker, on the device and on the host, and the moves of blocks within and between the two."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
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
