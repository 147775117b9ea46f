"""Scheduling policies: the order in which groups are admitted, kept and resumed, and which group is preempted.

A policy is a class with one method. Write one in a module of your own and name it ``module:Class``:

    class ShortestPromptFirst(Policy):
        uses_priority = False

        def key(self, group):
            return len(group.request.prompt_token_ids)
"""

from __future__ import annotations

from octavo.core.config import SchedulerOptions
from octavo.core.errors import ConfigError
from octavo.core.plugins import load_class
from octavo.scheduler.policies.classic import (
    FirstComeFirstServed as FirstComeFirstServed,
)
from octavo.scheduler.policies.classic import (
    LastComeFirstServed,
    LongestDataFirst,
    ShortestJobFirst,
    StaticPriority,
)
from octavo.scheduler.policies.deadline import EarliestDeadlineFirst
from octavo.scheduler.policies.fair import FairShare
from octavo.scheduler.policies.guard import GuardedPolicy as GuardedPolicy
from octavo.scheduler.policies.mlfq import MultiLevelFeedback
from octavo.scheduler.policies.policy import Policy as Policy
from octavo.scheduler.policies.srpt import ShortestRemaining

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "static": StaticPriority,
    "sjf": ShortestJobFirst,
    "ldf": LongestDataFirst,
    "lcfs": LastComeFirstServed,
    "srpt": ShortestRemaining,
    "fair": FairShare,
    "deadline": EarliestDeadlineFirst,
    "mlfq": MultiLevelFeedback,
}


def policy_class(name: str) -> type[Policy]:
    """The class of this name, or of ``module:Class``.

    Raises:
        ConfigError: there is no such policy.
    """
    return load_class(name, POLICIES, Policy, "scheduling_policy", "octavo.scheduler.policies.Policy")


def load_policy(name: str, options: SchedulerOptions | None = None) -> Policy:
    """A new policy of this name, or of ``module:Class``, under these options (by default those of the engine).

    That of a user is guarded: what it raises later ends one request, not the engine.

    Raises:
        ConfigError: there is no such policy, or it cannot be made.
    """
    kind = policy_class(name)
    if ":" not in name:
        return kind.from_options(options or SchedulerOptions())
    try:
        return GuardedPolicy(name, kind.from_options(options or SchedulerOptions()))
    except Exception as e:
        raise ConfigError(f"scheduling_policy {name!r} cannot be made: {type(e).__name__}: {e}") from e
