"""The waiting, running and swapped groups (``SchedulingState``): every group that is not finished."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import Any

from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.fetches import Fetches
from octavo.scheduler.groups import CrossContext, Sequence, SequenceGroup, resume
from octavo.scheduler.image_time import ImageTime
from octavo.scheduler.policies import FirstComeFirstServed, GuardedPolicy, load_policy
from octavo.scheduler.preparations import Preparations, PreparationState, Prepared
from octavo.scheduler.queue import GroupQueue
from octavo.scheduler.step import SteadyDecodes
from octavo.speculation.speculator import Speculator


class SchedulingState:
    """Owns every unfinished group, and moves groups between waiting, running and swapped.

    Invariants: a group is in exactly one of waiting, running and swapped; only running ones hold device blocks, and
    only swapped ones host blocks; ``running`` is in order (as of the last ``reorder``), as is ``prefilling``.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        blocks: BlockManager,
        max_model_len: int,
        plans_on_results: bool = False,
        preparations: Preparations | None = None,
        speculator: Speculator | None = None,
        fetches: Fetches | None = None,
        image_time: ImageTime | None = None,
    ) -> None:
        self.blocks = blocks
        self.image_time = image_time
        self.preparations = preparations = preparations or Preparations()
        self._speculator, self._fetches = speculator, fetches
        self.policy = load_policy(options.scheduling_policy, options)
        self._threshold = options.long_prefill_token_threshold
        self._aging_limit = options.aging_limit if self.policy.ages else None
        self._max_model_len, self._plans_on_results = max_model_len, plans_on_results
        self._by_arrival = type(self.policy) is FirstComeFirstServed
        self.not_running = [
            GroupQueue(self.policy, self._aging_limit, preparations.needs, self.order) for _ in range(3)
        ]
        #: Prompts above ``long_prefill_token_threshold`` wait apart, so that short ones pass them without a search.
        self.waiting, self.waiting_long, self.swapped = self.not_running
        preparations.connect(self.not_running, self.order, self._on_change)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[SequenceGroup] = []
        self.steady = SteadyDecodes()
        #: The sum of ``num_seqs`` over ``running``.
        self.num_running_seqs = 0
        #: Lower bound of the arrival times of running groups that are not urgent.
        self._earliest_running = math.inf
        #: Unfinished groups whose sequences may have drafts.
        self.num_drafted_groups = 0
        self.groups: dict[int, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.num_ended = 0
        #: Sequences and contexts that the workers must forget.
        self.forget: list[int] = []
        #: Running sequences that the workers may not hold yet.
        self.new_seqs: list[Sequence] = []
        #: Running sequences, each with its number of last tokens that the workers did not append themselves.
        self.unsent_tokens: list[tuple[Sequence, int]] = []
        #: The last step that was planned, and the last whose result is known.
        self.last_step = self.last_result = 0
        self._seq_ids, self._numbers = itertools.count(), itertools.count()
        #: Called before each admission.
        self.on_attempt: Callable[[int], object] = lambda group_id: None

    def follow(self, before: SchedulingState, steps: int) -> None:
        """Succeeds a state whose groups have been taken out; no step is in flight, and workers forget all sequences."""
        self._seq_ids, self._numbers, self.on_attempt = before._seq_ids, before._numbers, before.on_attempt
        self.last_step = self.last_result = steps
        self.num_ended = before.num_ended + len(before.sequences)
        contexts = [group.cross.context_id for group in before.groups.values() if group.cross is not None]
        self.forget = [*before.forget, *before.sequences, *contexts]

    def dissolve(self) -> None:
        """Breaks the reference cycles of a state that has a successor, so that its memory is freed at once."""
        for group in self.groups.values():
            group.seqs = []
        self.__dict__.clear()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.waiting_long)

    def add(self, request: EngineCoreRequest) -> SequenceGroup:
        number, seq_id = next(self._numbers), next(self._seq_ids)
        group = SequenceGroup(request, number, seq_id, self._max_model_len, self._plans_on_results)
        group.cross = CrossContext.of(request, self._seq_ids)
        if request.progress is not None:
            resume(group, request.progress, self._seq_ids, self.blocks)
        group.drafts = group.drafts and self._speculator is not None and self._speculator.drafts(group.seqs[0])
        group.is_long = 0 < self._threshold < len(request.prompt_token_ids)
        self.num_drafted_groups += group.drafts
        self.groups[group.group_id] = group
        self.sequences.update((seq.seq_id, seq) for seq in group.seqs)
        self.policy.on_arrival(group)
        self._push(group)
        return group

    def take_policy_failures(self) -> list[tuple[SequenceGroup, str]]:
        """Unfinished groups for which the user's policy has raised, with the error; each once."""
        if not isinstance(self.policy, GuardedPolicy):
            return []
        return [(g, why) for g, why in self.policy.take_failures() if self.groups.get(g.group_id) is g]

    def _queue_of(self, group: SequenceGroup) -> GroupQueue:
        if group.status is SequenceStatus.SWAPPED:
            return self.swapped
        return self.waiting_long if group.is_long else self.waiting

    def _push(self, group: SequenceGroup) -> None:
        self.preparations.add_waiting(group)
        self._queue_of(group).push(group)

    def pass_over(self, group: SequenceGroup) -> None:
        """Called when ``group.is_held`` has changed."""
        self._queue_of(group).requeue(group)

    def _remove(self, group: SequenceGroup) -> None:
        self._queue_of(group).remove(group)
        self.preparations.remove_waiting(group)
        if self._fetches is not None:
            self._fetches.leave(group)

    def _on_change(self, prepared: Prepared) -> None:
        is_scarce, state = prepared.is_scarce, prepared.state
        if state is PreparationState.READY or (is_scarce and state is PreparationState.WANTED):
            for group in prepared.waiting.values():
                if not is_scarce or len(group.preparations) > 1:  # another of its preparations may be missing now
                    self._queue_of(group).requeue(group)

    def peek(self, queue: GroupQueue, now: float) -> SequenceGroup | None:
        """The first group of a queue that may be admitted, as far as preparations are concerned.

        While the earliest group that waits for a scarce preparation is urgent, no later group with one is admitted.
        """
        first = queue.peek(now)
        if first is None or not first.preparations:
            return first
        needs = self.preparations.needs(first)
        if not any(p.is_scarce for p in needs):
            return first
        if all(p.is_usable for p in needs):  # else another of its preparations is missing
            blocked = [q.peek_blocked(now) for q in self.not_running]
            if all(g is None or self.order(first) < self.order(g) for g in blocked):
                return first
        return queue.peek_ready(now)

    def order(self, group: SequenceGroup) -> tuple[Any, ...]:
        """The sort key of a group, lowest first: urgent ones by arrival, then the others as the policy says."""
        if group.urgent or self._by_arrival:
            return 0, group.arrival
        return 1, self.policy.key(group), group.arrival

    def reorder(self, now: float) -> None:
        """Sorts the running groups if time, or their computed tokens, may have changed their order."""
        changed = self.policy.dynamic
        if changed:
            self.policy.on_step(now, self.running)
        limit = self._aging_limit
        if limit is not None and not self._by_arrival and now - self._earliest_running > limit:
            others = [group for group in self.running if not group.urgent]
            for group in others:
                group.urgent = self.has_aged(group, now)
                changed = changed or group.urgent
            self._earliest_running = min((g.request.arrival_time for g in others if not g.urgent), default=math.inf)
        if changed:
            before = self.running.copy()
            self.running.sort(key=self.order)
            self.prefilling.sort(key=self.order)
            if self.running != before:
                self.steady.restart()

    def has_aged(self, group: SequenceGroup, now: float) -> bool:
        limit = self._aging_limit
        return group.urgent or (limit is not None and now - group.request.arrival_time > limit)

    def start_running(self, group: SequenceGroup) -> None:
        self.preparations.acquire(group)  # before it ceases to wait, so that they stay in use
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
        """From running to waiting or swapped (preemption); the caller frees or moves its blocks."""
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
        group.looked_up = False
        self.policy.on_preempt(group)
        self._push(group)
        self.preparations.release(group)

    def move(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """From swapped to waiting or back; the caller frees its blocks, or gives it blocks of the host."""
        self._remove(group)
        _set_status(group, status)
        self._push(group)

    def finish_prefill(self, group: SequenceGroup) -> None:
        group.prefilling = False
        self.prefilling.remove(group)

    def register_end(self, seq: Sequence, *, of_prompt: bool = False) -> None:
        """``SequencePrefixes.register_end`` of a sequence's computed tokens, those in flight included; not of beams."""
        group = seq.group
        if (of_prompt or group.beam is None) and self.blocks.prefixes.register_end(
            seq.seq_id, seq.token_ids, seq.num_computed, group.context, group.features, of_prompt=of_prompt
        ):
            seq.slots_end = 0  # before the next write the block manager checks for a cached block

    def fork(self, parent: Sequence, index: int) -> Sequence:
        child = Sequence(next(self._seq_ids), parent.group, index, list(parent.token_ids))
        child.num_computed = parent.num_computed
        child.status = SequenceStatus.RUNNING
        self.blocks.fork(parent.seq_id, child.seq_id)
        child.slots_end = parent.slots_end = 0  # before the next write the block manager checks for a shared block
        self.sequences[child.seq_id] = child
        return child

    def replace_beams(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        kept = set(map(id, beams))
        for seq in group.seqs:
            if id(seq) not in kept:
                self._free(seq, SequenceStatus.FINISHED_STOPPED)
        # Too few candidates may leave fewer beams, which may become more again: all W count against the limit.
        group.seqs, group.num_pending_forks = beams, group.num_seqs - len(beams)
        self.unsent_tokens += [(seq, 1) for seq in beams]

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
        """Sequences that were to share blocks of an ended one share those of the first among them instead."""
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
        if seq.group.status is SequenceStatus.RUNNING and status is not SequenceStatus.FINISHED_ERROR:
            self.register_end(seq)
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
