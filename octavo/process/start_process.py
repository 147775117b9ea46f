"""Starts child processes and describes how they ended. It imports the standard library only, to start at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

#: API keys of a server, which its children do not need.
SECRET_VARIABLES = ("OCTAVO_API_KEYS", "OCTAVO_API_KEY")


def start_process(
    module: str, *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module`` with this process's import path, without API keys; ``options`` are ``Popen``'s."""
    # -P keeps the current folder off the path.
    path = os.pathsep.join(os.path.abspath(part) for part in sys.path)
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**inherited, "PYTHONPATH": path, **(environment or {})},
        process_group=0,  # Ctrl-C is for the parent alone, even before the child ignores it
        **options,
    )


class ChildProcess(Protocol):
    """A ``subprocess.Popen``, or a process that a fork server has made (``fork_server.ForkedProcess``)."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


#: Seconds until a killed process has ended.
_END_TIMEOUT = 5.0


def end_process(process: ChildProcess, grace: float = 0.0) -> None:
    """Waits for the end of a process, which is killed after ``grace`` seconds."""
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a call of a driver cannot be killed
            process.wait(_END_TIMEOUT)


#: Signals from people and supervisors; processes do not send them to themselves.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def was_killed(code: int, out_of_memory_before: int) -> bool:
    """Whether the exit code means a signal from outside; the second argument: ``num_out_of_memory`` at its start."""
    return -code in _FROM_OUTSIDE and num_out_of_memory() == out_of_memory_before


def num_out_of_memory() -> int:
    """Processes that the kernel's OOM killer has ended since boot; 0 if unknown."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process or a child of it is stopped (SIGSTOP); False if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[0] in ("T", "t"):
                return True
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return any(is_stopped(int(child)) for child in file.read().split())
    except (OSError, IndexError):
        return False


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = f" ({signal.Signals(-code).name})" if -code in {*signal.Signals} else ""
    return f"was ended by signal {-code}{name}"


def shared_memory(size: int) -> int:
    """A descriptor of zeroed anonymous memory that child processes inherit and map."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("octavo")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


@dataclass
class LocalConnections:
    """Shared memory and pipes of one worker, as file descriptors that its process inherits."""

    #: Of the tensor-parallel group, if its ranks exchange data through memory.
    group: int | None = None
    #: (memory, pipe end) of the link from the stage before, and of the link to the stage after.
    incoming: tuple[int, int] | None = None
    outgoing: tuple[int, int] | None = None

    @property
    def descriptors(self) -> list[int]:
        links = [end for link in (self.incoming, self.outgoing) if link for end in link]
        return links if self.group is None else [self.group, *links]
