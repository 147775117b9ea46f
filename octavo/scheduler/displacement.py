"""Displacement: running groups are preempted for a waiting one that the policy puts before them."""

from __future__ import annotations

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.kv_group import BlocksNeeded
from octavo.memory.release import Release
from octavo.scheduler.admission import Admission
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step, blocks_still_needed, prompt_chunks

_NOTHING = BlocksNeeded()


class Displacement:
    """Decides before it preempts: those that give way are enough for the waiting group to be admitted in this step.

    They are taken in the order of ``preemption_victim``, as for any preemption, until they are enough; then those that
    are not needed for it are spared, the first in order before others. So no group that may stay is preempted, and none
    is if the waiting group would have to wait all the same.
    """

    def __init__(self, options: SchedulerOptions, queues: Queues, admission: Admission, preemption: Preemption) -> None:
        self._options, self._queues, self._admission, self._preemption = options, queues, admission, preemption

    def preempt_for_waiting(self, step: Step) -> SequenceGroup | None:
        """Preempts running groups for the first waiting group if the policy says that it displaces them.

        Returns that group if any was preempted, and holds back the tokens that it is to compute in this step.
        """
        group = self._admission.next_group(step.now)
        if group is None or group.status is SequenceStatus.SWAPPED or self._admission.has_tokens_in_flight(group):
            return None
        victims = self._victims(group, step.now)
        if not victims:
            return None
        gone = {victim.group_id for victim in victims}
        decoding = sum(g.num_seqs for g in self._queues.running if not (g.prefilling or g.group_id in gone))
        budget = step.budget - (decoding if self._options.batching == "mixed" else 0)
        chunks = prompt_chunks(self._queues.blocks, group, budget, self._options)
        if not chunks:
            return None
        for victim in victims:
            self._preemption.preempt(victim, step, group)
        step.held_back = sum(n for _, n in chunks)
        step.budget -= step.held_back
        return group

    def _victims(self, group: SequenceGroup, now: float) -> list[SequenceGroup]:
        """The groups to preempt; none if the group fits now, or would not fit without all that it displaces."""
        queues = self._queues
        order, displaces = queues.order(group), queues.policy.displaces
        if not queues.running or self._admission.fits(group):
            return []
        lower = [g for g in queues.running if displaces(group, g) and queues.order(g) > order and not g.awaits_result]
        if not lower:
            return []
        room = _Room(self._options, queues, self._admission, group)
        if not room.may_suffice(lower):
            return []
        last, candidates = len(queues.running) - 1, self._preemption.victims(lower, now)
        victims: list[SequenceGroup] = []
        gone: set[int] = set()
        while not room.suffices():
            victim = next(candidates, None)
            if victim is None:
                return []  # all are too few
            while queues.running[last].group_id in gone:
                last -= 1
            if queues.has_aged(victim, now) and victim is not queues.running[last]:
                return []  # later ones would go on before it
            victims.append(victim)
            gone.add(victim.group_id)
            room.remove(victim)
        if victims and not queues.has_aged(victims[-1], now):
            # Those without which the others are enough are spared; without the last one they are not.
            for victim in victims[-2::-1]:
                room.restore(victim)
                if room.suffices():
                    gone.remove(victim.group_id)
                else:
                    room.remove(victim)
        return [victim for victim in victims if victim.group_id in gone]


class _Room:
    """What a waiting group finds when running groups are gone, and those that stay have what they need in this step."""

    def __init__(self, options: SchedulerOptions, queues: Queues, admission: Admission, group: SequenceGroup) -> None:
        self._blocks, self._admission, self._group = queues.blocks, admission, group
        self._cached = admission.cached(group)
        self._release = Release(queues.blocks.groups)
        self._num_seqs = queues.num_running_seqs
        #: By group id: what prompts still need, and of those that decode before the waiting group is admitted the
        #: blocks for their next tokens.
        self._needs = {g.group_id: blocks_still_needed(queues.blocks, g) for g in queues.prefilling}
        if options.batching == "mixed":
            decoding = (g for g in queues.running if not g.prefilling)
            short = (g for g in decoding if len(g.seqs) > 1 or g.seqs[0].num_computed >= g.seqs[0].slots_end)
            self._needs |= {g.group_id: _growth(queues, g) for g in short}
        #: The sum of those that stay.
        self._reserved = sum(self._needs.values(), BlocksNeeded())

    def remove(self, victim: SequenceGroup) -> None:
        """A running group is gone."""
        self._release.add(victim.holder_ids)
        self._num_seqs -= victim.num_seqs
        self._reserved -= self._needs.get(victim.group_id, _NOTHING)

    def restore(self, victim: SequenceGroup) -> None:
        """Takes ``remove`` back."""
        self._release.discard(victim.holder_ids)
        self._num_seqs += victim.num_seqs
        self._reserved += self._needs.get(victim.group_id, _NOTHING)

    def may_suffice(self, victims: list[SequenceGroup]) -> bool:
        """Whether the waiting group fits without these if they share no block: quick to say where most are too few."""
        holder_ids = [holder_id for victim in victims for holder_id in victim.holder_ids]
        needs = (self._needs.get(victim.group_id, _NOTHING) for victim in victims)
        held = [sum(map(kv_group.num_held, holder_ids)) for kv_group in self._blocks.groups]
        num_seqs = self._num_seqs - sum(victim.num_seqs for victim in victims)
        return self._fits(self._reserved - sum(needs, _NOTHING), held, num_seqs)

    def suffices(self) -> bool:
        """Whether the waiting group fits now that some are gone."""
        return self._fits(self._reserved, self._release.counts, self._num_seqs)

    def _fits(self, reserved: BlocksNeeded, released: list[int], num_seqs: int) -> bool:
        needed = self._admission.needed(self._group, self._cached, self._release.references)
        return self._admission.fits_beside(
            self._group, needed, reserved - BlocksNeeded(exact=tuple(released)), num_seqs
        )


def _growth(queues: Queues, group: SequenceGroup) -> BlocksNeeded:
    """Blocks that the next tokens of a decoding group need."""
    writes = [
        (s.seq_id, s.num_computed, s.num_computed + s.num_uncomputed)
        for s in group.seqs
        if s.slots_end < s.num_computed + s.num_uncomputed and not s.is_ending
    ]
    return BlocksNeeded(exact=tuple(kv_group.demand(writes)[0] for kv_group in queues.blocks.groups))
