"""Swaps of blocks on a GPU, beside its computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan
from octavo.kernels.interface import Kernels
from octavo.runner.cache_engine import CacheEngine, MakeCache, SwapSeconds


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
        cuda: Any,
    ) -> None:
        """As ``CacheEngine``; ``cuda``: ``torch.cuda``; tests give another with ``Stream`` and ``Event``."""
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
