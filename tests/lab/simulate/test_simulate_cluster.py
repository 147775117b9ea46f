"""``octavo simulate --replicas`` and ``octavo simulate plan``: tables, JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main

WORDS = ["--profile", "llama-3.1-8b-h100", "--num-requests", "60", "--request-rate", "60"]


def test_a_cluster_is_simulated_with_everything_that_can_happen_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["simulate", *WORDS, "--replicas", "2,1:llama-3.1-8b-h100", "--prefill-replicas", "2", "--router", "prefix"]
    call += ["--transfer-gb-s", "5", "--fail", "2@0.5:1", "--fail", "mtbf:3,mttr:0.5", "--ttft-limit", "100"]
    file = tmp_path / "out.json"
    assert main([*call, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["requests"] + sum(found["failed"].values()) == 60
    assert [r["role"] for r in found["replicas"]] == ["prefill"] * 2 + ["decode"] * 3
    assert found["transfers"] >= 60 and found["replicas"][2]["failures"] >= 1
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "5 replicas, router prefix" in out and "KV caches sent" in out and "failures" in out and "a replica" in out


def test_a_plan_prints_what_was_tried_and_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    call = ["simulate", "plan", *WORDS, "--tpot-limit", "6.5", "--thorough"]
    assert main(call) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([*call, "--json", str(file)]) == 0
    plan = json.loads(file.read_text())
    assert lines[-2].startswith(f"{plan['replicas']} replicas") and lines[-1].endswith("of 60 requests each")
    assert plan["requests"] == 60 and plan["seeds"] == [0, 1, 2] and plan["settled"] is None
    assert plan["replicas"] == max(each["replicas"] for each in plan["plans"])
    assert len(lines) == 3 + sum(1 + len(each["tried"]) for each in plan["plans"])
    assert main(["simulate", "plan", *WORDS, "--ttft-limit", "0.001", "--most", "2"]) == 1
    assert "even alone" in capsys.readouterr().out


def test_a_plan_is_a_first_look_unless_it_shall_be_thorough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["simulate", "plan", *WORDS, "--tpot-limit", "6.5"]
    at = call.index("--num-requests")
    del call[at : at + 2]
    assert main([*call, "--json", "-"]) == 0
    said = capsys.readouterr()
    plan = json.loads(said.out)
    assert (plan["requests"], plan["seeds"], plan["settled"]) == (1000, [0], None)
    assert "1000 requests, seed 0" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--router", "prefix"], "--router needs --replicas"),
        (["--replicas", "none"], "COUNT"),
        (["--replicas", "2", "--router", "best"], "unknown router"),
        (["--replicas", "2", "--autoscale", "1,4"], "--autoscale is"),
        (["--replicas", "2", "--processes", "3"], "processes (3)"),
        (["--replicas", "2", "--autoscale", "1,4,requests:5", "--processes", "2"], "leave processes at 1"),
        (["--replicas", "2", "--ttft-limit", "0"], "above 0"),
        (["plan"], "nothing limits"),
    ],
)
def test_a_wrong_call_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = [words.pop(0)] if words == ["plan"] else []
    assert main(["simulate", *first, *WORDS, *words]) == 2
    assert message in capsys.readouterr().err
