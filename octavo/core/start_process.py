"""How processes that an engine starts for itself are started, and how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

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
