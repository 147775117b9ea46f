"""Commands that take long say on standard error what they do, and leave standard output to the result."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.lab.commands.waiting import Waiting, duration, seconds_here
from octavo.lab.simulate.step_profile import format_profile
from tests.lab.simulate.test_profile import profile

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_a_phase_where_standard_error_is_no_terminal(capsys: Capture) -> None:
    with Waiting("6 runs", 6, seconds=100.0) as waiting:
        for phase in ("first", "second"):
            waiting.phase(phase)
            for _ in range(3):
                waiting.add()
        waiting.print("result")
    said = capsys.readouterr()
    assert said.out == "result\n"
    assert said.err.splitlines() == [
        "octavo: 6 runs, about 2 min",
        "octavo: first",
        "octavo: second (3 of 6 done)",
    ]


def test_without_an_estimate_it_is_made_of_the_first_units(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 100.0, 102.0, 999.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with Waiting("5 runs", 5, skip=1) as waiting:  # reads the clock twice
        waiting.add()  # the first, at 100 s: not counted
        assert "left" not in capsys.readouterr().err
        waiting.add()  # 2 s; three more
        assert capsys.readouterr().err == "octavo: about 6 s left\n"
        waiting.add(3)
    assert capsys.readouterr().err == ""


def test_a_bar_where_it_is_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with Waiting("4 runs", 4, seconds=1.0) as waiting:
        waiting.phase("the phase")
        waiting.add(2)
        waiting.add(4)  # more than were known of
    assert "the phase:" in shown.getvalue() and "0/4" in shown.getvalue()
    assert shown.getvalue().endswith("\r"), "the bar is taken away"
    assert capsys.readouterr().out == ""


def test_seconds_of_this_machine() -> None:
    assert 0 < seconds_here(1e-3) < seconds_here(1.0)
    assert [duration(seconds) for seconds in (0.1, 20, 200, 20_000)] == ["1 s", "20 s", "3 min", "5.6 h"]


def test_simulations_announce_their_phases(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "cpu.json").write_bytes(format_profile(profile(kv_cache_tokens=4096)))
    words = ["--profile", str(tmp_path / "cpu.json"), "--num-requests", "2", "--json", "-"]
    assert main(["simulate", "preemption", *words]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["repeats"] == 1
    first, *phases = said.err.splitlines()
    assert "42 simulations" in first and ", about " in first
    assert [line.split(", ")[1].split(" (")[0] for line in phases] == ["short", "long prompts", "long answers"]


def test_a_first_look_at_policies_is_short_and_thorough_is_all_of_it(capsys: Capture) -> None:
    words = ["--places", "simulated", "--policies", "fcfs", "--json", "-"]
    assert main(["bench", "policies", *words]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [(row["scenario"], len(row["runs"])) for row in found["rows"]] == [("sparse-short", 1)]
    assert "simulated, sparse-short" in said.err
    assert main(["bench", "policies", *words, "--thorough", "--repeats", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["scenario"] for row in found["rows"]] == ["dense-short", "dense-long", "sparse-short", "sparse-long"]
