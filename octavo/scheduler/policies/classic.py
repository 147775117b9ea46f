"""Policies that need no state: by arrival, priority, declared length or tokens held."""

from __future__ import annotations

from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies.policy import Policy


class FirstComeFirstServed(Policy):
    """By arrival."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """The time of the arrival."""
        return group.arrival


class StaticPriority(Policy):
    """By the request's own ``priority``."""

    def key(self, group: SequenceGroup) -> float:
        """The priority; lower goes first."""
        return group.priority


class ShortestJobFirst(Policy):
    """By ``max_tokens``, or what the context length leaves."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        """Most tokens that one of its sequences may generate."""
        return group.max_length - len(group.request.prompt_token_ids)


class LongestDataFirst(Policy):
    """By tokens of prompt and output, most first: finishing such a group frees most, recomputing it costs most."""

    dynamic = True
    uses_priority = False

    def key(self, group: SequenceGroup) -> int:
        """Minus its tokens, computed or not."""
        return -group.num_tokens


class LastComeFirstServed(Policy):
    """By arrival, the latest first."""

    uses_priority = False

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """Minus the time of the arrival."""
        seconds, number = group.arrival
        return -seconds, -number
