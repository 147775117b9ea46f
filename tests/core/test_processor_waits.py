"""How long processes are kept from running by others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from octavo.process.children import ProcessorWaits
from tests.busy_machine import eventually

SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
SLEEP = "import time\ntime.sleep(60)"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen[bytes]], program: str) -> int:
    """A process on the first processor that this one may use."""
    processor = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        preexec_fn=lambda: os.sched_setaffinity(0, {processor}),
        start_new_session=True,
    )
    processes.append(process)
    return process.pid


def waited(pid: int, seconds: float) -> float:
    waits = ProcessorWaits()
    assert waits.since_last([pid]) == 0.0
    time.sleep(seconds)
    return waits.since_last([pid])


def test_who_shares_a_processor_waits_for_it_and_who_sleeps_does_not(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    idle = start(processes, SLEEP)
    busy = [start(processes, SPIN) for _ in range(4)]
    eventually(lambda: waited(busy[0], 0.5) > 0.2)
    assert waited(idle, 0.5) < 0.05


def test_the_processes_that_it_has_started_count(processes: list[subprocess.Popen[bytes]]) -> None:
    parent = start(processes, PARENT)
    for _ in range(3):
        start(processes, SPIN)
    try:
        eventually(lambda: waited(parent, 0.5) > 0.2)
    finally:
        for child in psutil.Process(parent).children():
            child.kill()


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert waited(process.pid, 0.01) == 0.0
