"""A wrapper of a backend that measures the seconds spent inside kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.kernels.forward_batch import BatchSize, Forward
from octavo.kernels.interface import Kernels


class KernelClock:
    """Wraps every kernel of a backend and sums the time spent inside.

    Nested calls are counted once: calls within the backend are not wrapped, and a captured forward counts as a whole.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.seconds = 0.0

    def time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as a kernel."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = self.seconds, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds = before + time.perf_counter() - start

        return timed

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """The backend's capture. A replay is timed as one kernel; an uncaptured forward calls timed kernels."""
        captured = self._kernels.capture(forward, largest)
        return captured if captured is forward else self.time(captured)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        if not callable(attribute):
            return attribute
        timed = self.time(attribute)
        setattr(self, name, timed)  # found without __getattr__ next time
        return timed
