"""Draft tokens of decoding sequences: how many fit a step, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.engine_outputs import DraftStats
from octavo.core.plan import StepResult
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import Sequence, SequenceGroup
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
        decodes, propose = [], self._speculator.propose
        for seq in step.decodes:
            # The token behind the last draft is sampled too, and the last one that the limit allows is not computed.
            most = min(left, seq.max_length - 2 - seq.num_computed)
            tokens = propose(seq, most) if most > 0 and seq.group.drafts else []
            if tokens and self._add_slots(seq, len(tokens), step):
                step.drafted.append((seq, tokens))
                left -= len(tokens)
            else:
                decodes.append(seq)
        step.decodes = decodes

    def _add_slots(self, seq: Sequence, count: int, step: Step) -> bool:
        """Allocates slots behind the one that the sequence has in this step; nothing is preempted for them."""
        if seq.free_slots < count:
            start = seq.num_computed
            changes = self._queues.blocks.grow([(seq.seq_id, start, start + 1 + count)])
            if changes is None:
                return False
            step.table_changes += changes
        seq.free_slots = 0  # until it is known how many are accepted
        return True

    def observe(self, step: Step, result: StepResult) -> list[DraftStats]:
        """Tells the drafter of a step's result; the totals of each group that had drafts."""
        groups: dict[int, SequenceGroup] = {}
        if not (step.drafted or self._queues.num_drafted_groups):
            return []
        if step.drafted:
            counts = dict(zip(result.seq_ids, result.num_tokens, strict=True))
            for seq, tokens in step.drafted:
                if seq.seq_id in self._queues.sequences:
                    group, accepted = seq.group, counts[seq.seq_id] - 1
                    group.num_draft_tokens += len(tokens)
                    group.num_accepted_tokens += accepted
                    self._stats.decode_tokens += accepted
                    groups[group.group_id] = group
                    self._speculator.observe(seq, len(tokens), accepted)
        num_seqs = len(step.decodes) + len(step.drafted)
        if num_seqs and not step.prefills:
            num_drafts = sum(len(tokens) for _, tokens in step.drafted)
            seconds = result.seconds - result.swap_seconds
            self._speculator.observe_step(num_seqs, len(step.drafted), num_drafts, seconds)
        return [DraftStats(g.group_id, g.num_draft_tokens, g.num_accepted_tokens) for g in groups.values()]
