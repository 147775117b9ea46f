"""Scheduling policies: the order in which groups are admitted, kept and resumed, and which group is preempted.

A policy is a class with one method. Write one in a module of your own and name it ``module:Class``:

    class ShortestPromptFirst(Policy):
        uses_priority = False

        def key(self, group):
            return len(group.request.prompt_token_ids)
"""

from __future__ import annotations

import importlib
import inspect

from octavo.core.config import SchedulerOptions
from octavo.core.errors import ConfigError
from octavo.scheduler.policies.base import Policy as Policy
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
from octavo.scheduler.policies.mlfq import MultiLevelFeedback
from octavo.scheduler.policies.srpt import ShortestRemaining
from octavo.scheduler.policies.victims import VICTIMS as VICTIMS

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
    if ":" not in name:
        if name not in POLICIES:
            raise ConfigError(f"unknown scheduling_policy {name!r}; known: {', '.join(POLICIES)}, or module:Class")
        return POLICIES[name]
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"scheduling_policy {name!r} cannot be imported: {e}") from e
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        raise ConfigError(f"scheduling_policy {name!r} is not a class derived from octavo.scheduler.policies.Policy")
    return kind


def load_policy(name: str, options: SchedulerOptions | None = None) -> Policy:
    """A new policy of this name, or of ``module:Class``, under these options (by default those of the engine).

    Raises:
        ConfigError: there is no such policy.
    """
    return policy_class(name).from_options(options or SchedulerOptions())
