"""Earliest deadline first, over targets for the first token and for the tokens after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.core.config import SchedulerOptions
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies.policy import Policy, num_output_tokens

#: Weight of the newest interval between steps in their average.
_SMOOTHING = 0.1


@dataclass(slots=True)
class _Targets:
    """Seconds; infinity: none. ``due`` is on the clock of the arrival times."""

    tpot: float
    #: When the first token is due; without a target for it, when the token came.
    due: float


class EarliestDeadlineFirst(Policy):
    """By the time at which the next token is due: the first ``ttft_target`` after the arrival, each further one
    ``tpot_target`` later.

    Nothing is dropped. A group whose deadline has passed, or cannot be met even if its prompt is computed at once, goes
    behind all whose can still be met, as do those without a deadline; among these the earlier arrival goes first. Under
    overload this keeps the share of requests that meet their targets: plain earliest deadline first would serve those
    that are late already, and make the others late. A waiting group that has used up half of its target preempts
    running groups that are late or have no deadline.
    """

    dynamic = True
    uses_priority = False
    uses_targets = True
    uses_clock = True
    preemptive = True
    waiting_keys_grow = True

    def __init__(self, ttft_target: float | None, tpot_target: float | None, token_budget: int) -> None:
        """Targets of requests that bring none, in seconds."""
        self._ttft_target, self._tpot_target = ttft_target, tpot_target
        self._token_budget = token_budget
        self._now = -math.inf
        #: Whether the last step had something to compute.
        self._was_running = False
        self._seconds_per_step = 0.0

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the targets of requests that bring none."""
        return cls(options.ttft_target, options.tpot_target, options.token_budget)

    def key(self, group: SequenceGroup) -> tuple[bool, float]:
        """(whether the deadline is missed, the deadline), or (True, arrival)."""
        due = self._due(group)
        if due < math.inf and self._now + self._seconds_needed(group) <= due:
            return False, due
        return True, group.request.arrival_time

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it has used up half of its target, and the other has none to meet."""
        due = self._due(waiting)
        if self._now - waiting.request.arrival_time <= due - self._now or self.key(waiting)[0]:
            return False
        return self.key(running)[0]

    def on_arrival(self, group: SequenceGroup) -> None:
        """Takes its targets, or those of the options."""
        options, arrival = group.request.options, group.request.arrival_time
        ttft = _first(options.ttft_target, self._ttft_target)
        group.policy_data = _Targets(_first(options.tpot_target, self._tpot_target), arrival + ttft)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Takes the time, and how long steps take."""
        if self._was_running:
            self._seconds_per_step += _SMOOTHING * (now - self._now - self._seconds_per_step)
        self._now, self._was_running = now, bool(running)
        for group in running:
            targets: _Targets = group.policy_data
            if targets.due == math.inf and num_output_tokens(group):
                targets.due = now

    def _due(self, group: SequenceGroup) -> float:
        """When its next token is due."""
        targets: _Targets = group.policy_data
        generated = num_output_tokens(group)
        return targets.due + generated * targets.tpot if generated else targets.due

    def _seconds_needed(self, group: SequenceGroup) -> float:
        """Until its next token, if it is scheduled at once; running groups that decode are in every step."""
        if not group.prefilling:
            return 0.0
        uncomputed = sum([len(s.token_ids) - s.num_computed for s in group.seqs])
        return math.ceil(uncomputed / self._token_budget) * self._seconds_per_step


def _first(*targets: float | None) -> float:
    return next((t for t in targets if t is not None), math.inf)
