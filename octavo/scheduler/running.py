"""Schedules running groups, and preempts others to free blocks for them."""

from __future__ import annotations

import itertools

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Chunks, Step, allocate_slots, prompt_chunks, restore_sharing, schedule_prefill


class Running:
    """Schedules running groups. Decodes take their tokens of the budget first; blocks go in the policy's order.

    A group that needs a block preempts groups after it in order, which are not scheduled yet in this step. So nothing
    that was decided is taken back.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        queues: Queues,
        preemption: Preemption,
        num_stages: int = 1,
    ) -> None:
        self._num_stages = num_stages
        self._options, self._queues, self._preemption = options, queues, preemption

    def schedule_running(self, step: Step) -> list[SequenceGroup]:
        """Schedules the running groups; returns those that do not fit even with all blocks to themselves."""
        queues = self._queues
        chunks = self._split_budget(step)
        running, decodes = queues.running, step.decodes
        exceeding = []
        most_decodes = -(-queues.num_running_seqs // self._num_stages)
        # Decodes whose slots are allocated together, as there is a block for each of them, whatever it writes into.
        available = queues.blocks.num_available
        first, without_slots = self._begin_steady(available)
        decodes += queues.steady.columns.seqs
        together: Chunks = [(decodes[position], 1) for position in without_slots]
        # Those that are preempted are behind the one that is looked at, or it is the last.
        for position, group in enumerate(itertools.islice(running, first, None), first + 1):
            seqs = group.seqs
            seq = seqs[0]
            if group.prefilling:
                work = chunks.get(group.group_id)
                if work is None:
                    continue
            elif seq.num_computed < seq.slots_end and len(seqs) == 1:  # one more token in its last block
                decodes.append(seq)
                continue
            elif seq.is_ending or group.awaits_result or len(decodes) >= most_decodes:
                continue  # in the last case it is for the steps of the other stages
            else:
                work = self._decode(group, step)
                if work[0][1] == 1 and len(together) + len(work) <= available:
                    together += work
                    decodes += [s for s, _ in work]
                    continue
            self._allocate_together(together, step)
            if self._allocate_or_preempt(group, work, position, step):
                if group.prefilling:
                    schedule_prefill(queues, group, work, step)
                elif work[0][1] > 1:
                    step.extended += work
                else:
                    decodes += [s for s, _ in work]
            elif self._blocks_will_be_freed(step):
                step.blocked_on_memory = True
            elif len(running) == 1:
                exceeding.append(group)
            else:
                self._preemption.preempt(group, step)
            available = queues.blocks.num_available
        self._allocate_together(together, step)
        if first:
            self._schedule_steady(without_slots, step)
        return exceeding

    def _begin_steady(self, available: int) -> tuple[int, list[int]]:
        """How many groups, from the first on, go on as in the step before, and where those are that need a block.

        If fewer blocks are available, no group does: one may have to preempt others.
        """
        steady = self._queues.steady
        steady.extend(self._queues.running)
        without_slots = steady.without_slots()
        if len(without_slots) > available:
            steady.restart()
            return 0, []
        return steady.num_groups, without_slots

    def _schedule_steady(self, without_slots: list[int], step: Step) -> None:
        """Schedules the steady decodes, for which there are slots; finds those that fill a block in the step."""
        size = self._queues.blocks.block_size
        step.num_ended = self._queues.num_ended
        step.steady, last, step.ending = self._queues.steady.schedule(without_slots)
        for position in last:
            seq = step.steady.seqs[position]
            computed = seq.num_computed + 1
            if not computed % size:
                step.filled.append((seq, computed))

    def _decode(self, group: SequenceGroup, step: Step) -> Chunks:
        """The next token of each sequence of a group, and what a grammar has forced behind it."""
        if step.forced_budget:
            seq = group.seqs[0]
            forced = min(step.forced_budget, len(seq.token_ids) - seq.num_computed - 1)
            if forced > 0:
                forced = min(forced, self._queues.blocks.max_chunk - 1)
                step.forced_budget -= forced
                return [(seq, 1 + forced)]
        # Drafts make sequences of a group differ in length.
        return [(s, 1) for s in group.seqs if not s.is_ending]

    def _allocate_together(self, decodes: Chunks, step: Step) -> None:
        """Allocates the slots of these decodes, for which there are blocks, and empties the list."""
        if decodes:
            allocated = allocate_slots(self._queues, decodes, step)
            assert allocated, "a sequence takes no more than one block of each group for its next token"
            decodes.clear()

    def _split_budget(self, step: Step) -> dict[int, Chunks]:
        """Takes one token for each decode from the budget, and splits the rest among prefilling groups, in order.

        Returns the prompt chunks by group id.
        """
        queues = self._queues
        if not queues.prefilling:
            step.budget -= queues.num_running_seqs
            self._reserve_forced(step)
            return {}
        for group in list(queues.prefilling):
            restore_sharing(queues, group)
            if group.is_prefilled:  # nothing is left to compute: all is shared, or a sibling has ended
                queues.finish_prefill(group)
        step.budget -= queues.num_running_seqs - sum(g.num_seqs for g in queues.prefilling)
        self._reserve_forced(step)
        chunks = {}
        for group in queues.prefilling:
            if step.budget <= 0:
                break
            work = prompt_chunks(queues.blocks, group, step.budget, self._options)
            if not work:  # it has to be computed whole, and must not be overtaken
                step.budget = 0
                break
            chunks[group.group_id] = work
            step.budget -= sum(n for _, n in work)
        return chunks

    def _reserve_forced(self, step: Step) -> None:
        """Takes what is needed for tokens that grammars have forced from the budget, before prompts get the rest.

        What was preempted meanwhile computes its tokens as a prompt.
        """
        if not self._queues.unsent_tokens:
            return
        decoding = (s for s, _ in self._queues.unsent_tokens if s.status is SequenceStatus.RUNNING)
        forced = sum(len(s.token_ids) - s.num_computed - 1 for s in decoding if not s.group.prefilling)
        step.forced_budget = max(0, min(forced, step.budget))
        step.budget -= step.forced_budget

    def _allocate_or_preempt(self, group: SequenceGroup, work: Chunks, position: int, step: Step) -> bool:
        """Allocates slots, preempting groups from ``position`` on; False if the group itself must go or wait."""
        queues, victims = self._queues, None
        while not allocate_slots(queues, work, step):
            if position == len(queues.running) or self._blocks_will_be_freed(step):
                return False
            if victims is None:
                victims = self._preemption.victims(queues.running[position:], step.now)
            self._preemption.preempt(next(victims), step)
        return True

    def _blocks_will_be_freed(self, step: Step) -> bool:
        """Whether a step in flight ends, or may end, a group whose blocks are then free: waiting beats preempting.

        A group that awaits a result keeps its blocks until that is known. Where there is such a group none is
        preempted, so that one look at all of them is enough for a step.
        """
        running = self._queues.running
        if step.awaits_blocks is None:
            step.awaits_blocks = any(g.seqs[0].is_ending or g.awaits_result for g in running)
        return step.awaits_blocks or (len(running) == 1 and running[0].seqs[0].awaits_token)
