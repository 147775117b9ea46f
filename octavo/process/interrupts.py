"""Holds Ctrl-C back while an engine changes its state.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread: within a step, half of a plan would be
applied; within a message to a worker, the rest would be read as the next message.
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

#: A second Ctrl-C within these seconds of the first ends the process.
IMPATIENCE = 2.0

#: Without the conversions to enumerations of ``signal``, which take ten times as long: a block costs microseconds.
_signal = importlib.import_module("_signal")

P = ParamSpec("P")
T = TypeVar("T")


class HeldInterrupts:
    """A block that holds Ctrl-C back: ``deliver``, or the end of the block, raises it.

    A second Ctrl-C within ``IMPATIENCE`` seconds ends the process with code 130. Of nested blocks the outermost counts.
    Nothing is held back outside the main thread, the only one that Python interrupts, nor if the program has its own
    handler: that is called at once, as it may be meant to end the process.
    """

    __slots__ = ("_first", "_holds", "noticed")

    #: The outermost block of the main thread.
    current: ClassVar[HeldInterrupts | None] = None

    def __init__(self) -> None:
        #: Time of the interrupt that is held back.
        self._first: float | None = None
        self._holds = False
        #: Interrupts that reached the main thread.
        self.noticed = 0

    def __enter__(self) -> HeldInterrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._holds = in_main_thread and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            _watch_signals()()  # drops earlier signals
            _signal.signal(signal.SIGINT, self._keep)
            HeldInterrupts.current = self
        return self

    def _keep(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first < IMPATIENCE:
            os._exit(128 + signal.SIGINT)
        self._first = now
        self.noticed += 1

    def deliver(self) -> None:
        """Raises the KeyboardInterrupt that was held back, if there is one."""
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
    """Decorator: runs the function in ``HeldInterrupts``."""

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        with HeldInterrupts():
            return function(*args, **kwargs)

    return held


@functools.cache
def _watch_signals() -> Callable[[], None]:
    """Starts a thread that receives signals even inside a kernel; returns a function that drops unreceived ones."""
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
    """Exits on a second Ctrl-C if the main thread has not reacted to the first."""
    block: HeldInterrupts | None = None
    first, noticed = 0.0, 0
    while select.select([signals], [], []):
        current = HeldInterrupts.current  # before the read: a new block drops earlier signals
        try:
            number = signals.recv(1)[0]
        except BlockingIOError:
            continue
        if number != signal.SIGINT or current is None:
            continue
        if current is block and time.monotonic() - first < IMPATIENCE:
            time.sleep(0.05)  # gives ``_keep`` time to run
            if current is HeldInterrupts.current and current.noticed == noticed:
                os._exit(128 + signal.SIGINT)
        block, first, noticed = current, time.monotonic(), current.noticed


def _after_fork() -> None:
    # The child has no such thread, and the descriptor is the parent's.
    if _watch_signals.cache_info().currsize:
        _signal.set_wakeup_fd(-1)
        _watch_signals.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
