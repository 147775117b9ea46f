"""Who goes on: the running groups of a step, and who has to make way for them."""

from __future__ import annotations

from octavo.scheduler.chunks import prompt_chunks, rejoin
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.options import SchedulerOptions
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Chunks, Step, grow, take_prefill


class Running:
    """Schedules running groups. Decodes have their tokens first; blocks go in the policy's order.

    Whoever asks for a block gets it from those after it in order, who have been given nothing yet in this step. So
    nothing that was decided is ever taken back.
    """

    def __init__(self, options: SchedulerOptions, queues: Queues, preemption: Preemption) -> None:
        self._options, self._queues, self._preemption = options, queues, preemption

    def schedule(self, step: Step) -> list[SequenceGroup]:
        """Schedules all that run; returns groups that can not go on even alone in all the blocks."""
        queues = self._queues
        chunks = self._split_budget(step)
        running, decodes = queues.running, step.decodes
        hopeless = []
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
            elif seq.room and len(seqs) == 1:  # by far the most frequent: one more token inside its last block
                seq.room -= 1
                decodes.append(seq)
                continue
            elif seq.is_ending:
                continue
            else:
                work = [(s, 1) for s in seqs]
            if self._make_way(group, work, position, step):
                if group.prefilling:
                    take_prefill(queues, group, work, step)
                else:
                    decodes += seqs
            elif self._blocks_may_come():
                step.crowded = True
            elif len(running) == 1:
                hopeless.append(group)
            else:
                self._preemption.put_out(group, step)
                position -= 1
        return hopeless

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
            self._preemption.put_out(self._preemption.victim(queues.running[position:], step.now), step)
        return True

    def _blocks_may_come(self) -> bool:
        """Whether the step in flight ends somebody whose blocks are worth waiting for, or may end who is alone."""
        running = self._queues.running
        return any(g.seqs[0].is_ending for g in running) or (len(running) == 1 and running[0].seqs[0].awaits_token)
