"""A backend that measures another: seconds spent inside kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.kernels.forward_batch import BatchSize, Forward
from octavo.kernels.interface import Kernels


class KernelClock:
    """Wraps every kernel of a backend and adds up the time spent inside.

    A call is counted once, whatever it calls: a backend's own methods are unwrapped, and what a captured forward calls
    is part of it.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.seconds = 0.0

    def time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted as a kernel."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = self.seconds, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds = before + time.perf_counter() - start

        return timed

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """The backend's capture; its replay is one kernel, and a forward that it returns as it is calls timed ones."""
        captured = self._kernels.capture(forward, largest)
        return captured if captured is forward else self.time(captured)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        if not callable(attribute):
            return attribute
        timed = self.time(attribute)
        setattr(self, name, timed)  # the next look-up does not come here
        return timed
