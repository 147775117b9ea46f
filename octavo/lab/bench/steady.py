"""Guards measured runs against a machine that changes under them.

Runs are interleaved (A B C, C B A). A reference load of fixed size is timed between them, and during them the time that
a hypervisor takes (steal time) and that other processes take. A run beside which one of these exceeds a limit is
*disturbed*: it is repeated a bounded number of times, and marked if that did not help.
"""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

#: A reference may be slower than usual, and processors may be taken, by this share.
LIMIT = 0.05
#: How often a disturbed run is repeated.
AGAIN = 2
#: The reference is timed as often, unless that takes more seconds; the fastest counts. A process on one of the
#: processors slows all of them down, as a reference uses them all; a median would scatter on a quiet machine, too.
_TIMES, _SECONDS = 9, 0.25
#: Bytes that each thread hashes, and float32 numbers that it adds up: computation and memory, about 10 ms in all.
_HASHED, _ADDED = 4 << 20, 4 << 20
_TICK = 1 / os.sysconf("SC_CLK_TCK")

R = TypeVar("R")


class Usage(NamedTuple):
    """Time since some start, in seconds: by the clock, and of the processors that this process may use."""

    clock: float
    #: Processors; 0 if their times are unknown, or if some of them are for other processes.
    processors: int
    #: Taken by the hypervisor; spent by all processes; spent by the measured ones.
    stolen: float
    busy: float
    own: float


class Machine:
    """The clocks that a guard reads."""

    def __init__(self, step: Callable[[], object] | None = None, pids: Iterable[int] = ()) -> None:
        """Args:
        step: The reference, such as a step of the model; without it a load of all processors.
        pids: Measured processes beside this one, such as a server's; children of all of them are found.
        """
        self._step, self._pids = step, [os.getpid(), *pids]
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def reference(self) -> float:
        """Seconds of the reference: the fastest of a few."""
        step = self._step or _load(max(1, len(self._cpus)))
        seconds: list[float] = []
        while len(seconds) < _TIMES and sum(seconds) < _SECONDS:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def usage(self) -> Usage:
        """The processors' times until now."""
        try:
            text = Path("/proc/stat").read_text()
        except OSError:
            text = ""
        names = {f"cpu{number}" for number in self._cpus}
        times = [[int(w) for w in words[1:]] for line in text.splitlines() if (words := line.split())[0] in names]
        if not times or any(len(of_cpu) < 8 for of_cpu in times):
            return Usage(time.perf_counter(), 0, 0.0, 0.0, 0.0)
        # Documentation/filesystems/proc.rst: user (with guests), nice, system, idle, iowait, irq, softirq, steal.
        stolen = sum(of_cpu[7] for of_cpu in times) * _TICK
        busy = sum(sum(of_cpu[:3]) + sum(of_cpu[5:7]) for of_cpu in times) * _TICK
        processors = 0 if _has_quota(len(times)) else len(times)
        return Usage(time.perf_counter(), processors, stolen, busy, _processor_time(self._pids))


class Still(Machine):
    """For runs on a virtual clock: nothing disturbs them."""

    def reference(self) -> float:
        return 1.0

    def usage(self) -> Usage:
        return Usage(0.0, 0, 0.0, 0.0, 0.0)


class Conditions(NamedTuple):
    """What happened beside a run."""

    #: Of the slower reference, before or after the run, from the usual one; 0.1: it took 10 % longer.
    drift: float
    #: Shares of the processors' time during the run: of the hypervisor, of other processes. None: unknown.
    stolen: float | None
    others: float | None

    @property
    def severity(self) -> float:
        """The larger of the two: drift, and the share of time that was taken."""
        return max(self.drift, (self.stolen or 0.0) + (self.others or 0.0))

    def __str__(self) -> str:
        parts = [f"reference {self.drift:+.1%}"]
        parts += [f"stolen {self.stolen:.1%}"] if self.stolen is not None else []
        parts += [f"other processes {self.others:.1%}"] if self.others is not None else ["other processes unknown"]
        return ", ".join(parts)


@dataclass
class GuardedRun(Generic[R]):
    """A run and its conditions: the best of its attempts."""

    label: str
    result: R
    guard: Guard = field(repr=False)
    before: float
    after: float
    stolen: float | None
    others: float | None
    attempts: int = 1

    @property
    def conditions(self) -> Conditions:
        """Relative to what the guard has seen until now."""
        return Conditions(max(self.before, self.after) / self.guard.level - 1, self.stolen, self.others)

    @property
    def is_disturbed(self) -> bool:
        """Whether the run is not to be trusted."""
        return self.conditions.severity > self.guard.limit

    def as_json(self) -> dict[str, Any]:
        """Conditions, attempts and verdict."""
        return {**self.conditions._asdict(), "attempts": self.attempts, "disturbed": self.is_disturbed}


