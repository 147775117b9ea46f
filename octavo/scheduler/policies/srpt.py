"""Shortest remaining processing time first, with predicted lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.length_predictor import Features, LengthPredictor, features_of
from octavo.scheduler.policies.policy import Policy, num_output_tokens

#: How many times the remaining steps of a waiting group must fit into those until the next slot is free.
_CLEAR_GAIN = 2.0


@dataclass(slots=True)
class _Estimate:
    features: Features
    log_length: float
    #: Tokens of the prompt.
    prompt: int
    #: Most tokens that a sequence may generate.
    limit: int
    #: Expected tokens in all, and the number of generated ones at which this is estimated again.
    total: float = 0.0
    valid_until: float = 0.0
    #: Steps that all its sequences still need: the sort key.
    remaining: float = 0.0


class ShortestRemaining(Policy):
    """By the expected remaining steps, of all sequences: tokens to generate, and prompt tokens by the token budget.

    The expectation is conditional on what a group has generated, so the order changes while it runs (Schrage and Miller
    1966; with expectations: SERPT, Scully et al. 2020, "Simple near-optimal scheduling for the M/G/1"). A waiting group
    preempts a running one only if it would end before the first of the running groups does, with ``_CLEAR_GAIN`` to
    spare and including the steps in which the other computes its tokens again: with many slots one becomes free soon.
    And it preempts none that was preempted before: more than once gains nothing on average and costs the longest most.
    """

    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, token_budget: int) -> None:
        self.predictor = LengthPredictor()
        self._token_budget = token_budget
        #: Steps until the first of the running groups is expected to end.
        self._next_end = math.inf

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the token budget of the steps."""
        return cls(options.token_budget)

    def key(self, group: SequenceGroup) -> float:
        """Remaining steps; of a waiting group as they were estimated when it was queued."""
        remaining: float = group.policy_data.remaining
        return remaining

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it would end long before the next slot is free, and the other needs more than that."""
        enough: float = _CLEAR_GAIN * waiting.policy_data.remaining
        if self._next_end <= enough or running.totals.num_recomputes or running.totals.num_swaps:
            return False
        enough += 2 * running.num_computed / self._token_budget
        return self._next_end > enough and running.policy_data.remaining > enough

    def on_arrival(self, group: SequenceGroup) -> None:
        """Predicts its length."""
        features = features_of(group.request)
        prompt = len(group.request.prompt_token_ids)
        limit = group.max_length - prompt if group.samples else 0
        group.policy_data = _Estimate(features, self.predictor.log_length(features), prompt, limit)
        self._estimate(group)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Estimates it again: what it has to compute again counts."""
        self._estimate(group)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Counts down what running groups have generated."""
        next_end = math.inf
        for group in running:
            estimate: _Estimate = group.policy_data
            generated = len(group.seqs[0].token_ids) - estimate.prompt
            if generated >= estimate.valid_until or group.prefilling:
                self._estimate(group)
            else:
                estimate.remaining = (estimate.total - generated) * group.num_seqs
            if estimate.remaining < next_end:
                next_end = estimate.remaining
        self._next_end = next_end

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Learns from sequences that have come to their own end; beams end together and early."""
        group, generated = seq.group, len(seq.token_ids) - seq.num_prompt_tokens
        natural = status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
        if natural and generated > 0 and group.beam is None:
            self.predictor.learn(group.policy_data.features, generated)

    def _estimate(self, group: SequenceGroup) -> None:
        estimate: _Estimate = group.policy_data
        generated = num_output_tokens(group)
        total, estimate.valid_until = self.predictor.expected(estimate.log_length, generated)
        estimate.total = min(total, estimate.limit) if group.beam is None else estimate.limit
        uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs]) if group.prefilling else 0
        estimate.remaining = (estimate.total - generated) * group.num_seqs + uncomputed / self._token_budget
