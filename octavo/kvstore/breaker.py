"""``Breaker``: stops calls to a service that fails, and tries one from time to time (the circuit breaker pattern)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("octavo")

#: Failures in a row until no more calls are made.
FAILURES = 2
#: Seconds until a call is tried again; doubled with each one that fails.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


class Breaker:
    """Closed: calls are made. Open, after ``FAILURES`` in a row: one call per pause, which closes it if it succeeds.

    Every change of state is logged once. For several threads.
    """

    def __init__(self, service: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``service``: a noun for the log, such as "the KV store at redis://cache:6379"."""
        self._service = service
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._next_try = 0.0
        #: Why no calls are made; empty: they are.
        self.trouble = ""

    def allows(self) -> bool:
        """Whether the caller may make a call now, and must then report how it ended."""
        if not self.trouble:
            return True
        with self._lock:
            if self.trouble and self._clock() < self._next_try:
                return False
            self._next_try = self._clock() + self._pause  # for one caller alone
            return True

    def succeeded(self) -> None:
        """A call has succeeded."""
        if not self._failures:
            return
        with self._lock:
            was_open = bool(self.trouble)
            self._failures, self._pause, self.trouble = 0, FIRST_PAUSE, ""
        if was_open:
            logger.warning("%s is used again", self._service)

    def failed(self, why: str) -> None:
        """A call has failed."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES:
                return
            was_open = bool(self.trouble)
            if was_open:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.trouble = why
            self._next_try = self._clock() + self._pause
        if not was_open:
            logger.warning("%s is not used for now: %s", self._service, why)
