"""Draft tokens of decoding sequences: how many fit a step, and what became of them."""

from __future__ import annotations

import itertools

from octavo.core.engine_outputs import DraftStats
from octavo.core.plan import StepResult
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import Sequence, SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step
from octavo.speculation.drafter import BY_WORKER
from octavo.speculation.speculator import Speculator


class Drafting:
    """Adds drafts to a step when all else is scheduled: they take what is left of the budget and of the blocks.

    So nothing waits for blocks that drafts hold, and nobody is preempted for them.
    """

    def __init__(self, queues: Queues, speculator: Speculator, stats: SchedulerStats) -> None:
        self._queues, self._speculator, self._stats = queues, speculator, stats

    def add_drafts(self, step: Step) -> None:
        """Gives decodes of the step draft tokens behind theirs."""
        if step.blocked_on_memory or step.budget <= 0 or not step.decodes:
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
            # Behind the last known token: forced ones may come before it that are still to be computed.
            may = most > 0 and seq.group.drafts and seq.num_computed + 1 == len(seq.token_ids)
            tokens = propose(seq, most) if may else []
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
        num_drafts = 0
        if step.drafted:
            counts = dict(zip(result.seq_ids, result.num_tokens or itertools.repeat(1), strict=False))
            for seq, tokens in step.drafted:
                drafted = len(tokens) if tokens[0] != BY_WORKER else result.num_drafts.get(seq.seq_id, 0)
                num_drafts += drafted
                if seq.seq_id in self._queues.sequences:
                    group, accepted = seq.group, counts[seq.seq_id] - 1
                    if not drafted:
                        if result.draft_error is not None:
                            self._speculator.fail(seq, result.draft_error)
                        continue
                    group.num_draft_tokens += drafted
                    group.num_accepted_tokens += accepted
                    self._stats.decode_tokens += accepted
                    groups[group.group_id] = group
                    self._speculator.observe(seq, drafted, accepted)
        if result.draft_seconds:
            drafts = result.num_drafts.values()
            caught_up, seconds = result.draft_catch_up_tokens, result.draft_catch_up_seconds
            passing = result.draft_seconds - seconds
            self._speculator.observe_drafting(len(drafts), max(drafts, default=0), passing, caught_up, seconds)
        num_seqs = len(step.decodes) + len(step.drafted)
        if num_seqs and not step.prefills:
            seconds = result.seconds - result.swap_seconds - result.draft_seconds
            self._speculator.observe_step(num_seqs, len(step.drafted), num_drafts, seconds)
        return [DraftStats(g.group_id, g.num_draft_tokens, g.num_accepted_tokens) for g in groups.values()]
