"""The queues of waiting, running and swapped groups, and the transitions between them."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import CrossContext, Sequence, SequenceGroup, resume
from octavo.scheduler.policies import FirstComeFirstServed, GuardedPolicy, Policy, load_policy
from octavo.scheduler.preparations import Preparations, PreparationState
from octavo.scheduler.step import SteadyDecodes
from octavo.speculation.speculator import Speculator

if TYPE_CHECKING:
    from octavo.scheduler.preparations import Prepared


# Queues of groups that do not run.

#: (key, arrival, stamp, group): the stamp tells the current entry of a group from its stale ones.
_Entry = tuple[Any, tuple[float, int], int, SequenceGroup]
#: Stale entries allowed before they are cleared out, beyond the number of groups present.
_SLACK = 64


class Ordered(ABC):
    """Groups of which the first goes first: the oldest if it is urgent, else the first in the policy's order."""

    def __init__(self, aging_limit: float | None) -> None:
        self._aging_limit = aging_limit

    def peek(self, now: float) -> SequenceGroup | None:
        """The first group, or None if there is none; ``now`` on the clock of the arrival times."""
        if self._aging_limit is not None:
            oldest = self.earliest()
            if oldest is not None and (oldest.urgent or now - oldest.request.arrival_time > self._aging_limit):
                oldest.urgent = True
                return oldest
        return self.first_by_key()

    @abstractmethod
    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, or None if there is none."""

    @abstractmethod
    def first_by_key(self) -> SequenceGroup | None:
        """The first in the policy's order, however long others wait; None if there is none."""


class GroupQueue(Ordered):
    """Groups that do not run, in the policy's order; the cost of its methods does not grow with its length.

    With an ``aging_limit``, a group that arrived longer ago becomes *urgent*: urgent groups go before all others, in
    order of arrival. So from then on no later arrival goes before it, whatever the policy.
    """

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        """``aging_limit`` in seconds; None: no group becomes urgent."""
        super().__init__(aging_limit)
        self._policy = policy
        self._by_key: list[_Entry] = []
        # Under first come, first served both orders are the same.
        self._by_arrival: list[_Entry] = self._by_key if type(policy) is FirstComeFirstServed else []
        self._stamps: dict[int, int] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.group_id in self._stamps

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order. In order of arrival this takes constant time."""
        self._pushes += 1
        self._stamps[group.group_id] = self._pushes
        entry = (self._policy.key(group), group.arrival, self._pushes, group)
        heapq.heappush(self._by_key, entry)
        if self._by_arrival is not self._by_key:
            heapq.heappush(self._by_arrival, (group.arrival, *entry[1:]))

    def earliest(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        return self._first(self._by_arrival)

    def first_by_key(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        return self._first(self._by_key)

    def groups(self) -> list[SequenceGroup]:
        """All groups, in no order."""
        return [entry[3] for entry in self._by_arrival if self._is_present(entry)]

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from any position; its entries become stale and are skipped later."""
        del self._stamps[group.group_id]
        for heap in (self._by_key, self._by_arrival):
            if len(heap) > 2 * len(self._stamps) + _SLACK:  # some may never be reached
                heap[:] = [entry for entry in heap if self._is_present(entry)]
                heapq.heapify(heap)

    def _first(self, heap: list[_Entry]) -> SequenceGroup | None:
        while heap:
            if self._is_present(heap[0]):
                return heap[0][3]
            heapq.heappop(heap)
        return None

    def _is_present(self, entry: _Entry) -> bool:
        return self._stamps.get(entry[3].group_id) == entry[2]


@dataclass(slots=True)
class _Lane:
    #: By arrival; stale entries are skipped later.
    groups: list[_Entry] = field(default_factory=list)
    #: Its current entry among the lanes; earlier ones are stale.
    listed: _Entry | None = None


