"""Views of an engine for those who watch it: read off the scheduler and the blocks between steps, when asked for."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from octavo.core.engine_view import (
    MAX_ADAPTER_SLOTS,
    MAX_CHANGES,
    MAX_GROUPS,
    NOBODY,
    NUM_STEPS,
    AdapterSlot,
    Change,
    EngineView,
    GroupRow,
    StepRecord,
)
from octavo.core.plan import StepPlan
from octavo.core.request import SequenceStatus
from octavo.core.stats import SchedulerState, StepStats
from octavo.memory.block_map import block_maps
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.scheduler import Scheduler

#: Seconds after a view in which changes are still collected for the next one.
_PATIENCE = 5.0
#: Device blocks that a change names at most.
_MAX_BLOCKS = 64


class ViewRecorder:
    """Owns the records of the last steps, and what has changed since the last view.

    ``note`` keeps the statistics of each step, which are made anyway: that is all that is done while nobody watches. A
    view is made by ``view``, and from then on ``planned`` is to be called with each plan; ``watches`` says until when.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: of the scheduler, in seconds."""
        self._scheduler, self._clock = scheduler, clock
        #: Ends of the last steps, and their statistics; how many there were, and at the last view.
        self._steps: deque[tuple[float, StepStats]] = deque(maxlen=NUM_STEPS)
        self._noted = self._sent = 0
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._num_changes = self._preempted = 0
        #: Blocks that each KV group had evicted, as far as that was seen.
        self._evicted = self._num_evicted()
        #: By group: how often it was preempted, as far as that was seen.
        self._seen: dict[int, int] = {}
        self._asked = -_PATIENCE

    def note(self, stats: StepStats) -> None:
        """A step has ended."""
        self._steps.append((self._clock(), stats))
        self._noted += 1

    @property
    def watches(self) -> bool:
        """Whether a view was asked for a moment ago, so that another will be."""
        return self._clock() - self._asked < _PATIENCE

    # --- while somebody watches -------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """See ``StepObserver``: notes what the plan does to blocks and groups."""
        step = plan.step
        if pairs := plan.blocks_to_swap_out[:_MAX_BLOCKS]:
            self._add(Change("swap_out", step, NOBODY, [device for device, _ in pairs]))
        if pairs := plan.blocks_to_swap_in[:_MAX_BLOCKS]:
            self._add(Change("swap_in", step, NOBODY, [device for _, device in pairs]))
        for source, target in plan.blocks_to_copy:
            self._add(Change("copy", step, NOBODY, [source, target]))
        for fork in plan.forks:
            sequence = self._scheduler.queues.sequences.get(fork.child)
            group_id = NOBODY if sequence is None else sequence.group.group_id
            self._add(Change("fork", step, group_id, self._scheduler.blocks.table(fork.child)[:_MAX_BLOCKS]))
        self._find_evicted(step)
        self._find_preempted(step)

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        self._num_changes += 1

    def _num_evicted(self) -> list[int]:
        return [group.cache.num_evicted for group in self._scheduler.blocks.groups]

    def _find_evicted(self, step: int) -> None:
        evicted = self._num_evicted()
        if evicted == self._evicted:
            return
        for group, now, before in zip(self._scheduler.blocks.groups, evicted, self._evicted, strict=True):
            if now > before:
                self._add(Change("evict", step, NOBODY, list(group.cache.last_evicted)[before - now :]))
        self._evicted = evicted

    def _find_preempted(self, step: int) -> None:
        counts = self._scheduler.counts()
        total = counts.preemptions_by_recompute + counts.preemptions_by_swap
        if total == self._preempted:
            return
        self._preempted = total
        for group in self._groups():
            totals = group.totals
            preempted = totals.num_recomputes + totals.num_swaps
            if preempted > self._seen.get(group.group_id, 0) and group.status is not SequenceStatus.RUNNING:
                number, cause = group.group_id, group.preempted_for
                if group.status is SequenceStatus.SWAPPED:
                    self._add(Change("swap", step, number, [], totals.num_swapped_blocks, cause))
                else:
                    self._add(Change("recompute", step, number, [], totals.num_recomputed_tokens, cause))
            self._seen[group.group_id] = preempted

    # --- the view ---------------------------------------------------------------------------------------------------

    def view(self, fresh: bool = False) -> EngineView:
        """The engine now, with what has changed since the last view; ``fresh``: with all steps that are known."""
        start, now = time.perf_counter(), self._clock()
        if not self.watches:  # what was before is not known
            self._changes.clear()
            self._num_changes, self._evicted = 0, self._num_evicted()
            self._seen = {
                group.group_id: group.totals.num_recomputes + group.totals.num_swaps for group in self._groups()
            }
        self._asked = now
        counts, options = self._scheduler.counts(), self._scheduler.options
        self._preempted = counts.preemptions_by_recompute + counts.preemptions_by_swap
        new = len(self._steps) if fresh else min(self._noted - self._sent, len(self._steps))
        self._sent = self._noted
        state = SchedulerState(*(getattr(counts, name) for name in SchedulerState.__struct_fields__))
        groups = list(self._groups())
        holders = [(holder, group.group_id) for group in groups for holder in group.holder_ids]
        view = EngineView(
            replica=0,
            at=now,
            token_budget=options.token_budget,
            max_num_seqs=options.max_num_seqs,
            state=state,
            blocks=block_maps(self._scheduler.blocks, holders),
            groups=list(self._rows(groups, now)),
            steps=[_record(at, stats) for at, stats in itertools.islice(self._steps, len(self._steps) - new, None)],
            changes=list(self._changes),
            num_changes=self._num_changes,
            evicted_blocks=sum(self._num_evicted()),
            adapters=list(self._adapters()),
        )
        self._seen = {group.group_id: self._seen.get(group.group_id, 0) for group in groups}
        self._changes.clear()
        self._num_changes = 0
        view.cost = time.perf_counter() - start
        return view

    def _groups(self) -> Iterator[SequenceGroup]:
        return iter(self._scheduler.queues.groups.values())

    def _adapters(self) -> Iterator[AdapterSlot]:
        for thing in self._scheduler.preparations.adapters_in_slots()[:MAX_ADAPTER_SLOTS]:
            assert thing.slot is not None
            yield AdapterSlot(thing.slot, thing.key, thing.num_running)

    def _rows(self, groups: list[SequenceGroup], now: float) -> Iterator[GroupRow]:
        for status in (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED):
            ones = (group for group in groups if group.status is status)
            for group in itertools.islice(ones, MAX_GROUPS):
                totals, prompt = group.totals, len(group.request.prompt_token_ids)
                yield GroupRow(
                    group.group_id,
                    status.value,
                    group.num_seqs,
                    prompt,
                    group.num_tokens - prompt,
                    group.num_computed,
                    totals.num_cached_tokens,
                    max(0.0, now - group.request.arrival_time),
                    totals.num_recomputes,
                    totals.num_recomputed_tokens,
                    totals.num_swaps,
                    totals.num_swapped_blocks,
                    group.preempted_for,
                )


def _record(at: float, stats: StepStats) -> StepRecord:
    return StepRecord(
        stats.steps,
        at,
        stats.seconds,
        stats.worker_seconds,
        stats.kernel_seconds,
        stats.between_seconds,
        stats.prefill_tokens,
        stats.decode_tokens,
        stats.num_running,
        stats.num_waiting,
        stats.num_swapped,
        stats.blocks_used,
        stats.blocks_cached,
        stats.blocks_free,
        stats.preemptions_by_recompute + stats.preemptions_by_swap,
        stats.prefix_queried_tokens,
        stats.prefix_hit_tokens,
    )
