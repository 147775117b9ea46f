"""Child processes of an engine: how they start, log, report errors, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

from octavo.core.errors import OctavoError, SequenceError, reported_error


def end_with(other: Any, clean_up: Callable[[], object] = lambda: None) -> None:
    """Ends this process, after ``clean_up``, as soon as the other side of a socket is closed; from a thread."""
    closed = getattr(select, "POLLRDHUP", 0)  # a half that was closed
    poll = select.poll()
    poll.register(other, closed)

    def wait() -> None:
        while not any(events & (closed | select.POLLHUP | select.POLLERR) for _, events in poll.poll()):
            time.sleep(0.05)
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class LogMessage(msgspec.Struct, tag=True, array_like=True):
    """A log record of logger "octavo" in a child process."""

    level: int
    text: str


class _LogSender(logging.Handler):
    def __init__(self, send: Callable[[LogMessage], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(LogMessage(record.levelno, self.format(record)))  # with the traceback, if it has one


def send_logs(level: int, send: Callable[[LogMessage], object]) -> None:
    """Sends records of logger "octavo" from ``level`` on to the parent, which logs them; nowhere else."""
    logger = logging.getLogger("octavo")
    logger.handlers, logger.propagate = [_LogSender(send)], False
    logger.setLevel(level)


class Failure(msgspec.Struct, array_like=True):
    """An exception in a child process: class name, message, and the data of two classes."""

    kind: str
    message: str
    #: Of a ``SequenceError``.
    seq_id: int | None = None
    #: Of an ``OctavoError``.
    data: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        data = error.data if isinstance(error, OctavoError) else None
        return cls(type(error).__name__, str(error), getattr(error, "seq_id", None), data)

    @property
    def is_known(self) -> bool:
        """Whether it was raised on purpose, with a message for users."""
        return type(self.error()).__name__ == self.kind

    def error(self) -> OctavoError:
        error = reported_error(self.kind, self.message, self.data)
        if isinstance(error, SequenceError):
            error.seq_id = self.seq_id
        return error


# Threads.

#: Maximum threads of a process to observe, the oldest first.
_MAX_THREADS = 256


class ProcessorWaits:
    """Measures how long the threads of processes and their descendants waited for a processor (not for locks).

    By /proc/PID/task/TID/schedstat, in nanoseconds (Linux, Documentation/scheduler/sched-stats); 0 elsewhere.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def since_last(self, pids: Iterable[int]) -> float:
        """Seconds that the slowest thread, which a step needs, waited since the last call; 0 at the first call."""
        now: dict[str, int] = {}
        for pid in _with_descendants(pids):
            now.update(_waits(pid))
        longest = max(
            (waited - self._seen[thread] for thread, waited in now.items() if thread in self._seen), default=0
        )
        self._seen = now
        return longest / 1e9


def _with_descendants(pids: Iterable[int]) -> Iterable[int]:
    import psutil  # a server that starts does not need it

    for pid in pids:
        yield pid
        try:
            yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:  # it has ended
            continue


def _waits(pid: int) -> dict[str, int]:
    waits = {}
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir())[:_MAX_THREADS]
    except OSError:
        return {}
    for thread in threads:
        with contextlib.suppress(OSError, ValueError, IndexError):
            waits[str(thread)] = int((thread / "schedstat").read_text().split()[1])
    return waits


P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """``asyncio.to_thread`` that lets the thread finish before ``CancelledError``, and then closes the result.

    For calls that use what the caller closes afterwards: C libraries would crash the process on a closed file.
    """
    call = partial(copy_context().run, function, *args, **keywords)
    # A future, not a task: the end of an event loop cancels all tasks.
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # again
                continue
        if future.exception() is None and (close := getattr(future.result(), "close", None)) is not None:
            close()
        raise


class WorkThread:
    """One thread for one kind of work: more threads would delay the event loop and take processors from the engine."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"octavo-{name}")

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """The result of a call in the thread, in the caller's context, which has the request's id for log lines."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, copy_context().run, call, *args)