class LaneQueue(GroupQueue):
    """A queue in which keys may grow while groups wait, such as what a user has been served.

    Groups of one lane go in order of arrival, so only the first of each lane is compared with others. A lane whose key
    has grown is noticed when it comes first: then it is put back where it belongs. So a step costs as much as there are
    lanes that were served, however many groups wait in them.
    """

    def __init__(self, policy: Policy, aging_limit: float | None) -> None:
        """As ``GroupQueue``."""
        super().__init__(policy, aging_limit)
        self._lanes: dict[Hashable, _Lane] = {}
        #: By group id, where each is, whatever the policy would say now.
        self._names: dict[int, Hashable] = {}

    def push(self, group: SequenceGroup) -> None:
        """As ``GroupQueue``."""
        self._pushes += 1
        self._stamps[group.group_id] = self._pushes
        entry = (group.arrival, group.arrival, self._pushes, group)
        heapq.heappush(self._by_arrival, entry)
        name = self._names[group.group_id] = self._policy.lane(group)
        lane = self._lanes.setdefault(name, _Lane())
        heapq.heappush(lane.groups, entry)
        if self._first(lane.groups) is group:
            self._list(lane)

    def remove(self, group: SequenceGroup) -> None:
        """As ``GroupQueue``."""
        super().remove(group)
        name = self._names.pop(group.group_id)
        lane = self._lanes[name]
        if self._first(lane.groups) is None:
            del self._lanes[name]
        elif lane.listed is not None and lane.listed[3] is group:
            self._list(lane)
        if len(lane.groups) > 2 * len(self._stamps) + _SLACK:
            lane.groups = [entry for entry in lane.groups if self._is_present(entry)]
            heapq.heapify(lane.groups)

    def _list(self, lane: _Lane) -> None:
        lane.listed = self._entry_of(lane)
        heapq.heappush(self._by_key, lane.listed)

    def _entry_of(self, lane: _Lane) -> _Entry:
        arrival, _, stamp, group = lane.groups[0]
        return self._policy.key(group), arrival, stamp, group

    def first_by_key(self) -> SequenceGroup | None:
        """As ``Ordered``."""
        heap = self._by_key
        compared = set[int]()  # each once: a key may be another one whenever it is asked for
        while heap:
            entry = heap[0]
            lane = self._lanes.get(self._names.get(entry[3].group_id))
            if lane is None or lane.listed is not entry:
                heapq.heappop(heap)
                continue
            current = self._entry_of(lane)
            if current[0] == entry[0] or id(lane) in compared:
                return entry[3]
            compared.add(id(lane))
            lane.listed = current
            heapq.heapreplace(heap, current)
        return None


def make_queue(policy: Policy, aging_limit: float | None) -> GroupQueue:
    """The queue that this policy needs."""
    return (LaneQueue if policy.waiting_keys_grow else GroupQueue)(policy, aging_limit)


# Queues of groups some of which wait until something is prepared for them: these are passed over.


