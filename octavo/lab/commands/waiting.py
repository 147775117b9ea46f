"""What a command that takes long says meanwhile, on standard error: an estimate, and how far it is."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from octavo.cli.inputs import notice
from octavo.cli.parsing import Parser

#: For the first line of a run with few requests.
FIRST_LOOK = " (a first look; --thorough for figures to publish)"
#: Steps of the loop whose time is the unit of ``seconds_here``.
_STEPS = 200_000
#: How often it is run: for a tenth of a second, in which other processes have their turns.
_ROUNDS = 10


def add_thorough_flag(parser: Parser, what: str) -> None:
    """Adds ``--thorough``; ``what`` it stands for."""
    parser.add_argument("--thorough", action="store_true", help=f"{what}: for figures to publish; takes minutes")


def seconds_here(cost: float) -> float:
    """Seconds that this machine, as busy as it is, takes for a computation in Python.

    ``cost``: its time in units of a loop of ``_STEPS`` additions, measured once on any machine.
    """

    start, total = time.perf_counter(), 0
    for i in range(_ROUNDS * _STEPS):
        total += i * i % 7
    return cost * (time.perf_counter() - start) / _ROUNDS


class Waiting:
    """Announces a long run: a bar on a terminal, elsewhere a line for each phase; standard output stays clean."""

    def __init__(
        self,
        what: str,
        total: int | None,
        *,
        seconds: float | None = None,
        first: int = 1,
        skip: int = 0,
        shown: bool = True,
    ) -> None:
        """Nothing is said before ``with``.

        Args:
            what: is waited for, as in "24 simulations".
            total: units of it, as far as is known; more are counted too.
            seconds: the estimate; None: it is made of the time of the first units.
            first: how many units run at once, after which that estimate is made.
            skip: units before those, which take longer than the others as something is loaded.
            shown: false: nothing is said, as it is short.
        """
        self._shown = shown
        self._what, self._total, self._seconds = what, total, seconds
        self._first, self._skip = first, skip
        self._done = 0
        self._bar: Any = None
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        about = "" if self._seconds is None else f", about {duration(self._seconds)}"
        self.say(f"{self._what}{about}")
        if self._shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, leave=False, dynamic_ncols=True)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def phase(self, name: str) -> None:
        """Another phase begins."""
        if self._bar is not None:
            self._bar.set_description(name)
        else:
            of = f" of {self._total}" if self._total is not None else ""
            self.say(f"{name} ({self._done}{of} done)" if self._done else name)

    def add(self, count: int = 1) -> None:
        """So many units are done."""
        self._done += count
        if self._total is not None and self._done > self._total:
            self._total = self._done
        counted = self._done - self._skip
        if counted <= 0:
            self._start = time.perf_counter()
        elif self._seconds is None and self._total is not None and self._first <= counted and self._done < self._total:
            self._seconds = (time.perf_counter() - self._start) / counted * (self._total - self._done)
            self.say(f"about {duration(self._seconds)} left")
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.update(count)

    def print(self, text: str) -> None:
        """Writes a result on standard output."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)

    def say(self, text: str) -> None:
        """Writes a line on standard error."""
        if self._bar is not None:
            self._bar.clear()
        if self._shown:
            notice(f"octavo: {text}")


def duration(seconds: float) -> str:
    """Such as ``20 s`` or ``3 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
