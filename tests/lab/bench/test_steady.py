"""The guard over measured runs: scripted machines, and a real one with a busy process beside it."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from octavo.lab.bench.steady import Guard, Machine, Still, Usage, listening_process, median_and_range
from tests.busy_machine import once_in_three


@dataclass
class ScriptedMachine(Machine):
    """Two processors on a clock that runs of a script move on."""

    now: float = 0.0
    stolen: float = 0.0
    busy: float = 0.0
    own: float = 0.0
    #: Seconds of the reference.
    pace: float = 0.010
    order: list[str] = field(default_factory=list)

    def reference(self) -> float:
        return self.pace

    def usage(self) -> Usage:
        return Usage(self.now, 2, self.stolen, self.busy, self.own)

    def run(self, name: str, *, others: float = 0.0, stolen: float = 0.0) -> Callable[[], str]:
        """A job of 10 s on both processors, beside which others take these seconds of processor time."""

        def job() -> str:
            self.order.append(name)
            self.now += 10
            self.own += 20 - others - stolen
            self.busy += 20 - stolen
            self.stolen += stolen
            return f"{name} {len(self.order)}"

        return job


def first_then(*jobs: Callable[[], str]) -> Callable[[], str]:
    """The first job at the first call, and so on; the last one for good."""
    calls: Iterator[Callable[[], str]] = iter(jobs)
    last = jobs[-1]
    return lambda: next(calls, last)()


def test_rounds_are_interleaved_and_quiet_runs_are_not_repeated() -> None:
    machine = ScriptedMachine()
    guard = Guard(machine)
    jobs = {name: machine.run(name) for name in "abc"}
    there, back = guard.measure(jobs), guard.measure(jobs, backwards=True)
    assert machine.order == list("abccba")
    assert [run.result for run in there] == ["a 1", "b 2", "c 3"]
    assert [run.result for run in back] == ["a 6", "b 5", "c 4"]
    assert not any(run.is_disturbed for run in there + back) and guard.report() == []


@pytest.mark.parametrize("kind", ["others", "stolen"])
def test_a_run_that_others_slowed_down_is_repeated(kind: str) -> None:
    machine, said = ScriptedMachine(), list[str]()
    guard = Guard(machine, say=said.append)
    jobs = {"a": machine.run("a"), "b": first_then(machine.run("b", **{kind: 2.0}), machine.run("b"))}
    a, b = guard.measure(jobs)
    assert machine.order == ["a", "b", "b"] and (a.attempts, b.attempts) == (1, 2)
    assert b.result == "b 3" and not b.is_disturbed and guard.report() == []
    [line] = said
    assert line.startswith("b was disturbed") and "repeat 1 of 2" in line


def test_a_machine_that_becomes_slower_is_seen_between_runs() -> None:
    """The processor's frequency falls during the second run of three: no other process is seen."""
    machine = ScriptedMachine()

    def slows_down() -> str:
        machine.pace = 0.012
        return machine.run("b")()

    guard = Guard(machine, again=1)
    runs = guard.measure({"a": machine.run("a"), "b": slows_down, "c": machine.run("c")})
    assert machine.order == ["a", "b", "c", "b", "c"]
    assert [run.is_disturbed for run in runs] == [False, True, True]
    assert runs[1].conditions.drift == pytest.approx(0.2)
    first, second, last = guard.report()
    assert first.startswith("* b: reference +20.0%") and second.startswith("* c: ") and "not to be trusted" in last


def test_repeats_are_bounded_and_the_least_disturbed_run_is_kept() -> None:
    machine = ScriptedMachine()
    guard = Guard(machine, again=2)
    job = first_then(*(machine.run("a", others=others) for others in (8.0, 4.0, 6.0, 0.0)))
    [run] = guard.measure({"a": job})
    assert machine.order == ["a"] * 3 and run.result == "a 2" and run.attempts == 3
    assert run.is_disturbed and run.conditions.others == pytest.approx(0.2, abs=0.01)
    assert run.as_json()["disturbed"] is True
    assert not Guard(machine, again=0).measure({"a": machine.run("a", others=0.5)})[0].is_disturbed, "within 5 %"


def test_a_machine_that_was_slow_at_first_is_found_afterwards() -> None:
    machine = ScriptedMachine(pace=0.012)
    guard = Guard(machine)
    [early] = guard.measure({"early": machine.run("early")})
    assert not early.is_disturbed
    machine.pace = 0.010
    later = [guard.measure({"later": machine.run("later")})[0] for _ in range(3)]
    assert early.is_disturbed and not any(run.is_disturbed for run in later)


def test_what_cannot_be_seen_is_said_to_be_unknown() -> None:
    class Blind(ScriptedMachine):
        def usage(self) -> Usage:
            return super().usage()._replace(processors=0)

    machine = Blind()
    [run] = Guard(machine).measure({"a": machine.run("a", others=10.0)})
    assert run.conditions[1:] == (None, None) and "other processes unknown" in str(run.conditions)
    assert not Guard(Still()).measure({"a": lambda: 1})[0].is_disturbed


def test_medians_have_the_range_of_their_runs() -> None:
    assert median_and_range([2.5, 2.0, 4.0]) == "2.5 [2, 4]"
    assert median_and_range([1.0, 2.0], "{:.2f}".format) == "1.50 [1.00, 2.00]" and median_and_range([7.0]) == "7"


def test_processor_time_of_children_is_not_that_of_others() -> None:
    machine = Machine()
    before = machine.usage()
    if not before.clock or not before.processors:
        pytest.skip("/proc/stat is not readable, or a quota is below its processors")
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    used = machine.usage().own - before.own
    assert 0.25 <= used < 5, "a child that was waited for counts as its own"
    assert machine.reference() > 0


def test_the_process_behind_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listening_process(port) == os.getpid()
    assert listening_process(port) is None


@pytest.mark.slow
def test_a_busy_process_in_the_middle_of_a_run_is_caught() -> None:
    """A process spins during the second of three runs; it is no child of the measured process."""
    spin = "import os, time\nif os.fork() == 0:\n    end = time.time() + 1.0\n    while time.time() < end: pass"

    def busy() -> float:
        start, machine = time.process_time(), Machine()
        while time.process_time() - start < 1.0:
            machine.reference()
        return time.process_time() - start

    def beside_another() -> float:
        subprocess.run([sys.executable, "-c", spin], check=True)  # its child is nobody's when it has ended
        return busy()

    def when_it_has_ended() -> float:
        time.sleep(1)
        return busy()

    def measure() -> dict[str, bool]:
        guard = Guard(again=0)
        runs = guard.measure({"a": busy, "b": beside_another, "c": when_it_has_ended})
        quiet, disturbed, after = runs
        if disturbed.others is None:
            pytest.skip("/proc/stat is not readable, or a quota is below its processors")
        assert statistics.fmean(run.result for run in runs) >= 1.0
        return {
            f"the second is caught: {disturbed.conditions}": disturbed.is_disturbed and disturbed.others > 0.1,
            f"the first is not: {quiet.conditions}": not quiet.is_disturbed,
            f"the last is not: {after.conditions}": not after.is_disturbed,
        }

    once_in_three(measure)
