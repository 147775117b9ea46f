"""What kills, stops and starves the processes of a server, at times that a seed decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.lab.bench.chaos_processes import server_processes
from octavo.lab.bench.chaos_stores import FAULTS as STORE_FAULTS
from octavo.lab.bench.chaos_stores import ChaosStores

#: kill: SIGKILL. stop: SIGSTOP, for ever. pause: SIGSTOP, and SIGCONT later, before or after it is taken to hang.
#: starve: lowest priority, and processes beside it that take all processors.
FAULTS = ("kill", "stop", "pause", "starve")
_WEIGHTS = {"kill": 6, "stop": 2, "pause": 2, "starve": 2} | dict.fromkeys(STORE_FAULTS, 2)
#: Processes that may be hit. The front end is not: it is the truth of every request.
VICTIMS = ("core", "worker")
#: Seconds that a process starves.
_STARVE_SECONDS = 4.0
#: A pause lasts up to so many times the seconds after which a process is taken to hang.
_LONGEST_PAUSE = 1.5
#: One of so many faults comes while the server recovers from the one before; the others wait until streams go on, or
#: no request would ever end where that takes longer than the interval.
_ONE_TOO_SOON = 4
_LEAST_PRIORITY = 19


@dataclass(slots=True)
class Fault:
    """One fault. Times in seconds of ``time.perf_counter()``."""

    kind: str
    #: core or worker; disk or shared, of a KV store.
    role: str
    #: 0 of a KV store.
    pid: int
    at: float
    #: When the process was let go on; the same as ``at`` where that is never.
    until: float

    @property
    def name(self) -> str:
        """Such as ``kill core``."""
        return f"{self.kind} {self.role}"


class Monkey:
    """Hits a random process of a server at random times. ``close`` lets all go on that it has not killed."""

    def __init__(
        self,
        pid: int,
        *,
        interval: float,
        seed: int,
        hang: float,
        kinds: tuple[str, ...],
        goes_on: Callable[[float], bool],
        told: Callable[[Fault], object],
        stores: ChaosStores | None = None,
    ) -> None:
        """Of the server whose front end is ``pid``.

        Args:
            pid: process id.
            interval: mean seconds between faults.
            seed: decides times, kinds and victims.
            hang: seconds after which the server takes a stopped process to hang.
            kinds: some of ``FAULTS``; with ``stores``, of their faults, too.
            goes_on: whether streams have gone on since a time (``time.perf_counter()``).
            told: called with each fault.
            stores: the server's KV stores.
        """
        self.faults: list[Fault] = []
        self._pid, self._interval, self._hang, self._kinds = pid, interval, hang, kinds
        self._random = random.Random(f"monkey {seed}")
        self._goes_on, self._told, self._stores = goes_on, told, stores
        self._stopped: list[psutil.Process] = []
        self._hogs: list[subprocess.Popen[bytes]] = []

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._interval))
            await self.hit()
            last = time.perf_counter()
            if self._random.randrange(_ONE_TOO_SOON):
                while not self._goes_on(last):
                    await asyncio.sleep(0.1)

    async def hit(self) -> None:
        """One fault; waits for its end."""
        kind = self._random.choices(self._kinds, [_WEIGHTS[kind] for kind in self._kinds])[0]
        if kind in STORE_FAULTS:
            assert self._stores is not None
            now = time.perf_counter()
            fault = Fault(kind, STORE_FAULTS[kind], 0, now, now)
            self.faults.append(fault)
            self._told(fault)
            await self._stores.hit(kind, self._random)
            fault.until = time.perf_counter()
            return
        role, victim = await self._victim()
        now = time.perf_counter()
        fault = Fault(kind, role, victim.pid, now, now)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
            self._begin(kind, victim)
            self.faults.append(fault)
            self._told(fault)
            if kind == "pause":
                await asyncio.sleep(self._random.uniform(0.1, _LONGEST_PAUSE * self._hang))
                _let_go_on(victim)
                self._stopped.remove(victim)
            elif kind == "starve":
                try:
                    await asyncio.sleep(_STARVE_SECONDS)
                finally:
                    self._end_hogs()
                    _set_priority(victim.pid, os.getpriority(os.PRIO_PROCESS, 0))
            if kind in ("pause", "starve"):
                fault.until = time.perf_counter()

    def close(self) -> None:
        """Lets stopped processes go on, and ends what starves others."""
        self._end_hogs()
        for process in self._stopped:
            _let_go_on(process)
        self._stopped.clear()

    async def _victim(self) -> tuple[str, psutil.Process]:
        """A process that lives, as soon as there is one."""
        while True:
            processes = sorted(
                ((role, process) for role, process in server_processes(self._pid) if role in VICTIMS),
                key=lambda item: item[1].pid,
            )
            processes = [(role, process) for role, process in processes if process not in self._stopped]
            if processes:
                return self._random.choice(processes)
            await asyncio.sleep(0.1)

    def _begin(self, kind: str, victim: psutil.Process) -> None:
        if kind == "kill":
            victim.kill()
        elif kind == "starve":
            _set_priority(victim.pid, _LEAST_PRIORITY)
            for _ in range(os.cpu_count() or 1):
                self._hogs.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        else:
            victim.send_signal(signal.SIGSTOP)
            self._stopped.append(victim)

    def _end_hogs(self) -> None:
        for hog in self._hogs:
            hog.kill()
            hog.wait()
        self._hogs.clear()


def _let_go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _set_priority(pid: int, niceness: int) -> None:
    """Of all threads of a process; what may not be raised again stays as it is."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
