"""Skip-join multi-level feedback queues."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.core.config import SchedulerOptions
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT
from octavo.scheduler.policies.policy import Policy

#: Service that a group receives in the first queue before it is demoted; each further queue gives twice as much.
_QUANTUM = 64.0
_LEVELS = 12
_QUANTA = [_QUANTUM * 2**level for level in range(_LEVELS)]


@dataclass(slots=True)
class _Place:
    level: int
    #: Service in all at which it is demoted.
    limit: float
    #: Seconds on the clock of the arrival times.
    entered: float
    #: Number of the step before which it was queued last.
    queued: int


class MultiLevelFeedback(Policy):
    """By queue, and within one by the time of entering it: short work goes first without knowing what is short.

    Skip-join multi-level feedback queues (Wu et al. 2023, "Fast distributed inference serving for large language
    models", section 4.1): a group joins the first queue whose quantum its prompt does not exceed, and is demoted when
    the service that it has received (``PROMPT_WEIGHT`` and ``OUTPUT_WEIGHT`` for each token) exceeds the quantum. A
    waiting group preempts running ones of later queues, but only when it has waited for as many steps as it may
    generate tokens in its own: until then a slot is likely to become free, and nothing need be computed again.
    Promotion is by ageing: ``aging_limit`` / 12 seconds of waiting count as much as one queue.
    """

    dynamic = True
    uses_priority = False
    preemptive = True

    def __init__(self, aging_limit: float | None) -> None:
        """``aging_limit`` in seconds; None: no promotion."""
        self._seconds_per_level = None if aging_limit is None else aging_limit / _LEVELS
        self._steps = 0

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """With the ageing limit."""
        return cls(options.aging_limit)

    def key(self, group: SequenceGroup) -> tuple[float, float]:
        """Its queue and when it entered it; with promotion, as if it had entered the first queue so much later.

        All that wait age alike, so this order changes with service alone.
        """
        place: _Place = group.policy_data
        if self._seconds_per_level is None:
            return place.level, place.entered
        return place.entered + place.level * self._seconds_per_level, 0.0

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """If it is in an earlier queue and has waited for as long as it may run there."""
        place: _Place = waiting.policy_data
        earlier: bool = place.level < running.policy_data.level
        return earlier and OUTPUT_WEIGHT * (self._steps - place.queued) >= _QUANTA[place.level]

    def on_arrival(self, group: SequenceGroup) -> None:
        """Joins the first queue whose quantum its prompt does not exceed."""
        cost = PROMPT_WEIGHT * len(group.request.prompt_token_ids)
        level = min(bisect.bisect_left(_QUANTA, cost), _LEVELS - 1)
        group.policy_data = _Place(level, max(cost, _QUANTA[level]), group.request.arrival_time, self._steps)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Waits from now on."""
        group.policy_data.queued = self._steps

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Demotes the groups that have received what their queue gives."""
        self._steps += 1
        for group in running:
            place: _Place = group.policy_data
            prompt = len(group.request.prompt_token_ids)
            generated = (len(group.seqs[0].token_ids) - prompt) * group.num_seqs
            if PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * generated > place.limit and place.level < _LEVELS - 1:
                place.level += 1
                place.limit += _QUANTA[place.level]
                place.entered = now
