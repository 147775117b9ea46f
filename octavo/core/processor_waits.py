"""How long processes were kept from running by others that had the processors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
