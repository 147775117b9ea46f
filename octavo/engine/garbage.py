"""Python's garbage collector in the processes that Octavo owns: the engine core's and the server's.

A collection visits every container of its generation while everything else waits: with 1,024 running requests and
a full prefix cache a full one took up to 0.3 s, in the middle of a step. So

- what can hold a million elements is not visited at all (``core.untracked``, ``KnownBlock``);
- requests leave no cycles of references behind, so that reference counts free all that is theirs, and collections
  find only what libraries leave;
- what exists once the model is loaded is never visited again (``gc.freeze``);
- collections are rarer than by default, and full ones come when nothing else is to be done.

None of the last two is done to a process that uses ``LLM``: its collector belongs to the program.
"""

from __future__ import annotations

import gc
import time

#: New containers, less those freed, before a collection of the youngest generation; such collections before one of the
#: next; and these before a full one: a million containers, some 100 MB. Python's are 700, 10 and 10. A collection of
#: the youngest generation takes about a millisecond then, of the next one a few at most.
THRESHOLDS = 5_000, 2, 60
#: New containers since the last collection that make one of an idle process worth while.
_WORTH_WHILE = 1000
#: Seconds between two full collections of an idle process, at least.
IDLE_INTERVAL = 10.0


def settle_collector() -> None:
    """Sets the collector for a process that serves: what exists now stays for its whole life."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


class IdleCollector:
    """Full collections while a process has nothing to do, so that they seldom fall into a step."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def collect(self) -> None:
        """Called when there is nothing to do; collects unless little is new, or the last time was a moment ago."""
        youngest, *others = gc.get_count()
        if (youngest > _WORTH_WHILE or any(others)) and time.monotonic() - self._last >= IDLE_INTERVAL:
            gc.collect()
            self._last = time.monotonic()
