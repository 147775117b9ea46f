"""Who goes on: the running groups of a step, and who has to make way for them."""

from __future__ import annotations

from typing import Protocol

from octavo.core.config import SchedulerOptions
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Chunks, Step, grow, prompt_chunks, rejoin, take_prefill


class Drafter(Protocol):
    """Guesses what a sequence goes on with; see ``StepPlan.drafts``."""

    def propose(self, sequence: Sequence) -> list[int]:
        """Tokens that may follow ``sequence.token_ids``, all of which are known; perhaps none."""
        ...


class Running:
    """Schedules running groups. Decodes have their tokens first; blocks go in the policy's order.

    Whoever asks for a block gets it from those after it in order, who have been given nothing yet in this step. So
    nothing that was decided is ever taken back.
    """

    def __init__(
        self, options: SchedulerOptions, queues: Queues, preemption: Preemption, drafter: Drafter | None = None
    ) -> None:
        self._options, self._queues, self._preemption = options, queues, preemption
        self.drafter = drafter

    def schedule(self, step: Step) -> list[SequenceGroup]:
        """Schedules all that run; returns groups that can not go on even alone in all the blocks."""
        queues = self._queues
        chunks = self._split_budget(step)
        running, decodes = queues.running, step.decodes
        drafts = self._propose(step) if self.drafter is not None else {}
        cannot_fit = []
        position = 0
        while position < len(running):
            group = running[position]
            position += 1
            seqs = group.seqs
            seq = seqs[0]
            if group.prefilling:
                work = chunks.get(group.group_id)
                if work is None:
                    continue
            elif seq.room and len(seqs) == 1 and not drafts:  # most often: one more token inside its last block
                seq.room -= 1
                decodes.append(seq)
                continue
            elif seq.is_ending or group.awaits_result or (drafts and self._draft(group, drafts, step)):
                continue
            else:
                work = [(s, 1) for s in seqs]
            if self._make_way(group, work, position, step):
                if group.prefilling:
                    take_prefill(queues, group, work, step)
                else:
                    decodes += seqs
            elif self._blocks_may_come():
                step.blocked_on_memory = True
            elif len(running) == 1:
                cannot_fit.append(group)
            else:
                self._preemption.preempt(group, step)
                position -= 1
        return cannot_fit

    def _propose(self, step: Step) -> dict[int, list[int]]:
        """Drafts by sequence id, no longer than a sequence may become, and within the budget that is left."""
        assert self.drafter is not None
        open_ = [
            seq
            for group in self._queues.running
            if not (group.prefilling or group.awaits_result or group.beam is not None)
            for seq in group.seqs
            if not seq.is_ending
        ]
        drafts = {}
        for seq in open_:
            guesses = self.drafter.propose(seq)[: min(seq.max_length - 2 - seq.num_computed, max(step.budget, 0))]
            if guesses:
                drafts[seq.seq_id] = guesses
                step.budget -= len(guesses)
        return drafts

    def _draft(self, group: SequenceGroup, drafts: dict[int, list[int]], step: Step) -> bool:
        """Schedules a group with its drafts if blocks for them are free; nobody is preempted for a guess."""
        work = [(seq, drafts.get(seq.seq_id, [])) for seq in group.seqs]
        if not any(guesses for _, guesses in work):
            return False
        if not grow(self._queues, [(seq, 1 + len(guesses)) for seq, guesses in work], step):
            return False
        step.drafted += work
        return True

    def _split_budget(self, step: Step) -> dict[int, Chunks]:
        """Takes the decodes' tokens from the budget, and shares out the rest to those who prefill, in order."""
        queues = self._queues
        if not queues.prefilling:
            step.budget -= queues.rows
            return {}
        for group in list(queues.prefilling):
            rejoin(queues, group)
            if group.is_prefilled:  # nothing was left for a step to compute: all was shared, or a sibling has ended
                queues.prefilled(group)
        step.budget -= queues.rows - sum(g.width for g in queues.prefilling)
        chunks = {}
        for group in queues.prefilling:
            if step.budget <= 0:
                break
            work = prompt_chunks(group, step.budget, self._options)
            if not work:  # it is to be computed whole, and must not be overtaken
                step.budget = 0
                break
            chunks[group.group_id] = work
            step.budget -= sum(n for _, n in work)
        return chunks

    def _make_way(self, group: SequenceGroup, work: Chunks, position: int, step: Step) -> bool:
        """Finds the blocks, preempting groups from ``position`` on; False if the group itself must go, or wait."""
        queues = self._queues
        while not grow(queues, work, step):
            if position == len(queues.running) or self._blocks_may_come():
                return False
            self._preemption.preempt(self._preemption.victim(queues.running[position:], step.now), step)
        return True

    def _blocks_may_come(self) -> bool:
        """Whether a step in flight ends a group whose blocks are worth waiting for, or may end the only one.

        A group that awaits a result keeps its blocks until that is known.
        """
        running = self._queues.running
        alone = len(running) == 1 and running[0].seqs[0].awaits_token
        return alone or any(g.seqs[0].is_ending or g.awaits_result for g in running)
