"""Draft tokens of decoding sequences: how many fit a step, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.engine_outputs import DraftStats
from octavo.core.plan import StepResult
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step
from octavo.speculation.speculator import Speculator


class Drafting:
    """Adds drafts to a step when all else is scheduled: they take what is left of the budget and of the blocks.

    So nothing waits for blocks that drafts hold, and nobody is preempted for them.
    """

    def __init__(self, queues: Queues, speculator: Speculator, stats: SchedulerStats) -> None:
        self._queues, self._speculator, self._stats = queues, speculator, stats

    def awaits_result(self, in_flight: Mapping[int, Step]) -> bool:
        """Whether the next step may have drafts, or one in flight has: both depend on how many tokens are accepted."""
        return self._queues.num_drafted_groups > 0 or any(step.drafted for step in in_flight.values())

    def add_drafts(self, step: Step) -> None:
        """Gives decodes of the step draft tokens behind theirs."""
        if not self._queues.num_drafted_groups or step.blocked_on_memory or step.budget <= 0 or not step.decodes:
            return
        # Workers have as many rows of logits as the budget has tokens: drafts take one each, and so do forked children.
        room = step.budget - len(step.forked_children)
        left = min(room, self._speculator.begin_step(len(step.decodes), step.num_prompt_tokens))
        if left <= 0:
            return
        decodes, drafted, propose = [], [], self._speculator.propose
        for position, seq in enumerate(step.decodes):
            if left <= 0:
                decodes += step.decodes[position:]
                break
            # The token behind the last draft is sampled too, and the last one that the limit allows is not computed.
            most = seq.max_length - 2 - seq.num_computed
            if most > left:
                most = left
            if most > 0 and seq.group.drafts and (tokens := propose(seq, most)):
                drafted.append((seq, tokens))
                left -= len(tokens)
            else:
                decodes.append(seq)
        if drafted:
            step.decodes, step.drafted = decodes, drafted
            self._add_slots(step)

    def _add_slots(self, step: Step) -> None:
        """Allocates slots behind those that drafted sequences have in this step. Nothing is preempted for them.

        Sequences for which no blocks are left decode without drafts.
        """
        blocks = self._queues.blocks
        short = [
            (s.seq_id, s.num_computed, s.num_computed + 1 + len(t)) for s, t in step.drafted if s.free_slots < len(t)
        ]
        lacking = set()
        if short:
            changes = blocks.grow(short)
            if changes is None:
                changes = []
                for write in short:
                    one = blocks.grow([write])
                    if one is None:
                        lacking.add(write[0])
                    else:
                        changes += one
            step.table_changes += changes
        if lacking:
            step.decodes += [seq for seq, _ in step.drafted if seq.seq_id in lacking]
            step.drafted = [(seq, tokens) for seq, tokens in step.drafted if seq.seq_id not in lacking]
        for seq, _ in step.drafted:
            seq.free_slots = 0  # until it is known how many are accepted

    def observe(self, step: Step, result: StepResult) -> list[DraftStats]:
        """Tells the drafter of a step's result; the totals of each group that had drafts."""
        groups: dict[int, SequenceGroup] = {}
        if not (step.drafted or self._queues.num_drafted_groups):
            return []
        if step.drafted:
            sequences, counts = self._queues.sequences, dict(zip(result.seq_ids, result.num_tokens, strict=True))
            drafts = [(s.seq_id, len(t), counts[s.seq_id] - 1) for s, t in step.drafted if s.seq_id in sequences]
            for seq_id, drafted, accepted in drafts:
                group = sequences[seq_id].group
                group.num_draft_tokens += drafted
                group.num_accepted_tokens += accepted
                groups[group.group_id] = group
            self._stats.decode_tokens += sum(accepted for _, _, accepted in drafts)
            self._speculator.observe(drafts)
        num_seqs = len(step.decodes) + len(step.drafted)
        if num_seqs and not step.prefills:
            num_drafts = sum(len(tokens) for _, tokens in step.drafted)
            seconds = result.seconds - result.swap_seconds
            self._speculator.observe_step(num_seqs, len(step.drafted), num_drafts, seconds)
        return [DraftStats(g.group_id, g.num_draft_tokens, g.num_accepted_tokens) for g in groups.values()]
