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


class LastSteps:
    """The groups of the last steps, for the process that computes them."""

    def __init__(self, steps: int) -> None:
        """``steps``: that may be in flight."""
        self._steps: deque[frozenset[int]] = deque(maxlen=steps)
        self._seq_ids: list[int] = []

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

    @property
    def groups(self) -> set[int]:
        """Those of the last steps; some may have ended since."""
        return set().union(*self._steps)

    def _publish(self) -> None:
        """Called when ``groups`` may have changed."""


class FlightRecorder(LastSteps):
    """The core's side."""

    def __init__(self, descriptor: int, steps: int) -> None:
        """``descriptor``: of memory made by ``recorder_memory``, which is closed. ``steps``: that may be in flight."""
        super().__init__(steps)
        self._memory = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def _publish(self) -> None:
        noted = list(self.groups)[:_MOST]
        self._memory[: _WORD * (len(noted) + 1)] = array("q", [len(noted), *noted]).tobytes()


def recorder_memory() -> int:
    """The descriptor of memory for a recorder, in which nothing is noted yet."""
    return shared_memory(_WORD * (_MOST + 1))


def read_recorder(descriptor: int) -> set[int]:
    """The groups of the last steps that a core has begun. Some may have ended since."""
    words = array("q", os.pread(descriptor, _WORD, 0))
    if not words or not 0 < words[0] <= _MOST:
        return set()
    return set(array("q", os.pread(descriptor, _WORD * words[0], _WORD)))