class PreparedQueue(Ordered):
    """Groups that do not run, in the policy's order; the first is that of those which may be admitted.

    A group is in ``ready``, or in a lane: a queue of all groups that need the same thing. There it is while the thing
    is not prepared, and always if the thing is scarce, so that its place may go to others. So passing over groups costs
    nothing, however many wait: what is looked at are the lanes of scarce things. Of several scarce things it is one
    that is not there yet.
    """

    def __init__(
        self,
        policy: Policy,
        aging_limit: float | None,
        needs: Callable[[SequenceGroup], list[Prepared]],
        order: Callable[[SequenceGroup], tuple[Any, ...]],
    ) -> None:
        """``needs``: what a group has to have prepared; ``order`` compares groups of different lanes."""
        super().__init__(aging_limit)
        self._policy, self._needs, self._order = policy, needs, order
        #: Groups that wait for nothing, and need nothing scarce.
        self.ready = make_queue(policy, aging_limit)
        #: By key, with what the groups need: lanes that are closed until it is prepared, and those of scarce things.
        self._unprepared: dict[str, tuple[Prepared, GroupQueue]] = {}
        self._scarce: dict[str, tuple[Prepared, GroupQueue]] = {}
        #: By group id: the lane of a group that is in one.
        self._lane_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ready) + len(self._lane_of)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self.ready or group.group_id in self._lane_of

    def push(self, group: SequenceGroup) -> None:
        """Adds a group in its order."""
        needs = self._needs(group) if group.preparations else ()
        plenty = (t for t in needs if not t.pool.limits.is_scarce)
        thing, lanes = next((t for t in plenty if t.state is not PreparationState.READY), None), self._unprepared
        if thing is None:
            scarce = [t for t in needs if t.pool.limits.is_scarce]
            missing = (t for t in scarce if not t.is_usable)
            thing, lanes = next(missing, scarce[0] if scarce else None), self._scarce
        if thing is None:
            self.ready.push(group)
            return
        if thing.key not in lanes:
            lanes[thing.key] = thing, make_queue(self._policy, self._aging_limit)
        lanes[thing.key][1].push(group)
        self._lane_of[group.group_id] = thing.key

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from any position."""
        key = self._lane_of.pop(group.group_id, None)
        if key is None:
            self.ready.remove(group)
            return
        lanes = self._unprepared if key in self._unprepared else self._scarce
        lane = lanes[key][1]
        lane.remove(group)
        if not len(lane):
            del lanes[key]

    def moved(self, group: SequenceGroup) -> None:
        """What the group needs has changed: it goes where it now belongs."""
        self.remove(group)
        self.push(group)

    def earliest(self) -> SequenceGroup | None:
        """The group that arrived first, whatever it waits for; None if there is none."""
        lanes = (lane for lanes in (self._unprepared, self._scarce) for _, lane in lanes.values())
        return _earliest([self.ready.earliest(), *(lane.earliest() for lane in lanes)])

    def first_by_key(self) -> SequenceGroup | None:
        """The first that may be admitted in the policy's order, however long others wait."""
        return self._first(queue.first_by_key() for queue in self._open())

    def peek(self, now: float) -> SequenceGroup | None:
        """The first group that may be admitted."""
        if not self._scarce:
            return self.ready.peek(now)
        return self._first(queue.peek(now) for queue in self._open())

    def peek_blocked(self, now: float) -> SequenceGroup | None:
        """Of the groups that wait for something scarce, the one that arrived first, if it is urgent.

        What is being prepared for them has its place.
        """
        if self._aging_limit is None:
            return None
        lacking = (lane for thing, lane in self._scarce.values() if not (thing.is_usable or thing.is_preparing))
        oldest = _earliest(lane.earliest() for lane in lacking)
        if oldest is None or now - oldest.request.arrival_time <= self._aging_limit:
            return None
        oldest.urgent = True
        return oldest

    def first_in_lane(self, key: str, now: float) -> SequenceGroup | None:
        """The first of the groups in this lane; None if there is none."""
        lane = self._unprepared.get(key) or self._scarce.get(key)
        return None if lane is None else lane[1].peek(now)

    def _open(self) -> list[GroupQueue]:
        return [self.ready, *(lane for thing, lane in self._scarce.values() if thing.is_usable)]

    def _first(self, groups: Iterable[SequenceGroup | None]) -> SequenceGroup | None:
        return min((g for g in groups if g is not None), key=self._order, default=None)


def _earliest(groups: Iterable[SequenceGroup | None]) -> SequenceGroup | None:
    return min((g for g in groups if g is not None), key=lambda g: g.arrival, default=None)


