"""What processes that an engine starts for itself say of their logs and errors, and that they end with it."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

from octavo.core.errors import OctavoError, SequenceError, reported_error


def end_with(other: Any, clean_up: Callable[[], object] = lambda: None) -> None:
    """Ends this process when the other side of a socket has closed it, whatever this one does then.

    ``clean_up`` is called before. A thread waits for that; nothing is read from the socket here.
    """
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
    """A log message for logger "octavo" of the process that has started this one."""

    level: int
    text: str


class _LogSender(logging.Handler):
    def __init__(self, send: Callable[[LogMessage], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(LogMessage(record.levelno, self.format(record)))  # with the traceback, if it has one


def send_logs(level: int, send: Callable[[LogMessage], object]) -> None:
    """From now on messages of logger "octavo" from ``level`` on are given to ``send``, from any thread, and no others.

    The process that gets them writes them as it writes its own.
    """
    logger = logging.getLogger("octavo")
    logger.handlers, logger.propagate = [_LogSender(send)], False
    logger.setLevel(level)


class Failure(msgspec.Struct, array_like=True):
    """An exception of another process: the name of its class, its message, and of a ``SequenceError`` the sequence."""

    kind: str
    message: str
    seq_id: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure that says of an exception what can be said to another process."""
        return cls(type(error).__name__, str(error), getattr(error, "seq_id", None))

    @property
    def is_known(self) -> bool:
        """Whether it is an error that is raised on purpose, with a message for users."""
        return type(self.error()).__name__ == self.kind

    def error(self) -> OctavoError:
        """The exception; see ``reported_error``."""
        error = reported_error(self.kind, self.message)
        if isinstance(error, SequenceError):
            error.seq_id = self.seq_id
        return error


# How processes that an engine starts for itself are started, and how they ended.

#: Variables that hold API keys of a server, which no other process needs.
SECRET_VARIABLES = ("OCTAVO_API_KEYS", "OCTAVO_API_KEY")


def start_process(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module``, which finds modules where this process does and gets no API keys.

    ``options`` are those of ``Popen``.
    """
    # Modules that options name (scheduling policies) are found on the same path; -P adds nothing to it.
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": path, **(environment or {})},
        process_group=0,  # Ctrl-C is for this process alone, also before the other can say that it ignores it
        **options,
    )


#: Signals that people and supervisors send; a process that fails does not send them to itself.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def was_killed(code: int, out_of_memory_before: int) -> bool:
    """Whether somebody has ended the process that gave this exit code, and not its own doing.

    ``out_of_memory_before``: ``num_out_of_memory`` when it was started. What the kernel ends as memory runs out has
    asked for that memory.
    """
    return -code in _FROM_OUTSIDE and num_out_of_memory() == out_of_memory_before


def num_out_of_memory() -> int:
    """How many processes the kernel has ended for want of memory since the machine was started; 0: not known."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process, or one that it has started, was stopped by a signal (SIGSTOP), as far as can be known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[0] in ("T", "t"):
                return True
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return any(is_stopped(int(child)) for child in file.read().split())
    except (OSError, IndexError):
        return False


def how_it_ended(code: int) -> str:
    """The exit code of a process in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"


# Memory that processes share without a name for it, so that nothing is left of it when they have ended.


def shared_memory(size: int) -> int:
    """The descriptor of zeroed memory without a name, to be mapped by processes that inherit it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


# How long processes were kept from running by others that had the processors.

#: Threads of a process that are looked at: of more, the first that were started.
_MAX_THREADS = 256


class ProcessorWaits:
    """Knows how long the threads of some processes, and of those that they have started, waited for a processor.

    A process that is stopped, or waits for a lock or a message, waits for no processor. Source: the second figure of
    /proc/PID/task/TID/schedstat, in nanoseconds (Linux, Documentation/scheduler/sched-stats); elsewhere there is none.
    """

    def __init__(self) -> None:
        #: By thread.
        self._seen: dict[str, int] = {}

    def since_last(self, pids: Iterable[int]) -> float:
        """Seconds for which the thread that waited longest did so since the last call; 0 at the first one.

        A step needs all of a process's threads, so that one which has no processor holds up the others.
        """
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
    """Nanoseconds for which each thread of a process has waited, by its files; empty where that is not known."""
    found = {}
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir())[:_MAX_THREADS]
    except OSError:
        return {}
    for thread in threads:
        try:
            found[str(thread)] = int((thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return found


# Calls in threads whose end is waited for, so that what they use can be closed.

P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """As ``asyncio.to_thread``, but if this is cancelled, the thread has ended when ``CancelledError`` comes.

    For calls that use what the caller closes afterwards, such as a file: libraries in C read on through a closed
    handle, which ends the whole process. A result that nobody takes any more is closed, if it has ``close``.
    """
    call = partial(copy_context().run, function, *args, **keywords)
    # A future and not a task: the end of an event loop cancels all tasks.
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # cancelled once more, which changes nothing
                continue
        if future.exception() is None and (close := getattr(future.result(), "close", None)) is not None:
            close()
        raise


# What the workers of one machine share: made by their executor, inherited by their processes.


@dataclass
class LocalConnections:
    """Memory and pipes of one worker, as descriptors of this process."""

    #: Of the tensor-parallel group, if its ranks exchange through memory.
    group: int | None = None
    #: (memory, end of the pipe) of the link from the stage before, and of the one to the stage after.
    incoming: tuple[int, int] | None = None
    outgoing: tuple[int, int] | None = None

    @property
    def descriptors(self) -> list[int]:
        """All of them."""
        links = [end for link in (self.incoming, self.outgoing) if link for end in link]
        return links if self.group is None else [self.group, *links]
