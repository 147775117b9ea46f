"""What Python's garbage collector costs a measurement."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.core.garbage import settle_collector


@contextlib.contextmanager
def settled_collector() -> Iterator[None]:
    """``settle_collector`` for a while: a measurement in a process that does other things, too."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    settle_collector()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        if not enabled:
            gc.disable()


@dataclass(slots=True)
class Collections:
    """Collections while it is in use (``with Collections() as collections``)."""

    #: By generation, the youngest first.
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    #: Processor time of the thread in them, in seconds: in all, and of the longest.
    seconds: float = 0.0
    longest: float = 0.0
    _start: float = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._start = time.thread_time()
            return
        seconds = time.thread_time() - self._start
        self.counts[info["generation"]] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
