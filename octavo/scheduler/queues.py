"""Who is where: the queues, and the ways between them."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

from octavo.core.config import SchedulerOptions
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.group_queue import GroupQueue
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.policies import FirstComeFirstServed, load_policy


class Queues:
    """Owns every unfinished group.

    Invariants: a group is in exactly one of waiting, running and swapped; only running ones hold device blocks, and
    only swapped ones host blocks; ``running`` is in order (as of the last ``reorder``);
    ``rows`` is the sum of the running groups' widths; ``prefilling`` has the running groups with that mark, in order.
    """

    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, drafted: bool = False
    ) -> None:
        self.blocks = blocks
        self.policy = load_policy(options.scheduling_policy)
        self._threshold = options.long_prefill_token_threshold
        self._max_model_len = max_model_len
        self._aging_limit = options.aging_limit
        self._drafted = drafted
        self._by_arrival = type(self.policy) is FirstComeFirstServed
        self.waiting = GroupQueue(self.policy, options.aging_limit)
        #: Prompts above the threshold wait apart, so that short ones can pass without a search.
        self.waiting_long = GroupQueue(self.policy, options.aging_limit)
        self.swapped = GroupQueue(self.policy, options.aging_limit)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[SequenceGroup] = []
        self.rows = 0
        self.groups: dict[int, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        #: Sequences that the workers must forget.
        self.forget: list[int] = []
        #: Running sequences that the workers may not hold yet.
        self.new_seqs: list[Sequence] = []
        #: Running sequences whose last token the workers lack: they did not append it themselves.
        self.unsent_tokens: list[Sequence] = []
        #: Numbers of the last step that was planned, and of the last whose result is known.
        self.last_step = self.last_result = 0
        self._seq_ids = itertools.count()
        self._arrivals = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Groups that wait."""
        return len(self.waiting) + len(self.waiting_long)

    @property
    def num_outside(self) -> int:
        """Groups that do not run."""
        return len(self.groups) - len(self.running)

    def add(self, request: EngineCoreRequest) -> SequenceGroup:
        """Puts a new group into the waiting queue."""
        group = SequenceGroup(request, next(self._arrivals), next(self._seq_ids), self._max_model_len, self._drafted)
        group.is_long = 0 < self._threshold < len(request.prompt_token_ids)
        self.groups[group.group_id] = group
        self.sequences[group.seqs[0].seq_id] = group.seqs[0]
        self.waiting_for(group).push(group)
        return group

    def waiting_for(self, group: SequenceGroup) -> GroupQueue:
        """The queue in which this group waits."""
        return self.waiting_long if group.is_long else self.waiting

    def order(self, group: SequenceGroup) -> tuple[Any, ...]:
        """Compares groups; the lower goes first: urgent ones by arrival, then the others as the policy says."""
        if group.urgent or self._by_arrival:
            return 0, group.arrival
        return 1, self.policy.key(group), group.arrival

    def reorder(self, now: float) -> None:
        """Brings the running groups into order if time, or what they computed, may have changed it."""
        changed = self.policy.dynamic
        if self._aging_limit is not None and not self._by_arrival:
            for group in self.running:
                if not group.urgent and self.has_aged(group, now):
                    group.urgent = changed = True
        if changed:
            self.running.sort(key=self.order)
            self.prefilling.sort(key=self.order)

    def has_aged(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group arrived so long ago that no later arrival may go before it."""
        limit = self._aging_limit
        return group.urgent or (limit is not None and now - group.request.arrival_time > limit)

    # --- from queue to queue ----------------------------------------------------------------------------------------

    def run(self, group: SequenceGroup) -> None:
        """From waiting or swapped to running."""
        (self.swapped if group.status is SequenceStatus.SWAPPED else self.waiting_for(group)).remove(group)
        _set_status(group, SequenceStatus.RUNNING)
        self.rows += group.width
        self._insert(self.running, group)
        if group.prefilling:
            self._insert(self.prefilling, group)
        self.new_seqs += [s for s in group.seqs if s.resume is None]

    def preempt(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """From running to waiting or swapped; its blocks are the caller's business."""
        self._leave_running(group)
        group.resumable_after = self.last_step
        for seq in group.seqs:
            if seq.known:
                self.forget.append(seq.seq_id)
            seq.known = False
            seq.fork_of = None
            seq.room = 0
        group.chain = None  # it may come back with another first sequence, and longer
        _set_status(group, status)
        (self.swapped if status is SequenceStatus.SWAPPED else self.waiting_for(group)).push(group)

    def prefilled(self, group: SequenceGroup) -> None:
        """The group has computed all but the last token of each sequence."""
        group.prefilling = False
        self.prefilling.remove(group)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new sequence of a running group that shares the parent's tokens and blocks."""
        child = Sequence(next(self._seq_ids), parent.group, index, list(parent.token_ids))
        child.num_computed = parent.num_computed
        child.status = SequenceStatus.RUNNING
        self.blocks.fork(parent.seq_id, child.seq_id)
        child.room = parent.room = 0  # the next write must look whether the block is shared
        self.sequences[child.seq_id] = child
        return child

    def replace_beams(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """The group goes on with these sequences; those it no longer has are gone."""
        kept = set(map(id, beams))
        for seq in group.seqs:
            if id(seq) not in kept:
                self._drop(seq, SequenceStatus.FINISHED_STOPPED)
        # Beams may become fewer for want of candidates, and more again: all W keep counting.
        group.seqs, group.num_pending_forks = beams, group.width - len(beams)
        self.unsent_tokens += beams

    # --- ends -------------------------------------------------------------------------------------------------------

    def end_sequence(self, seq: Sequence, status: SequenceStatus) -> None:
        """Ends one sequence of a group in any state, and the group with its last."""
        group = seq.group
        if len(group.seqs) == 1 and group.seqs[0] is seq and not group.num_pending_forks:
            self.end_group(group, status)
            return
        group.seqs.remove(seq)
        if group.status is SequenceStatus.RUNNING:
            self.rows -= 1
        group.chain = None
        self._bequeath(seq)
        self._drop(seq, status)

    def _bequeath(self, ended: Sequence) -> None:
        """Of those that were to share blocks with a sequence that will not compute them, the first takes its place."""
        heir: tuple[Sequence, int] | None = None
        for seq in ended.group.seqs:
            if seq.resume is None or seq.resume[0] is not ended:
                continue
            count = seq.resume[1]
            if heir is not None:
                seq.resume = (heir[0], min(count, heir[1]))
                continue
            heir = (seq, count)
            seq.resume = (ended.resume[0], min(count, ended.resume[1])) if ended.resume is not None else None
            if seq.resume is None and seq.status is SequenceStatus.RUNNING:
                self.new_seqs.append(seq)

    def end_group(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Ends a group in any state and frees all it holds."""
        if group.status is SequenceStatus.RUNNING:
            self._leave_running(group)
        elif group.status is SequenceStatus.SWAPPED:
            self.swapped.remove(group)
        else:
            self.waiting_for(group).remove(group)
        for seq in group.seqs:
            self._drop(seq, status)
        group.seqs = []
        group.num_pending_forks = 0
        group.status = status
        del self.groups[group.group_id]

    def _drop(self, seq: Sequence, status: SequenceStatus) -> None:
        seq.status = status
        if seq.known:
            self.forget.append(seq.seq_id)
            seq.known = False
        self.blocks.free(seq.seq_id)
        del self.sequences[seq.seq_id]

    def _leave_running(self, group: SequenceGroup) -> None:
        # The one preempted is most often the last; one that ends may be anywhere, and comparing identities is quick.
        if self.running[-1] is group:
            self.running.pop()
        else:
            self.running.remove(group)
        if group.prefilling:
            self.prefilling.remove(group)
        self.rows -= group.width

    def _insert(self, groups: list[SequenceGroup], group: SequenceGroup) -> None:
        if not groups or self.order(groups[-1]) <= self.order(group):
            groups.append(group)
        else:
            bisect.insort(groups, group, key=self.order)


def _set_status(group: SequenceGroup, status: SequenceStatus) -> None:
    group.status = status
    for seq in group.seqs:
        seq.status = status
