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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.errors import ConfigError
from octavo.scheduler.groups import SequenceGroup


class Policy(ABC):
    """Orders groups."""

    #: Whether the key of a running group changes with what it computes.
    dynamic = False
    #: Whether the key may depend on the request's ``priority``. If not, a request with one is refused.
    uses_priority = True

    @abstractmethod
    def key(self, group: SequenceGroup) -> Any:
        """The sort key: lower goes first; among equals, the earlier arrival."""


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


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "static": StaticPriority,
    "sjf": ShortestJobFirst,
    "ldf": LongestDataFirst,
    "lcfs": LastComeFirstServed,
}


def load_policy(name: str) -> Policy:
    """The policy of this name, or of ``module:Class``.

    Raises:
        ConfigError: there is no such policy.
    """
    if ":" not in name:
        if name not in POLICIES:
            raise ConfigError(f"unknown scheduling_policy {name!r}; known: {', '.join(POLICIES)}, or module:Class")
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"scheduling_policy {name!r} cannot be imported: {e}") from e
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        raise ConfigError(f"scheduling_policy {name!r} is not a class derived from octavo.scheduler.policies.Policy")
    return kind()


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
