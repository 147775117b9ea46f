"""Displacement: running groups are preempted for a waiting one that the policy puts before them."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.memory.kv_group import BlocksNeeded
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
        staying, candidates = list(queues.running), self._preemption.victims(lower, now)
        victims: list[SequenceGroup] = []
        while not room.suffices():
            victim = next(candidates, None)
            if victim is None or (queues.has_aged(victim, now) and victim is not staying[-1]):
                return []  # all are too few, or later ones would go on before it
            staying.remove(victim)
            victims.append(victim)
            room.remove(victim)
        if victims and not queues.has_aged(victims[-1], now):
            # Those without which the others are enough are spared; without the last one they are not.
            for victim in victims[-2::-1]:
                room.restore(victim)
                if room.suffices():
                    victims.remove(victim)
                else:
                    room.remove(victim)
        return victims


class _Room:
    """What a waiting group finds when running groups are gone, and those that stay have what they need in this step."""

    def __init__(self, options: SchedulerOptions, queues: Queues, admission: Admission, group: SequenceGroup) -> None:
        self._blocks, self._admission, self._group = queues.blocks, admission, group
        self._match = admission.match(group)
        self._release = Release(queues.blocks.groups)
        self._num_seqs = queues.num_running_seqs
        #: By group id, of those that stay: what their prompts still need.
        self._prompts = {g.group_id: blocks_still_needed(queues.blocks, g) for g in queues.prefilling}
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
        self._prompts.pop(victim.group_id, None)
        self._count(victim, -1)

    def restore(self, victim: SequenceGroup) -> None:
        """Takes ``remove`` back."""
        self._release.discard(victim.seq_ids)
        if victim.prefilling:
            self._prompts[victim.group_id] = blocks_still_needed(self._blocks, victim)
        self._count(victim, 1)

    def _count(self, victim: SequenceGroup, sign: int) -> None:
        self._num_seqs += sign * victim.num_seqs
        for number, count in enumerate(self._growth.get(victim.group_id, ())):
            self._sum[number] += sign * count

    def may_suffice(self, victims: list[SequenceGroup]) -> bool:
        """Whether the waiting group fits without these if they share no block: quick to say where most are too few."""
        seq_ids, group_ids = [seq_id for v in victims for seq_id in v.seq_ids], {v.group_id for v in victims}
        prompts = [needed for group_id, needed in self._prompts.items() if group_id not in group_ids]
        held = [sum(map(kv_group.num_held, seq_ids)) for kv_group in self._blocks.groups]
        return self._fits(prompts, held, self._num_seqs - sum(v.num_seqs for v in victims))

    def suffices(self) -> bool:
        """Whether the waiting group fits now that some are gone."""
        return self._fits(self._prompts.values(), self._release.counts, self._num_seqs)

    def _fits(self, prompts: Iterable[BlocksNeeded], released: list[int], num_seqs: int) -> bool:
        needed = self._admission.needed(self._group, self._match, self._release.references)
        available = BlocksNeeded(exact=tuple(-count for count in released))
        reserved = sum(prompts, BlocksNeeded(exact=tuple(self._sum))) + available
        return self._admission.fits_beside(self._group, needed, reserved, num_seqs)


def _growth(queues: Queues, group: SequenceGroup) -> tuple[int, ...]:
    """Blocks that the next tokens of a decoding group need, by KV group."""
    writes = [
        (s.seq_id, s.num_computed, s.num_computed + s.num_uncomputed)
        for s in group.seqs
        if s.free_slots < s.num_uncomputed and not s.is_ending
    ]
    return tuple(kv_group.demand(writes)[0] if writes else 0 for kv_group in queues.blocks.groups)
