"""Draft tokens of decoding sequences: how many fit a step, and what became of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from octavo.core.plan import StepResult
from octavo.core.progress import DraftStats
from octavo.core.stats import SchedulerStats
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.queues import Queues
from octavo.scheduler.step import Step
from octavo.speculation.drafter import BY_WORKER
from octavo.speculation.speculator import Speculator
from octavo.speculation.waiting import Waiting


class Drafting:
    """Adds drafts to a step when all else is scheduled: they take what is left of the budget and of the blocks.

    So nothing waits for blocks that drafts hold, and nobody is preempted for them.
    """

    def __init__(self, queues: Queues, speculator: Speculator, stats: SchedulerStats, *, runs_ahead: bool) -> None:
        """``runs_ahead``: whether steps are planned while others are in flight, where drafts bring little."""
        self._queues, self._speculator, self._stats = queues, speculator, stats
        self._waiting = Waiting() if runs_ahead and speculator.adaptive else None
        #: Groups that may have drafts, when it was last asked whether steps wait for results.
        self._num_groups = 0

    def may_draft(self, in_flight: Mapping[int, Step]) -> bool:
        """Whether the next step may have drafts: the results of those before it are known, and steps wait for them."""
        return not in_flight and self._waits()

    def awaits_results(self, in_flight: Mapping[int, Step]) -> bool:
        """Whether the next step is to have drafts, or one in flight has: both depend on how many tokens are accepted.

        A group that alone waited would be in every other step only, so all wait, or none.
        """
        if any(step.drafted for step in in_flight.values()):
            return True
        return self._queues.num_drafted_groups > 0 and self._waits()

    def _waits(self) -> bool:
        if self._waiting is None:
            return True
        num_groups, self._num_groups = self._num_groups, self._queues.num_drafted_groups
        if self._num_groups > num_groups:
            self._waiting.begin()
        return self._waiting.waits

    def reserve(self, budget: int) -> int:
        """Tokens of a step's budget that chunks of prompts leave to drafts, which are an eighth of it at most."""
        queues = self._queues
        if not queues.num_drafted_groups or not (queues.prefilling or queues.num_waiting):
            return 0
        return min(budget // 8, self._speculator.expected)

    def add_drafts(self, step: Step) -> None:
        """Gives decodes of the step draft tokens behind theirs."""
        step.may_draft = True
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
            # Behind the last known token: forced ones may come before it that are still to be computed.
            may = most > 0 and seq.group.drafts and seq.num_computed + 1 == len(seq.token_ids)
            if may and (tokens := propose(seq, most)):
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
            (s.seq_id, s.num_computed, s.num_computed + 1 + len(t))
            for s, t in step.drafted
            if s.slots_end < s.num_computed + 1 + len(t)
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
            seq.slots_end = 0  # until it is known how many are accepted

    def observe(self, step: Step, result: StepResult) -> list[DraftStats]:
        """Tells the drafter of a step's result; the totals of each group that had drafts."""
        groups: dict[int, SequenceGroup] = {}
        if not (step.drafted or self._queues.num_drafted_groups):
            return []
        num_drafts, num_accepted = self._observe_drafts(step, result, groups) if step.drafted else (0, 0)
        if result.draft_seconds:
            drafts = result.num_drafts.values()
            caught_up, seconds = result.draft_catch_up_tokens, result.draft_catch_up_seconds
            passing = result.draft_seconds - seconds
            self._speculator.observe_drafting(len(drafts), max(drafts, default=0), passing, caught_up, seconds)
        num_seqs = len(step.decodes) + len(step.drafted)
        seconds = result.seconds - result.swap_seconds - result.draft_seconds
        if step.prefills:
            self._speculator.observe_prompts(step.num_prompt_tokens + num_seqs + num_drafts, seconds)
        elif num_seqs:
            self._speculator.observe_step(num_seqs, len(step.drafted), num_drafts, seconds)
            if self._waiting is not None:
                idle = result.idle_seconds / max(seconds, 1e-9)
                self._waiting.observe(step.may_draft, num_accepted / num_seqs, idle)
        return [DraftStats(g.group_id, g.num_draft_tokens, g.num_accepted_tokens) for g in groups.values()]

    def _observe_drafts(self, step: Step, result: StepResult, groups: dict[int, SequenceGroup]) -> tuple[int, int]:
        """How many draft tokens were computed and accepted; adds the groups that had them to ``groups``."""
        sequences = self._queues.sequences
        counts = dict(zip(result.seq_ids, result.num_tokens or itertools.repeat(1), strict=False))
        drafts, num_drafts, num_accepted = [], 0, 0
        for seq, tokens in step.drafted:
            seq_id = seq.seq_id
            drafted = len(tokens) if tokens[0] != BY_WORKER else result.num_drafts.get(seq_id, 0)
            num_drafts += drafted
            if seq_id not in sequences:
                continue
            if not drafted:
                if result.draft_error is not None:
                    self._speculator.fail(seq, result.draft_error)
                continue
            group, accepted = seq.group, counts[seq_id] - 1
            group.num_draft_tokens += drafted
            group.num_accepted_tokens += accepted
            groups[group.group_id] = group
            num_accepted += accepted
            drafts.append((seq_id, drafted, accepted))
        self._stats.decode_tokens += num_accepted
        self._speculator.observe(drafts)
        return num_drafts, num_accepted
