"""What a user's policy raises is the failure of one request."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from octavo.core.request import SequenceStatus
from octavo.scheduler import groups
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies.policy import Policy

logger = logging.getLogger("octavo")


class _Key:
    """A key of a user's policy, whose comparison is the user's code too. Keys of failed groups go last."""

    __slots__ = ("failed", "group", "guard", "value")

    def __init__(self, guard: GuardedPolicy, group: SequenceGroup, value: Any, failed: bool = False) -> None:
        self.guard, self.group, self.value, self.failed = guard, group, value, failed

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Key)
        if self.failed or other.failed:
            return self.failed and other.failed
        try:
            return bool(self.value == other.value)
        except Exception as e:
            return self._fail(e)

    def __lt__(self, other: _Key) -> bool:
        if self.failed or other.failed:
            return other.failed and not self.failed
        try:
            return bool(self.value < other.value)
        except Exception as e:
            return self._fail(e)

    def __le__(self, other: _Key) -> bool:
        return not other < self

    def _fail(self, error: Exception) -> bool:
        self.guard.fail(self.group, "key", error)
        self.failed = True
        return False


class GuardedPolicy(Policy):
    """Calls a policy of the user's. If it raises in a call about a group, that group fails, and nothing else does.

    Until the scheduler ends a failed group (``take_failures``), it goes last, and the policy is only told of its end.
    What ``on_step`` raises is about no group: it is logged, and the step is planned all the same.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self._name, self._policy = name, policy
        self.dynamic, self.preemptive = policy.dynamic, policy.preemptive
        self.uses_priority, self.uses_targets = policy.uses_priority, policy.uses_targets
        self.waiting_keys_grow = policy.waiting_keys_grow
        #: By group id, the method that failed, until the group has ended.
        self._failed: dict[int, str] = {}
        self._failures: list[tuple[SequenceGroup, str]] = []
        self._logged: set[str] = set()

    def take_failures(self) -> list[tuple[SequenceGroup, str]]:
        """The groups that have failed since it was last asked, some of which may have ended; and why."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, group: SequenceGroup, method: str, error: Exception) -> None:
        """A call about this group has raised."""
        message = self._log(method, error)
        if group.group_id not in self._failed:
            self._failed[group.group_id] = method
            self._failures.append((group, message))

    def _log(self, method: str, error: Exception) -> str:
        """Logs the first error of each method with its traceback; what happened, in words."""
        message = f"scheduling_policy {self._name!r}: {method}() raised {type(error).__name__}: {error}"
        if method not in self._logged:
            self._logged.add(method)
            logger.error("%s; further errors of this method are not logged", message, exc_info=error)
        return message

    def key(self, group: SequenceGroup) -> _Key:
        """The policy's key; it must be comparable."""
        if group.group_id not in self._failed:
            try:
                value = self._policy.key(group)
                if value < value or not value == value:  # None and the like raise, and "not a number" has no place
                    raise ValueError(f"the key {value!r} cannot be ordered")
                return _Key(self, group, value)
            except Exception as e:
                self.fail(group, "key", e)
        return _Key(self, group, None, failed=True)

    def displaces(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """As the policy says; never if one of them has failed."""
        if waiting.group_id in self._failed or running.group_id in self._failed:
            return False
        try:
            return bool(self._policy.displaces(waiting, running))
        except Exception as e:
            self.fail(waiting, "displaces", e)
            return False

    def lane(self, group: SequenceGroup) -> Hashable:
        """As the policy says; a lane of its own if that fails."""
        if group.group_id not in self._failed:
            try:
                lane = self._policy.lane(group)
                hash(lane)
                return lane
            except Exception as e:
                self.fail(group, "lane", e)
        return self, group.group_id

    def on_arrival(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_arrival", group)

    def on_admit(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_admit", group)

    def on_preempt(self, group: SequenceGroup) -> None:
        """Tells the policy."""
        self._tell(group, "on_preempt", group)

    def on_sequence_end(self, seq: groups.Sequence, status: SequenceStatus) -> None:
        """Tells the policy, also of a failed group unless its arrival failed."""
        self._tell(seq.group, "on_sequence_end", seq, status)

    def on_end(self, group: SequenceGroup) -> None:
        """Tells the policy, as ``on_sequence_end`` does."""
        self._tell(group, "on_end", group)
        self._failed.pop(group.group_id, None)

    def _tell(self, group: SequenceGroup, method: str, *args: object) -> None:
        failed_at = self._failed.get(group.group_id)
        if failed_at is not None and (failed_at == "on_arrival" or method not in ("on_sequence_end", "on_end")):
            return
        try:
            getattr(self._policy, method)(*args)
        except Exception as e:
            self.fail(group, method, e)

    def on_step(self, now: float, running: Sequence[SequenceGroup]) -> None:
        """Tells the policy."""
        try:
            self._policy.on_step(now, running)
        except Exception as e:
            self._log("on_step", e)
