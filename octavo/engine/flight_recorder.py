"""Which requests an engine core computes, in memory that outlives it: so it is known with which of them it died."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import deque
from collections.abc import Callable

from octavo.core.shared_memory import shared_memory

#: Most requests that are noted; each takes 8 bytes, and pages that are not used take no memory.
_MOST = 1 << 17
_WORD = 8
#: Words before the requests of the last steps: their number, and the request at hand plus one, or 0.
_HEADER = 2


class LastSteps:
    """The groups of the last steps, and the one that is being added or admitted, for the process that computes them."""

    def __init__(self, steps: int) -> None:
        """``steps``: that may be in flight."""
        self._steps: deque[frozenset[int]] = deque(maxlen=steps)
        self._seq_ids: list[int] = []
        #: The group that is added or admitted while the next step is planned.
        self._at_hand: int | None = None

    def note(self, seq_ids: list[int], group_of: Callable[[int], int]) -> None:
        """A step of these sequences begins, beside those that may be in flight; ``group_of`` names a sequence's group.

        The list is kept, and not to be changed: most steps are of the sequences of the one before.
        """
        repeated = bool(self._steps) and seq_ids == self._seq_ids
        groups = self._steps[-1] if repeated else frozenset(map(group_of, seq_ids))
        changed = not self._steps or any(step is not groups for step in self._steps)
        self._seq_ids = seq_ids
        self._steps.append(groups)
        if changed:
            self._publish()
        if self._at_hand is not None:
            self._set_at_hand(None)

    def attempt(self, group_id: int) -> None:
        """A group is being added to the scheduler, or admitted: it may end the process before it is in any step."""
        if group_id != self._at_hand:
            self._set_at_hand(group_id)

    def begin_trial(self, group_id: int) -> None:
        """From now on this group is computed alone: those of earlier steps are not to blame for what follows."""
        self._steps.clear()
        self._seq_ids = []
        self._publish()
        self._set_at_hand(group_id)

    @property
    def groups(self) -> set[int]:
        """Those of the last steps; some may have ended since."""
        return set().union(*self._steps, () if self._at_hand is None else (self._at_hand,))

    def _set_at_hand(self, group_id: int | None) -> None:
        self._at_hand = group_id

    def _publish(self) -> None:
        """Called when the groups of the last steps may have changed."""


class FlightRecorder(LastSteps):
    """The core's side."""

    def __init__(self, descriptor: int, steps: int) -> None:
        """``descriptor``: of memory made by ``recorder_memory``, which is closed. ``steps``: that may be in flight."""
        super().__init__(steps)
        self._memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def _publish(self) -> None:
        noted = list(set().union(*self._steps))[:_MOST]
        at_hand = 0 if self._at_hand is None else self._at_hand + 1
        self._memory[: _WORD * (len(noted) + _HEADER)] = array("q", [len(noted), at_hand, *noted]).tobytes()

    def _set_at_hand(self, group_id: int | None) -> None:
        super()._set_at_hand(group_id)
        word = array("q", [0 if group_id is None else group_id + 1])
        self._memory[_WORD : 2 * _WORD] = word.tobytes()


def recorder_memory() -> int:
    """The descriptor of memory for a recorder, in which nothing is noted yet."""
    return shared_memory(_WORD * (_MOST + _HEADER))


def read_recorder(descriptor: int) -> set[int]:
    """The groups of the last steps that a core has begun, and that which it was adding. Some may have ended since."""
    words = array("q", os.pread(descriptor, _WORD * _HEADER, 0))
    if len(words) < _HEADER:
        return set()
    count, at_hand = words
    groups = set() if at_hand <= 0 else {at_hand - 1}
    if 0 < count <= _MOST:
        groups.update(array("q", os.pread(descriptor, _WORD * count, _WORD * _HEADER)))
    return groups
