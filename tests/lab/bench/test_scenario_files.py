"""Scenarios of one's own: the same words in flags, YAML and Python, in every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.lab.bench.policies import catalogue, scenario_files
from octavo.lab.workloads.arrivals import Gamma
from octavo.lab.workloads.lengths import Uniform, parse_inputs
from octavo.lab.workloads.workload import Workload

LUNCH = """\
name: lunch
options: {max_num_seqs: 4}
max_tokens: 512
traffic:
  - {name: chats, load: 0.9, num-requests: 30, input-len: chat, output-len: "uniform:4,60"}
  - {name: reports, request_rate: 0.5, num_requests: 3, input_len: 50, users: r=1, request-class: ["1,priority:1"]}
"""
PYTHON = """\
from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.workloads.work_items import WorkItem

ONE = Scenario("one", "a request", {}, lambda capacity, seed: [WorkItem(at=0.0, input_len=4, output_len=2)])
BOTH = [ONE, {"name": "two", "traffic": {"num-requests": 2, "input-len": 4}}]
NONE = 7
"""


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_file_says_what_its_words_say(tmp_path: Path) -> None:
    [scenario] = catalogue.find([write(tmp_path, LUNCH)])
    assert (scenario.name, scenario.max_tokens, scenario.load) == ("lunch", 512, 0.9)
    assert scenario.options == {"max_num_seqs": 4} and scenario.outputs == Uniform(4, 60)
    chats = Workload(
        requests=30,
        arrivals=Gamma(0.9 * 7.0),
        inputs=parse_inputs("chat"),
        outputs=Uniform(4, 60),
        name="chats",
        seed=3,
    )
    items = list(scenario.make(7.0, 3))
    assert [item for item in items if item.user is None] == list(chats)
    assert [(item.user, item.priority) for item in items if item.user] == [("r", 1)] * 3
    assert items == sorted(items, key=lambda item: item.at) == list(scenario.make(7.0, 3))


def test_a_module_has_scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, PYTHON, "lunches.py")
    monkeypatch.chdir(tmp_path)
    one, two = catalogue.find(["lunches:BOTH"])
    assert [one.name, two.name] == ["one", "two"] and len(list(two.make(1.0, 0))) == 2
    assert [each.name for each in catalogue.find(["lunches:ONE", "sparse-short"])] == ["one", "sparse-short"]
    with pytest.raises(ConfigError, match="another scenario 'one'"):
        catalogue.find(["lunches:ONE", "lunches:BOTH"])
    with pytest.raises(ConfigError, match="lunches:NONE: a scenario has the names"):
        catalogue.find(["lunches:NONE"])
    with pytest.raises(ConfigError, match="cannot be imported"):
        catalogue.find(["lunches:ABSENT"])


def test_a_trace_is_beside_its_file(tmp_path: Path) -> None:
    write(tmp_path, "arrival_time,input_tokens,output_tokens\n3,5,2\n4,6,1\n", "trace.csv")
    [scenario] = scenario_files.load(write(tmp_path, "traffic: {trace: trace.csv}"))
    assert [(i.at, i.input_len, i.output_len) for i in scenario.make(float("inf"), 0)] == [(0.0, 5, 2), (1.0, 6, 1)]
    assert scenario.name == "mine" and scenario.about == "trace trace.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not YAML"),
        ("7", "mine.yaml: a scenario has the names"),
        ("[]", "has no scenario"),
        ("{trafic: {}}", "unknown name 'trafic'"),
        ("{traffic: []}", r"mine.yaml.traffic must be"),
        ("[{traffic: {}}, {traffic: {requestrate: 4}}]", r"\[1\].traffic\[0\]: unknown name .*'request-rate'"),
        ("{traffic: {input-len: nine}}", r"traffic\[0\]: a length is"),
        ("{traffic: {load: -1}}", "share of the capacity"),
        ("{traffic: {load: 0.5, rate: 3}}", "leave out rate"),
        ("{traffic: {}, options: {max_seqs: 3}}", "options: engine options by name, not 'max_seqs'"),
        ("{traffic: {}, max_tokens: many}", "max_tokens must be an integer"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario_files.load(write(tmp_path, text))


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_simulate_and_the_lab_run_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a file, by name, and from flags."""
    flags = ["--request-rate", "3", "--num-requests", "20", "--input-len", "chat", "--output-len", "20"]
    for of_simulate, of_lab in (
        (["--scenario", file := write(tmp_path, LUNCH)], ["--scenarios", file]),
        (["--scenario", "sparse-short"], ["--scenarios", "sparse-short"]),
        (flags, flags),
    ):
        runs = figures(capsys, "simulate", *of_simulate, "--compare", "srpt,sjf", "--seed", "2")["runs"]
        lab = figures(
            capsys, "bench", "policies", "--places", "simulated", *of_lab, "--policies", "fcfs,srpt,sjf", "--seed", "2"
        )
        for row in lab["rows"]:
            assert runs[row["policy"]]["e2e"]["mean"] == pytest.approx(row["median"]["mean_latency"])
    assert lab["scenarios"] == {"traffic": "--request-rate 3.0 --num-requests 20 --input-len chat --output-len 20"}


def test_any_traffic_runs_on_the_engine(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": t / 100, "input_len": 5, "output_len": 3} for t in range(6)]
    trace = write(tmp_path, "\n".join(map(json.dumps, lines)), "trace.jsonl")
    words = ["bench", "policies", str(tiny_model), "--policies", "fcfs,srpt", "--again", "0", "--repeats", "1"]
    words += ["--num-threads", "1", "--trace", trace, "--num-requests", "5"]
    for row in figures(capsys, *words)["rows"]:
        assert row["scenario"] == "traffic" and row["median"]["requests"] == 5 and row["median"]["failed"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--scenario", "classic"], "one of dense-short"),
        (["simulate", "--scenario", "sparse-short", "--turns", "3"], "leave out --turns 3"),
        (["simulate", "--scenario", "sparse-short", "--replicas", "2"], "leave out --replicas"),
        (["bench", "policies", "--places", "simulated", "--num-requests", "0"], "--num-requests must be at least 1"),
        (["bench", "serve", "--model", "m", "--scenario", "heavy-tailed-90"], "does not know"),
    ],
)
def test_wrong_calls_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
