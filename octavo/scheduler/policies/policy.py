"""What a scheduling policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Self

from octavo.core.config import SchedulerOptions
from octavo.core.request import SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup


class Policy(ABC):
    """Orders groups.

    A subclass needs ``key`` alone. What it learns meanwhile it is told by the methods ``on_...``, which do nothing by
    default; ``policy_data`` of a group is the policy's own.
    """

    #: Whether the key of a running group changes with what it computes, or with time.
    dynamic = False
    #: Whether the key may depend on the request's ``priority``. If not, a request with one is refused.
    uses_priority = True
    #: Whether it may depend on ``ttft_target`` and ``tpot_target``. If not, a request with one is refused.
    uses_targets = False
    #: Whether the order depends on how much time has passed, beside the order of events. If so, processes that plan for
    #: themselves (``external_launcher``) refuse the policy.
    uses_clock = False
    #: Whether a waiting group may preempt running ones (``displaces``) without the option ``priority_preemption``.
    preemptive = False
    #: Whether the key of a waiting group may grow while it waits: see ``lane``.
    waiting_keys_grow = False

    @classmethod
    def from_options(cls, options: SchedulerOptions) -> Self:
        """The policy under these options; by default they do not matter to it."""
        return cls()

    @abstractmethod
    def key(self, group: SequenceGroup) -> Any:
        """The sort key: lower goes first; among equals, the earlier arrival."""

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Whether ``waiting``, which goes first, is worth the preemption of ``running``: by default by priority."""
        return running.priority > waiting.priority

    def lane(self, group: SequenceGroup) -> Hashable:
        """With ``waiting_keys_grow``: waiting groups of one lane go in order of arrival, lanes by their first group."""
        return group.group_id

    def on_arrival(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group is about to be queued for the first time; before that its key is not asked for."""

    def on_admit(self, group: SequenceGroup) -> None:  # noqa: B027
        """A waiting or swapped group begins to run."""

    def on_preempt(self, group: SequenceGroup) -> None:  # noqa: B027
        """A running group is about to be queued again; what it has computed is lost or moved."""

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:  # noqa: B027
        """A step is about to be planned; of ``dynamic`` policies only. ``now`` on the clock of the arrival times."""

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:  # noqa: B027
        """A sequence ends, alone or with its group."""

    def on_end(self, group: SequenceGroup) -> None:  # noqa: B027
        """A group has ended, and so have its sequences."""


def num_output_tokens(group: SequenceGroup) -> int:
    """Tokens that each of a group's sequences has generated: they sample together."""
    return len(group.seqs[0].token_ids) - len(group.request.prompt_token_ids)
