"""Displacement: running groups are preempted for a waiting one that the policy puts before them."""

from __future__ import annotations

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.kv_group import Demand
from octavo.memory.release import Release
from octavo.scheduler.admission import Admission
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step, blocks_still_needed, prompt_chunks


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
        decoding = sum(g.num_seqs for g in self._queues.running if not (g.prefilling or g in victims))
        budget = step.budget - (decoding if self._options.batching == "mixed" else 0)
        chunks = prompt_chunks(self._queues.blocks, group, budget, self._options)
        if not chunks:
            return None
        for victim in victims:
            self._preemption.preempt(victim, step)
        step.held_back = sum(n for _, n in chunks)
        step.budget -= step.held_back
        return group

    def _victims(self, group: SequenceGroup, now: float) -> list[SequenceGroup]:
        """The groups to preempt; none if the group fits now, or would not fit without all that it displaces."""
        queues, preemption = self._queues, self._preemption
        order, displaces = queues.order(group), queues.policy.displaces
        if not queues.running or self._admission.fits(group):
            return []
        lower = [g for g in queues.running if displaces(group, g) and queues.order(g) > order and not g.awaits_result]
        if not lower:
            return []
        room = _Room(self._options, queues, self._admission, group)
        if not room.may_suffice(lower):
            return []
        staying, victims = list(queues.running), list[SequenceGroup]()
        while not room.suffices(victims):
            if not lower:
                return []
            victim = preemption.choose_victim(lower, now)
            if queues.has_aged(victim, now) and victim is not staying[-1]:
                return []  # later ones would go on before it
            lower.remove(victim)
            staying.remove(victim)
            victims.append(victim)
            room.remove(victim)
        if victims and not queues.has_aged(victims[-1], now):
            self._spare(victims, room)
        return victims

    def _spare(self, victims: list[SequenceGroup], room: _Room) -> None:
        """Drops those without which the others are enough; without the last one they are not."""
        for victim in victims[-2::-1]:
            others = [v for v in victims if v is not victim]
            room.restore(victim)
            if room.suffices(others):
                victims[:] = others
            else:
                room.remove(victim)


class _Room:
    """What a waiting group finds when running groups are gone, and those that stay have what they need in this step."""

    def __init__(self, options: SchedulerOptions, queues: Queues, admission: Admission, group: SequenceGroup) -> None:
        self._queues, self._admission, self._group = queues, admission, group
        self._match = admission.match(group)
        self._release = Release(queues.blocks.groups)
        #: By group id, blocks for the next tokens of those that decode before the waiting group is admitted.
        self._growth: dict[int, tuple[int, ...]] = {}
        if options.batching == "mixed":
            decoding = (g for g in queues.running if not g.prefilling)
            short = (g for g in decoding if len(g.seqs) > 1 or not g.seqs[0].free_slots)
            self._growth = {g.group_id: _growth(queues, g) for g in short}
        self._sum = [sum(counts) for counts in zip(*self._growth.values(), strict=True)]

    def remove(self, victim: SequenceGroup) -> None:
        """A running group is gone."""
        self._release.add(victim.seq_ids)
        self._add_growth(victim, -1)

    def restore(self, victim: SequenceGroup) -> None:
        """Takes ``remove`` back."""
        self._release.discard(victim.seq_ids)
        self._add_growth(victim, 1)

    def _add_growth(self, victim: SequenceGroup, sign: int) -> None:
        for number, count in enumerate(self._growth.get(victim.group_id, ())):
            self._sum[number] += sign * count

    def may_suffice(self, victims: list[SequenceGroup]) -> bool:
        """Whether the waiting group fits without these if they share no block: quick to say where most are too few."""
        kv_groups, seq_ids = self._queues.blocks.groups, [seq_id for v in victims for seq_id in v.seq_ids]
        return self._fits(victims, [sum(map(kv_group.num_held, seq_ids)) for kv_group in kv_groups])

    def suffices(self, victims: list[SequenceGroup]) -> bool:
        """Whether the waiting group fits; ``victims`` are gone."""
        return self._fits(victims, self._release.counts)

    def _fits(self, victims: list[SequenceGroup], released: list[int]) -> bool:
        blocks, prefilling = self._queues.blocks, [g for g in self._queues.prefilling if g not in victims]
        reserved = sum((blocks_still_needed(blocks, g) for g in prefilling), Demand(exact=tuple(self._sum)))
        available = Demand(exact=tuple(-count for count in released))
        return self._admission.fits_beside(
            self._group,
            self._admission.needed(self._group, self._match, self._release.references),
            reserved + available,
            self._queues.num_running_seqs - sum(v.num_seqs for v in victims),
        )


def _growth(queues: Queues, group: SequenceGroup) -> tuple[int, ...]:
    """Blocks that the next tokens of a decoding group need, by KV group."""
    writes = [
        (s.seq_id, s.num_computed, s.num_computed + s.num_uncomputed)
        for s in group.seqs
        if s.free_slots < s.num_uncomputed and not s.is_ending
    ]
    return tuple(kv_group.demand(writes)[0] if writes else 0 for kv_group in queues.blocks.groups)
