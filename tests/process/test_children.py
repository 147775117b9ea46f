"""How long processes are kept from running by others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from octavo.process.children import ProcessorWaits, finish_in_thread
from tests.busy_machine import PATIENCE, eventually

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
        [sys.executable, "-c", program], preexec_fn=lambda: os.sched_setaffinity(0, {processor}), start_new_session=True
    )
    processes.append(process)
    return process.pid


def waited(pid: int, seconds: float) -> float:
    waits = ProcessorWaits()
    assert waits.since_last([pid]) == 0.0
    time.sleep(seconds)
    return waits.since_last([pid])


def test_who_shares_a_processor_waits_for_it_and_who_sleeps_does_not(processes: list[subprocess.Popen[bytes]]) -> None:
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


# Calls in threads whose end is waited for.


class Source:
    """What a thread uses until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.ended, self.closed = (threading.Event() for _ in range(4))

    def use(self) -> Source:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        self.ended.set()
        return self

    def close(self) -> None:
        self.closed.set()


def test_the_result_and_the_error_are_those_of_the_call() -> None:
    assert asyncio.run(finish_in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(finish_in_thread(divmod, 7, 0))


def test_who_is_cancelled_waits_for_the_thread_and_its_result_is_closed() -> None:
    source = Source()

    async def cancel() -> None:
        task = asyncio.create_task(finish_in_thread(source.use))
        await asyncio.to_thread(source.begun.wait, PATIENCE)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        source.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.ended.is_set()
        assert source.closed.is_set()

    asyncio.run(cancel())
