"""Ctrl-C between two changes of an engine, and never in the middle of one.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread. In the middle of a step, half of a
plan would be applied; of a message to a worker, the rest of its bytes would be taken for the next. No ``except`` can
tell where it came, so it is held back where something changes, and raised afterwards.
"""

from __future__ import annotations

import functools
import importlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

#: Seconds within which a second Ctrl-C, while the first is held back, ends the process.
IMPATIENCE = 2.0

#: What ``signal`` wraps in conversions to enumerations, which take ten times as long: a block costs 2 microseconds.
_signal = importlib.import_module("_signal")

P = ParamSpec("P")
T = TypeVar("T")


class HeldInterrupts:
    """A block in which Ctrl-C is held back: it is raised by ``deliver`` or at the block's end.

    A second one within ``IMPATIENCE`` seconds, while the first waits, ends the process by the signal, so that nobody
    has to wait for a worker that hangs. Of blocks within one another the outermost decides.

    Nothing is held back outside of the main thread, the only one that Python interrupts, nor where the program has a
    handler of its own: that is called at once, as it may be meant to end the process. If it raises, a step may be torn.
    """

    __slots__ = ("_first", "_holds")

    def __init__(self) -> None:
        #: When the interrupt came that is held back.
        self._first: float | None = None
        self._holds = False

    def __enter__(self) -> HeldInterrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._holds = in_main_thread and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            _signal.signal(signal.SIGINT, self._keep)
        return self

    def _keep(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first < IMPATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self._first = now

    def deliver(self) -> None:
        """Raises the interrupt that was held back, if there is one.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        if self._first is not None:
            self._first = None
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        if self._holds:
            if _signal.getsignal(signal.SIGINT) == self._keep:  # not one that was installed meanwhile
                _signal.signal(signal.SIGINT, signal.default_int_handler)
            self.deliver()


def holding_interrupts(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function whose calls are blocks of ``HeldInterrupts``."""

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        with HeldInterrupts():
            return function(*args, **kwargs)

    return held
