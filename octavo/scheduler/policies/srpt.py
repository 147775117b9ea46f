"""Shortest remaining processing time first, with predicted lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.length_predictor import Features, LengthPredictor, Ranking, features_of
from octavo.scheduler.policies.base import Policy, num_output_tokens

#: A running group is preempted only for one whose remaining work is this many times smaller, the cost included.
_CLEAR_GAIN = 2.0


@dataclass(slots=True)
class _Estimate:
    features: Features
    log_length: float
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
    preempts a running one for a clear gain only: the latter's remaining work is ``_CLEAR_GAIN`` times that of the
    former, beyond the steps that computing its tokens again takes.
    """

    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, token_budget: int) -> None:
        self.predictor = LengthPredictor()
        self._token_budget = token_budget

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the token budget of the steps."""
        return cls(options.token_budget)

    def key(self, group: SequenceGroup) -> float:
        """Remaining steps; of a waiting group as they were estimated when it was queued."""
        remaining: float = group.policy_data.remaining
        return remaining

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """For a clear gain beyond the cost."""
        cost = running.num_computed / self._token_budget
        gain: bool = running.policy_data.remaining > _CLEAR_GAIN * waiting.policy_data.remaining + 2 * cost
        return gain

    def on_arrival(self, group: SequenceGroup) -> None:
        """Predicts its length."""
        features = features_of(group.request)
        limit = group.max_length - len(group.request.prompt_token_ids) if group.samples else 0
        group.policy_data = _Estimate(features, self.predictor.log_length(features), limit)
        self._estimate(group)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Estimates it again: what it has to compute again counts."""
        self._estimate(group)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Counts down what running groups have generated."""
        for group in running:
            estimate = group.policy_data
            generated = num_output_tokens(group)
            if generated >= estimate.valid_until or group.prefilling:
                self._estimate(group)
            else:
                estimate.remaining = (estimate.total - generated) * group.num_seqs

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Learns from sequences that have come to their own end; beams end together and early."""
        group, generated = seq.group, len(seq.token_ids) - seq.num_prompt_tokens
        natural = status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)
        if natural and generated > 0 and group.beam is None:
            self.predictor.learn(group.policy_data.features, generated)

    def ranking(self) -> Ranking:
        """How well the latest finished requests had been ranked when they arrived."""
        return self.predictor.ranking()

    def _estimate(self, group: SequenceGroup) -> None:
        estimate: _Estimate = group.policy_data
        generated = num_output_tokens(group)
        total, estimate.valid_until = self.predictor.expected(estimate.log_length, generated)
        estimate.total = min(total, estimate.limit) if group.beam is None else estimate.limit
        uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs]) if group.prefilling else 0
        estimate.remaining = (estimate.total - generated) * group.num_seqs + uncomputed / self._token_budget
