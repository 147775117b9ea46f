"""Ctrl-C between two changes of an engine, and never in the middle of one.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread. In the middle of a step, half of a
plan would be applied; of a message to a worker, the rest of its bytes would be taken for the next. No ``except`` can
tell where it came, so it is held back where something changes, and raised afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ClassVar, ParamSpec, TypeVar

#: Seconds within which a second Ctrl-C, while the first is held back, ends the process.
IMPATIENCE = 2.0

#: What ``signal`` wraps in conversions to enumerations, which take ten times as long: a block costs microseconds.
_signal = importlib.import_module("_signal")

P = ParamSpec("P")
T = TypeVar("T")


class HeldInterrupts:
    """A block in which Ctrl-C is held back: it is raised by ``deliver`` or at the block's end.

    A second one within ``IMPATIENCE`` seconds, while the first waits, ends the process with code 130, so that nobody
    has to wait for a long step or a worker that hangs. Of blocks within one another the outermost decides.

    Nothing is held back outside of the main thread, the only one that Python interrupts, nor where the program has a
    handler of its own: that is called at once, as it may be meant to end the process. If it raises, a step may be torn.
    """

    __slots__ = ("_first", "_holds", "noticed")

    #: The outermost block of the main thread.
    current: ClassVar[HeldInterrupts | None] = None

    def __init__(self) -> None:
        #: When the interrupt came that is held back.
        self._first: float | None = None
        self._holds = False
        #: Interrupts that the main thread has noticed.
        self.noticed = 0

    def __enter__(self) -> HeldInterrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._holds = in_main_thread and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            drop_earlier = _watch_signals()
            drop_earlier()
            _signal.signal(signal.SIGINT, self._keep)
            HeldInterrupts.current = self
        return self

    def _keep(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first < IMPATIENCE:
            _end_process()
        self._first = now
        self.noticed += 1

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
            HeldInterrupts.current = None
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


def _end_process() -> None:
    os._exit(128 + signal.SIGINT)


@functools.cache
def _watch_signals() -> Callable[[], None]:
    """Has another thread told of signals: Python calls no handler while the main thread is in a kernel for seconds.

    Returns what drops those of which that thread has not heard yet.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    others = _signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    if others >= 0:  # an event loop's, which must get them
        _signal.set_wakeup_fd(others)
    else:
        threading.Thread(target=_watch, args=(ours, theirs), daemon=True, name="interrupts").start()
    waiting = select.poll()
    waiting.register(ours, select.POLLIN)

    def drop_earlier() -> None:
        if waiting.poll(0):
            with contextlib.suppress(BlockingIOError):
                ours.recv(64)

    return drop_earlier


def _watch(signals: socket.socket, _: socket.socket) -> None:
    """Ends the process at the second Ctrl-C of a block in which the main thread does not come to call ``_keep``."""
    block: HeldInterrupts | None = None
    first, noticed = 0.0, 0
    while select.select([signals], [], []):
        current = HeldInterrupts.current  # before it is read: a block that begins meanwhile drops it
        try:
            number = signals.recv(1)[0]
        except BlockingIOError:
            continue
        if number != signal.SIGINT or current is None:
            continue
        if current is block and time.monotonic() - first < IMPATIENCE:
            time.sleep(0.05)  # in which it would be called
            if current is HeldInterrupts.current and current.noticed == noticed:
                _end_process()
        block, first, noticed = current, time.monotonic(), current.noticed


def _after_fork() -> None:
    """The thread does not exist in the child, and the descriptor is the parent's."""
    if _watch_signals.cache_info().currsize:
        _signal.set_wakeup_fd(-1)
        _watch_signals.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