class Guard:
    """Runs jobs, and repeats those that were disturbed."""

    def __init__(
        self,
        machine: Machine | None = None,
        *,
        again: int = AGAIN,
        limit: float = LIMIT,
        ended: Callable[[], object] = lambda: None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Args:
        machine: Its clocks; without one, this machine's.
        again: Most repeats of a disturbed run.
        limit: Share of drift, and of time taken by others, above which a run is disturbed.
        ended: Called after each run.
        say: Called with a line about each run that is repeated.
        """
        self.limit = limit
        self._machine = Machine() if machine is None else machine
        self._again, self._ended, self._say = again, ended, say
        self._references: list[float] = []
        self._runs: list[GuardedRun[Any]] = []

    @property
    def level(self) -> float:
        """Seconds of a usual reference: the lower quartile of all, as a disturbance only makes them longer."""
        return sorted(self._references)[(len(self._references) - 1) // 4]

    def measure(self, jobs: Mapping[str, Callable[[], R]], *, backwards: bool = False) -> list[GuardedRun[R]]:
        """Runs each job once, and again if it was disturbed; returns a run of each, in the order given.

        ``backwards``: runs the last job first. Callers that have several rounds turn every second one around.
        """
        before = self._reference()
        runs: dict[str, GuardedRun[R]] = {}
        for label in reversed([*jobs]) if backwards else jobs:
            runs[label] = self._run(label, jobs[label], before)
            before = runs[label].after
        for attempt in range(1, self._again + 1):
            disturbed = [run for run in runs.values() if run.is_disturbed]
            for run in disturbed:
                self._say(f"{run.label} was disturbed ({run.conditions}): repeat {attempt} of {self._again}")
                repeated = self._run(run.label, jobs[run.label], self._reference())
                best = min(run, repeated, key=lambda each: each.conditions.severity)
                best.attempts = attempt + 1
                runs[run.label] = best
        found = [runs[label] for label in jobs]
        self._runs += found
        return found

    def report(self) -> list[str]:
        """Lines about the runs that were disturbed to the last, and about what could not be observed."""
        bad = [run for run in self._runs if run.is_disturbed]
        lines = [f"* {run.label}: {run.conditions}; {run.attempts} attempts" for run in bad]
        if bad:
            lines.append(f"* disturbed by more than {self.limit:.0%}: not to be trusted. Repeat on a quiet machine.")
        return lines

    def _reference(self) -> float:
        self._references.append(self._machine.reference())
        return self._references[-1]

    def _run(self, label: str, job: Callable[[], R], before: float) -> GuardedRun[R]:
        start = self._machine.usage()
        result = job()
        end = self._machine.usage()
        after = self._reference()
        self._ended()
        stolen = others = None
        if available := end.processors * (end.clock - start.clock):
            stolen = (end.stolen - start.stolen) / available
            # Both are counted in ticks.
            taken = (end.busy - start.busy) - (end.own - start.own) - 2 * end.processors * _TICK
            others = max(0.0, taken / available)
        return GuardedRun(label, result, self, before, after, stolen, others)


def median_and_range(values: Sequence[float], cell: Callable[[float], str] = "{:.3g}".format) -> str:
    """The median, and of several values the range from the least to the largest: ``2.1 [2.0, 2.4]``.

    The range is the interval: of three to five runs no narrower one is sound.
    """
    median = cell(statistics.median(values))
    return f"{median} [{cell(min(values))}, {cell(max(values))}]" if len(values) > 1 else median


@functools.cache
def _load(threads: int) -> Callable[[], object]:
    """A load of fixed size on so many threads: hashing for computation, adding for memory; both without the GIL."""
    data, numbers = bytes(_HASHED), np.ones(_ADDED, np.float32)
    pool = ThreadPoolExecutor(threads)

    def work(_: int) -> None:
        hashlib.sha256(data).digest()
        numbers.sum()

    return lambda: list(pool.map(work, range(threads)))


@functools.cache
def _has_quota(processors: int) -> bool:
    """Whether a container's limit is below the processors that are seen: then others use them without disturbing."""
    for file, of in (("/sys/fs/cgroup/cpu.max", 0), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", 0)):
        try:
            words = Path(file).read_text().split()
        except OSError:
            continue
        period = float(words[1]) if len(words) > 1 else 100_000.0
        if words[of] not in ("max", "-1") and float(words[of]) / period < processors:
            return True
    return False


def _processor_time(roots: Sequence[int]) -> float:
    """Seconds of processor time of these processes, their descendants, and those of them that were waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        # Fields 4 and 14 to 17 of proc(5): parent; user and system time, its own and of children waited for.
        parents[int(folder.name)] = int(words[1])
        ticks[int(folder.name)] = sum(map(int, words[11:15]))
    measured = set(roots)
    while new := {pid for pid, parent in parents.items() if parent in measured} - measured:
        measured |= new
    return sum(ticks.get(pid, 0) for pid in measured) * _TICK


def listening_process(port: int) -> int | None:
    """The process of this user that listens on a TCP port of this machine; None if there is none, or none is seen."""
    sockets: set[str] = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(file).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and sockets:
            try:
                if any(os.readlink(link) in sockets for link in (folder / "fd").iterdir()):
                    return int(folder.name)
            except OSError:
                continue
    return None
