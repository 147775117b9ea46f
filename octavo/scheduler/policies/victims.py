"""Which of the running groups is preempted (``preemption_victim``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.scheduler.groups import SequenceGroup

#: Chooses which of these running groups to preempt; they are in the policy's order and never empty.
VictimChoice = Callable[[Sequence[SequenceGroup]], SequenceGroup]


def _last(groups: Sequence[SequenceGroup]) -> SequenceGroup:
    return groups[-1]


def _least_computed(groups: Sequence[SequenceGroup]) -> SequenceGroup:
    """The one with the fewest tokens to recompute; among equals, the last in order."""
    return min(reversed(groups), key=lambda g: g.num_computed)


def _most_blocks(groups: Sequence[SequenceGroup]) -> SequenceGroup:
    """The one with the most computed tokens, which stand for blocks; among equals, the last in order."""
    return max(reversed(groups), key=lambda g: g.num_computed)


VICTIMS: dict[str, VictimChoice] = {"last": _last, "least_computed": _least_computed, "most_blocks": _most_blocks}
