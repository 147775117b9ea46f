"""Containers that the garbage collector does not visit, and freed memory that the C library keeps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C")

_untrack: Callable[[object], None] | None = None
if hasattr(ctypes, "pythonapi"):  # CPython's stable interface
    _untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def exclude_from_gc(container: C) -> C:
    """The container itself, which the garbage collector no longer visits; for lists, tuples and sets.

    The collector looks at every element of every container for cycles of references: with requests of 100,000 tokens
    these are millions of integers in each full collection. Only for what can never be part of a cycle: a container of
    numbers, of bytes, of tuples of these. It is freed as any other when nothing refers to it.
    """
    if _untrack is not None:
        _untrack(container)
    return container


def return_freed_memory() -> None:
    """Gives memory back to the system that the C library keeps."""
    with contextlib.suppress(OSError, AttributeError):  # it is not glibc
        ctypes.CDLL(None).malloc_trim(0)


# Python's garbage collector in the processes that Octavo owns: the engine core's and the server's.

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
