"""The pool of threads that the CPU kernels share: where its threads may run, and that they rest between steps."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.busy_machine import PATIENCE, once_in_three

_cpu: Any = pytest.importorskip("octavo._cpu")
CpuKernels: Any = importlib.import_module("octavo.kernels.cpu.backend").CpuKernels

TASKS = Path("/proc/self/task")
linux = pytest.mark.skipif(not TASKS.exists(), reason="reads Linux's /proc")


@pytest.fixture(autouse=True)
def _pool() -> Iterator[None]:
    threads = _cpu.num_threads()
    yield
    _cpu.set_threads(threads)


def processors(task: str) -> set[int]:
    """Those that a thread of this process may use."""
    [line] = [x for x in (TASKS / task / "status").read_text().splitlines() if x.startswith("Cpus_allowed_list:")]
    runs = [run.split("-") for run in line.split(":")[1].strip().split(",")]
    return {cpu for run in runs for cpu in range(int(run[0]), int(run[-1]) + 1)}


def new_threads(size: int, pin: bool) -> list[str]:
    """Sets the pool's size; the threads that it started."""
    _cpu.set_threads(1)
    before = set(os.listdir(TASKS))
    _cpu.set_threads(size, pin)
    return sorted(set(os.listdir(TASKS)) - before, key=int)


def settled(task: str, expected: set[int]) -> bool:
    """Whether a thread comes to be bound so; a new thread binds itself when it first runs."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if processors(task) == expected:
            return True
        time.sleep(0.01)
    return False


@linux
def test_pinned_threads_keep_to_a_processor_each_and_others_do_not() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    threads = new_threads(len(allowed) + 1, pin=True)
    assert len(threads) == len(allowed)
    for thread, processor in zip(threads[:-1], allowed[1:], strict=True):
        assert settled(thread, {processor})
    # There is one more than there are processors.
    assert settled(threads[-1], set(allowed))
    assert os.sched_getaffinity(0) == set(allowed)
    for thread in new_threads(len(allowed), pin=False):
        assert settled(thread, set(allowed))


@linux
@pytest.mark.parametrize("pin", [True, False])
def test_the_caller_is_pinned_during_a_step_only(pin: bool) -> None:
    allowed = os.sched_getaffinity(0)
    _cpu.set_threads(2, pin)
    rows = torch.zeros(20_000, 64)
    tape = _cpu.Tape()
    for _ in range(300):
        tape.append(_cpu.activate(rows.data_ptr(), 64, rows.data_ptr(), 64, _cpu.Dtype.f32, _cpu.Activation.silu))
    seen: list[set[int]] = []
    running, done = threading.Event(), threading.Event()
    me = str(threading.get_native_id())

    def watch() -> None:
        running.wait()
        while not done.is_set():
            seen.append(processors(me))

    watcher = threading.Thread(target=watch)
    watcher.start()
    running.set()
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 50 and time.monotonic() < deadline:
        tape.run(_cpu.Step(len(rows)))
    done.set()
    watcher.join()
    # Not pinned, it is bound for moments: a thread that waits for a preempted caller moves it to its own processor.
    bound = seen.count({min(allowed)})
    assert bound > 0 if pin or len(allowed) == 1 else bound < len(seen) / 2
    assert os.sched_getaffinity(0) == allowed


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """That many processes at this one's priority that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def product_steps(rows: torch.Tensor, weight: torch.Tensor, layers: int) -> tuple[Any, list[torch.Tensor]]:
    """A tape of products, each of the result before it; and what it writes. All of it must be kept."""
    n, k = weight.shape
    packed = _cpu.pack_linear([(weight.data_ptr(), n, k)], k, _cpu.Dtype.f32)
    results = [rows, *(torch.zeros(len(rows), n) for _ in range(layers))]
    tape = _cpu.Tape()
    for x, out in pairwise(results):
        tape.append(_cpu.linear(packed, x.data_ptr(), k, _cpu.Dtype.f32, out.data_ptr(), n, _cpu.Dtype.f32))
    return tape, results


@linux
@pytest.mark.parametrize("threads", [2, 3])
def test_results_are_the_same_beside_busy_processes(threads: int) -> None:
    rows, weight = torch.randn(8, 512), torch.randn(512, 512) / 512**0.5
    tape, results = product_steps(rows, weight, layers=50)
    _cpu.set_threads(1)
    tape.run(_cpu.Step(len(rows)))
    expected = [x.clone() for x in results]
    allowed = os.sched_getaffinity(0)
    _cpu.set_threads(threads)
    with busy_processes(3):
        deadline = time.monotonic() + 0.7
        while time.monotonic() < deadline:
            for x in results[1:]:
                x.zero_()
            tape.run(_cpu.Step(len(rows)))
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert os.sched_getaffinity(0) == allowed


@linux
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_busy_process_takes_no_more_than_its_share() -> None:
    first_two = set(sorted(os.sched_getaffinity(0))[:2])
    rows, weight = torch.randn(8, 512), torch.randn(512, 512) / 512**0.5
    tape, _results = product_steps(rows, weight, layers=100)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(100):
            tape.run(_cpu.Step(len(rows)))
        return time.perf_counter() - start

    def measure() -> dict[str, bool]:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, first_two)
        try:
            _cpu.set_threads(2)
            alone = min(seconds() for _ in range(3))
            with busy_processes(1):
                beside = sum(seconds() for _ in range(5)) / 5
        finally:
            os.sched_setaffinity(0, allowed)
        return {f"at most 1.5 times the {alone:.3f} s alone, not {beside:.3f} s": beside < 1.5 * alone}

    once_in_three(measure)


def test_backend_says_whether_its_threads_are_pinned() -> None:
    kernels = CpuKernels()
    kernels.set_threads(2, pin=True)
    assert kernels.describe().endswith("2 threads, pinned)")
    kernels.set_threads(1)
    assert kernels.describe().endswith("1 threads)")


@pytest.mark.slow
def test_threads_rest_between_steps() -> None:
    _cpu.set_threads(4)
    rows = torch.zeros(1000, 256)
    tape = _cpu.Tape()
    silu = _cpu.activate(rows.data_ptr(), 256, rows.data_ptr(), 256, _cpu.Dtype.f32, _cpu.Activation.silu)
    tape.append(silu)
    # On its own, as an operation outside of a tape, too.
    for run in (tape.run, silu.run):

        def measure(run: Callable[[Any], object] = run) -> dict[str, bool]:
            for _ in range(10):
                run(_cpu.Step(len(rows)))
            before = time.process_time()
            time.sleep(1)
            seconds = time.process_time() - before
            return {f"less than 0.2 s of processor time in a second, not {seconds} s": seconds < 0.2}

        once_in_three(measure)