class SchedulingState:
    """Owns every unfinished group.

    Invariants: a group is in exactly one of waiting, running and swapped; only running ones hold device blocks, and
    only swapped ones host blocks; ``running`` is in order (as of the last ``reorder``); ``num_running_seqs`` is the sum
    of ``num_seqs`` over them; ``prefilling`` holds those that prefill, in order.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        blocks: BlockManager,
        max_model_len: int,
        plans_on_results: bool = False,
        preparations: Preparations | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.blocks = blocks
        self.preparations = preparations = preparations or Preparations()
        self._speculator = speculator
        self.policy = load_policy(options.scheduling_policy, options)
        self._threshold = options.long_prefill_token_threshold
        self._max_model_len = max_model_len
        self._aging_limit = options.aging_limit
        self._plans_on_results = plans_on_results
        self._by_arrival = type(self.policy) is FirstComeFirstServed
        self.waiting = self._make_queue()
        #: Prompts above ``long_prefill_token_threshold`` wait apart, so that short ones pass them without a search.
        self.waiting_long = self._make_queue()
        self.swapped = self._make_queue()
        self.not_running = [self.waiting, self.waiting_long, self.swapped]
        preparations.connect(self.not_running, self.order, self._on_change)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[SequenceGroup] = []
        self.steady = SteadyDecodes()
        self.num_running_seqs = 0
        #: No running group that is not urgent arrived before; it may have ended since.
        self._earliest_running = math.inf
        #: Unfinished groups whose sequences may have drafts.
        self.num_drafted_groups = 0
        self.groups: dict[int, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        #: Sequences that were among these and have ended.
        self.num_ended = 0
        #: Sequences and contexts that the workers must forget.
        self.forget: list[int] = []
        #: Running sequences that the workers may not hold yet.
        self.new_seqs: list[Sequence] = []
        #: Running sequences, and how many of their last tokens have to be sent to the workers, which did not append
        #: them themselves.
        self.unsent_tokens: list[tuple[Sequence, int]] = []
        #: Numbers of the last step that was planned, and of the last whose result is known.
        self.last_step = self.last_result = 0
        self._seq_ids = itertools.count()
        self._numbers = itertools.count()
        #: Called with each group that is about to be admitted.
        self.on_attempt: Callable[[int], object] = lambda group_id: None

    def follow(self, before: SchedulingState, steps: int) -> None:
        """Takes the place of queues whose groups have been taken out after so many steps, none of which is in flight.

        Their sequences' ids are not used again, and the workers are told to forget all of them.
        """
        self._seq_ids, self._numbers, self.on_attempt = before._seq_ids, before._numbers, before.on_attempt
        self.last_step = self.last_result = steps
        self.num_ended = before.num_ended + len(before.sequences)
        contexts = [group.cross.context_id for group in before.groups.values() if group.cross is not None]
        self.forget = [*before.forget, *before.sequences, *contexts]

    def _make_queue(self) -> PreparedQueue:
        return PreparedQueue(self.policy, self._aging_limit, self.preparations.needs, self.order)

    @property
    def num_waiting(self) -> int:
        """Waiting groups, with those that wait for something to be prepared."""
        return len(self.waiting) + len(self.waiting_long)

    @property
    def earliest_waiting(self) -> SequenceGroup | None:
        """Of all waiting groups, the one that arrived first."""
        first = [g for g in (self.waiting.earliest(), self.waiting_long.earliest()) if g is not None]
        return min(first, key=lambda g: g.arrival, default=None)

    @property
    def num_not_running(self) -> int:
        """Waiting and swapped groups."""
        return len(self.groups) - len(self.running)

    def add(self, request: EngineCoreRequest) -> SequenceGroup:
        """Makes a group of the request and puts it into the waiting queue."""
        number, seq_id = next(self._numbers), next(self._seq_ids)
        group = SequenceGroup(request, number, seq_id, self._max_model_len, self._plans_on_results)
        group.cross = CrossContext.of(request, self._seq_ids)
        if request.progress is not None:
            resume(group, request.progress, self._seq_ids, self.blocks.block_size)
        group.drafts = group.drafts and self._speculator is not None and self._speculator.drafts(group.seqs[0])
        group.is_long = 0 < self._threshold < len(request.prompt_token_ids)
        self.num_drafted_groups += group.drafts
        self.groups[group.group_id] = group
        self.sequences.update((seq.seq_id, seq) for seq in group.seqs)
        self.policy.on_arrival(group)
        self._push(group)
        return group

    def take_policy_failures(self) -> list[tuple[SequenceGroup, str]]:
        """Unfinished groups about which the user's policy has raised, and what; each once."""
        if not isinstance(self.policy, GuardedPolicy):
            return []
        return [(g, why) for g, why in self.policy.take_failures() if self.groups.get(g.group_id) is g]

    def _queue_of(self, group: SequenceGroup) -> PreparedQueue:
        """The queue in which a group that does not run is."""
        if group.status is SequenceStatus.SWAPPED:
            return self.swapped
        return self.waiting_long if group.is_long else self.waiting

    def _push(self, group: SequenceGroup) -> None:
        self.preparations.add_waiting(group)
        self._queue_of(group).push(group)

    def _remove(self, group: SequenceGroup) -> None:
        self._queue_of(group).remove(group)
        self.preparations.remove_waiting(group)

    def _on_change(self, thing: Prepared) -> None:
        """Groups that have waited for something that is ready now take the place of their arrival."""
        is_scarce = thing.pool.limits.is_scarce
        if thing.state is PreparationState.READY and not is_scarce:
            for group in thing.waiting.values():
                self._queue_of(group).moved(group)
        elif is_scarce and thing.state in (PreparationState.READY, PreparationState.WANTED):
            for group in thing.waiting.values():
                if len(group.preparations) > 1:  # of what it needs, something else may be missing now
                    self._queue_of(group).moved(group)

    def peek(self, queue: PreparedQueue, now: float) -> SequenceGroup | None:
        """The first group of a queue that may be admitted, as far as preparations are concerned; None if there is none.

        Groups that wait for one are passed over. When the first of those that wait for something scarce is urgent, no
        later group that takes such a thing is admitted: so places become free for it, as those that run end.
        """
        first = queue.peek(now)
        if first is None or not first.preparations or not self.preparations.is_scarce(first):
            return first
        if not self.preparations.may_admit(first):  # it needs more than the thing in whose lane it is
            return queue.ready.peek(now)
        blocked = [q.peek_blocked(now) for q in self.not_running]
        if all(g is None or self.order(first) < self.order(g) for g in blocked):
            return first
        return queue.ready.peek(now)

    def order(self, group: SequenceGroup) -> tuple[Any, ...]:
        """Compares groups; the lower goes first: urgent ones by arrival, then the others as the policy says."""
        if group.urgent or self._by_arrival:
            return 0, group.arrival
        return 1, self.policy.key(group), group.arrival

    def reorder(self, now: float) -> None:
        """Sorts the running groups if time, or what they computed, may have changed their order."""
        changed = self.policy.dynamic
        if changed:
            self.policy.on_step(now, self.running)
        limit = self._aging_limit
        if limit is not None and not self._by_arrival and now - self._earliest_running > limit:
            changed = self._find_aged(now) or changed
        if changed:
            before = self.running.copy()
            self.running.sort(key=self.order)
            self.prefilling.sort(key=self.order)
            if self.running != before:
                self.steady.restart()

    def _find_aged(self, now: float) -> bool:
        """Marks the running groups that have become urgent; whether there are any."""
        others = [group for group in self.running if not group.urgent]
        aged = [group for group in others if self.has_aged(group, now)]
        for group in aged:
            group.urgent = True
        self._earliest_running = min((g.request.arrival_time for g in others if not g.urgent), default=math.inf)
        return bool(aged)

    def has_aged(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group arrived so long ago that no later arrival may go before it."""
        limit = self._aging_limit
        return group.urgent or (limit is not None and now - group.request.arrival_time > limit)

    # --- from queue to queue ----------------------------------------------------------------------------------------

    def start_running(self, group: SequenceGroup) -> None:
        """From waiting or swapped to running."""
        self.preparations.acquire(group)  # before it ceases to wait: what it needs is in use all the time
        self._remove(group)
        _set_status(group, SequenceStatus.RUNNING)
        group.chain = None  # when it resumes, its first sequence may be another one, and longer
        self.policy.on_admit(group)
        self.num_running_seqs += group.num_seqs
        self._earliest_running = min(self._earliest_running, group.request.arrival_time)
        self._insert(self.running, group)
        if group.prefilling:
            self._insert(self.prefilling, group)
        self.new_seqs += [s for s in group.seqs if s.shared_prefix is None]

    def requeue(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """From running to waiting or swapped; the caller frees or moves its blocks."""
        self._leave_running(group)
        group.resumable_after = self.last_step
        for seq in group.seqs:
            if seq.on_workers:
                self.forget.append(seq.seq_id)
            seq.on_workers = False
            seq.fork_of = None
            seq.slots_end = 0
        self._forget_context(group)
        _set_status(group, status)
        self.policy.on_preempt(group)
        self._push(group)
        self.preparations.release(group)

    def move(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """From swapped to waiting or back; the caller frees its blocks, or gives it blocks of the host."""
        self._remove(group)
        _set_status(group, status)
        self._push(group)

    def finish_prefill(self, group: SequenceGroup) -> None:
        """The group has computed all but the last token of each sequence."""
        group.prefilling = False
        self.prefilling.remove(group)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence of a running group that shares the parent's tokens and blocks."""
        child = Sequence(next(self._seq_ids), parent.group, index, list(parent.token_ids))
        child.num_computed = parent.num_computed
        child.status = SequenceStatus.RUNNING
        self.blocks.fork(parent.seq_id, child.seq_id)
        child.slots_end = parent.slots_end = 0  # before the next write the block manager checks for a shared block
        self.sequences[child.seq_id] = child
        return child

    def replace_beams(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Makes these the sequences of the group; those that are not among them end."""
        kept = set(map(id, beams))
        for seq in group.seqs:
            if id(seq) not in kept:
                self._free(seq, SequenceStatus.FINISHED_STOPPED)
        # Too few candidates may leave fewer beams, which may become more again: all W count against the limit.
        group.seqs, group.num_pending_forks = beams, group.num_seqs - len(beams)
        self.unsent_tokens += [(seq, 1) for seq in beams]

    # --- ends -------------------------------------------------------------------------------------------------------

    def end_sequence(self, seq: Sequence, status: SequenceStatus) -> None:
        """Ends one sequence of a group in any state; the group ends with its last sequence."""
        group = seq.group
        if len(group.seqs) == 1 and group.seqs[0] is seq and not group.num_pending_forks:
            self.end_group(group, status)
            return
        group.seqs.remove(seq)
        if group.status is SequenceStatus.RUNNING:
            self.num_running_seqs -= 1
        group.chain = None
        self._pass_on_sharing(seq)
        self._free(seq, status)

    def _pass_on_sharing(self, ended: Sequence) -> None:
        """Sequences that were to share blocks of an ended sequence share those of the first among them instead."""
        successor: tuple[Sequence, int] | None = None
        for seq in ended.group.seqs:
            if seq.shared_prefix is None or seq.shared_prefix[0] is not ended:
                continue
            count = seq.shared_prefix[1]
            if successor is not None:
                seq.shared_prefix = (successor[0], min(count, successor[1]))
                continue
            successor = (seq, count)
            source = ended.shared_prefix
            seq.shared_prefix = None if source is None else (source[0], min(count, source[1]))
            if seq.shared_prefix is None and seq.status is SequenceStatus.RUNNING:
                self.new_seqs.append(seq)

    def end_group(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Ends a group in any state and frees all it holds."""
        if group.status is SequenceStatus.RUNNING:
            self._leave_running(group)
            self.preparations.release(group)
        else:
            self._remove(group)
        for seq in group.seqs:
            self._free(seq, status)
        self._forget_context(group)
        if group.cross is not None:
            self.blocks.free(group.cross.context_id)
        group.seqs = []
        group.num_pending_forks = 0
        group.status = status
        self.policy.on_end(group)
        self.num_drafted_groups -= group.drafts
        del self.groups[group.group_id]

    def _free(self, seq: Sequence, status: SequenceStatus) -> None:
        seq.status = status
        self.policy.on_sequence_end(seq, status)
        if self._speculator is not None:
            self._speculator.on_end(seq)
        if seq.on_workers:
            self.forget.append(seq.seq_id)
            seq.on_workers = False
        self.blocks.free(seq.seq_id)
        del self.sequences[seq.seq_id]
        self.num_ended += 1

    def _forget_context(self, group: SequenceGroup) -> None:
        if group.cross is not None and group.cross.on_workers:
            self.forget.append(group.cross.context_id)
            group.cross.on_workers = False

    def _leave_running(self, group: SequenceGroup) -> None:
        # A preempted group is most often the last; an ended one may be anywhere.
        position = len(self.running) - 1 if self.running[-1] is group else self.running.index(group)
        del self.running[position]
        self.steady.leave(position, group)
        if group.prefilling:
            self.prefilling.remove(group)
        self.num_running_seqs -= group.num_seqs

    def _insert(self, groups: list[SequenceGroup], group: SequenceGroup) -> None:
        if not groups or self.order(groups[-1]) <= self.order(group):
            groups.append(group)
        else:
            bisect.insort(groups, group, key=self.order)
            self.steady.restart()


def _set_status(group: SequenceGroup, status: SequenceStatus) -> None:
    group.status = status
    for seq in group.seqs:
        seq.status = status
