"""Where the time of a start goes, by process: its phases and, if asked for, what each package's imports took.

Times are seconds of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

#: "1" in the environment of a process that measures its imports.
VARIABLE = "_OCTAVO_PROFILE_IMPORTS"
#: Seconds of a package's imports below which it is counted with the others.
_LEAST = 0.004


class Phase(msgspec.Struct, array_like=True):
    """A part of a start; phases of several threads overlap."""

    name: str
    begin: float
    end: float


class ProcessProfile(msgspec.Struct, array_like=True):
    """The start of one process."""

    name: str
    begin: float
    #: Processor time of all its threads so far, in seconds.
    cpu_seconds: float
    phases: list[Phase]
    #: Seconds that a package's modules took, without what they import; of several threads together.
    imports: dict[str, float]

    def lines(self, origin: float) -> Iterator[str]:
        """A line for each phase, with its begin after ``origin`` and its length."""
        yield f"{self.name}: begun at {self.begin - origin:.3f} s, {self.cpu_seconds:.3f} s of processor time"
        for phase in self.phases:
            yield f"  {phase.begin - origin:7.3f} {phase.end - phase.begin:+7.3f}  {phase.name}"
        if self.imports:
            ordered = sorted(self.imports.items(), key=lambda entry: -entry[1])
            named = [f"{package} {seconds:.3f}" for package, seconds in ordered if seconds >= _LEAST]
            others = sum(seconds for _, seconds in ordered if seconds < _LEAST)
            yield f"  imports {sum(self.imports.values()):.3f}: {', '.join([*named, f'others {others:.3f}'])}"


_phases: list[Phase] = []
_imports: defaultdict[str, float] = defaultdict(float)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What runs within is a phase of this process's start."""
    begin = time.monotonic()
    try:
        yield
    finally:
        _phases.append(Phase(name, begin, time.monotonic()))


def profile(name: str) -> ProcessProfile:
    """The start of this process so far."""
    begin = process_begin()
    phases = sorted(_phases, key=lambda phase: phase.begin)
    return ProcessProfile(name, begin, time.process_time(), phases, dict(_imports))


def table(profiles: Sequence[ProcessProfile]) -> list[str]:
    """The lines of all processes; times count from the begin of the first one."""
    origin = profiles[0].begin
    return [line for each in profiles for line in each.lines(origin)]


def process_begin() -> float:
    """When this process was started, within 10 ms; without /proc, when its interpreter was."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        age = time.process_time()
    return time.monotonic() - age


def _package(module: str) -> str:
    """The package that a module is counted with: of this project, its room."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "octavo" else 1])


def measure_imports() -> None:
    """From now on the seconds of each package's imports are counted, in this process and in those that it starts."""
    os.environ[VARIABLE] = "1"
    bootstrap: Any = sys.modules["_frozen_importlib"]  # what ``python -X importtime`` measures
    find_and_load, local = bootstrap._find_and_load, threading.local()

    def timed(name: str, import_: Any) -> Any:
        inner, local.inner = getattr(local, "inner", 0.0), 0.0
        begin = time.perf_counter()
        try:
            return find_and_load(name, import_)
        finally:
            taken = time.perf_counter() - begin
            _imports[_package(name)] += taken - local.inner
            local.inner = inner + taken

    bootstrap._find_and_load = timed


if os.environ.get(VARIABLE) == "1":
    measure_imports()
