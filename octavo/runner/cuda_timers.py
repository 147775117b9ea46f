"""Times steps on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class CudaTimers:
    """Times steps by events on the current stream."""

    def __init__(self, cuda: Any) -> None:
        """``cuda``: ``torch.cuda``; tests give another with its ``Event``."""
        self._cuda = cuda
        self._last_end: Any = None

    def begin(self) -> CudaTimer:
        """The step's work is queued from here on."""
        return CudaTimer(self._last_end, self._record())

    def end(self, timer: CudaTimer) -> CudaTimer:
        """All of the step's work is queued."""
        timer.end = self._last_end = self._record()
        return timer

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(slots=True)
class CudaTimer:
    """Times the work of one step: events before it, at its beginning and at its end."""

    before: Any
    begin: Any
    end: Any = None

    def wait(self) -> tuple[float, float]:
        """Waits for the work; the seconds that it took, and those that the device was idle before it."""
        self.end.synchronize()
        idle = 0.0 if self.before is None else self.before.elapsed_time(self.begin) / 1e3
        return self.begin.elapsed_time(self.end) / 1e3, idle
