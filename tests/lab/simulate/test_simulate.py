"""``octavo simulate``: equal calls print equal figures, in any process; what does not count is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.lab.commands import simulate_report
from octavo.lab.simulate.step_profile import load_profile
from tests.busy_machine import PATIENCE
from tests.lab.plots.test_report import Page

WORDS = ["simulate", "--profile", "llama-3.1-8b-h100", "--num-requests", "50", "--request-rate", "30"]
LENGTHS = ["--input-len", "chat", "--output-len", "chat", "--seed", "4", "--scheduling-policy", "srpt", "--users", "3"]


def test_equal_calls_give_equal_figures_in_every_process(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    call = [*WORDS, *LENGTHS, "--num-gpu-blocks-override", "400", "--json"]
    assert main([*call, str(files[0])]) == 0
    started = [
        subprocess.Popen([sys.executable, "-m", "octavo", *call, str(file)], env={**os.environ, "PYTHONHASHSEED": seed})
        for file, seed in zip(files[1:], ("1", "2"), strict=True)
    ]
    assert [process.wait(PATIENCE) for process in started] == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    figures = json.loads(files[0].read_text())
    assert figures["requests"] == 50 and figures["preemptions_by_recompute"] + figures["preemptions_by_swap"] > 0
    assert len(figures["series"]["seconds"]) == len(figures["series"]["waiting"]) > 10


def test_the_table_names_the_profile_and_how_far_it_can_be_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--mode", "server", "--max-tokens", "none"]) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-8b-shape on NVIDIA H100" in out and "computed, not measured" in out
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["ttft", "tpot", "itl", "e2e"]


def test_a_profile_is_computed_for_a_device_that_is_not_at_hand(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    words = ["simulate", "profile", "opt-125m-shape", "--bandwidth-gb-s", "300", "--tflops", "60", "--memory-gb", "16"]
    assert main([*words, "--json", str(file)]) == 0
    assert load_profile(str(file)).origin == "computed"
    assert main(["simulate", "--profile", str(file), "--num-requests", "3"]) == 0


def test_a_report_has_the_figures_of_the_json_and_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, plots, figures = tmp_path / "r.html", tmp_path / "plots", tmp_path / "f.json"
    call = [*WORDS, *LENGTHS, "--request-class", "0.5,ttft:30", "--report", str(page), "--json", str(figures)]
    assert main(call) == 0
    first, found = page.read_bytes(), json.loads(figures.read_text())
    assert main(call) == 0 and page.read_bytes() == first
    shown = Page(first.decode())
    assert shown.external() == []
    latencies, counts, options = shown.tables
    for name, *values in latencies[1:]:
        assert [float(value) for value in values] == [found[name][part] for part in latencies[0][1:]]
    wanted = [found[name] for name in simulate_report.COUNTS if found[name] is not None]
    assert [json.loads(value) for _, value in counts[1:]] == wanted and 0 < found["goodput_share"] < 1
    assert ["scheduling_policy", "srpt"] in options and ["request_rate", "30.0"] in options
    assert "octavo simulate --profile llama-3.1-8b-h100" in shown.text
    assert main([*WORDS, *LENGTHS, "--num-requests", "5", "--plots", str(plots)]) == 0
    assert {path.name for path in plots.iterdir()} == {"latencies.png", "timeline.png", "service.png"}


def test_policies_are_compared_on_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-requests", "30", "--max-num-seqs", "2", "--output-len", "uniform:1,80"]
    assert main([*WORDS, *few, "--compare", "sjf,fcfs", "--json", str(tmp_path / "all.json")]) == 0
    runs = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert list(runs) == ["fcfs", "sjf"] and runs["sjf"]["e2e"]["mean"] < runs["fcfs"]["e2e"]["mean"]
    for policy, figures in runs.items():
        assert main([*WORDS, *few, "--scheduling-policy", policy, "--json", str(tmp_path / "one.json")]) == 0
        alone = json.loads((tmp_path / "one.json").read_text())
        assert {name: alone[name] for name in figures} == figures
    capsys.readouterr()
    assert main([*WORDS, *few, "--compare", "sjf"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in table] == ["policy", "fcfs", "sjf", "simulated"]
    assert float(table[2][1]) == pytest.approx(runs["sjf"]["requests_per_s"], rel=1e-4)


def test_a_report_of_several_policies_has_them_in_one_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, figures = tmp_path / "r.html", tmp_path / "f.json"
    few = ["--num-requests", "20", "--output-len", "8", "--compare", "lcfs"]
    assert main([*WORDS, *few, "--report", str(page)]) == 0
    assert main([*WORDS, *few, "--json", str(figures)]) == 0
    runs, shown = json.loads(figures.read_text())["runs"], Page(page.read_text("utf-8"))
    assert shown.external() == [] and [tag for tag, _ in shown.tags].count("svg") == 3
    headers, *rows = shown.tables[0]
    assert [row[0] for row in rows] == list(runs) == ["fcfs", "lcfs"]
    assert [float(row[headers.index("ttft p99")]) for row in rows] == [run["ttft"]["p99"] for run in runs.values()]


def test_a_report_without_matplotlib_or_a_folder_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert main([*WORDS, "--report", str(tmp_path / "r.html")]) == 2
    out, error = capsys.readouterr()
    assert "octavo[plot]" in error and not out
    pytest.importorskip("matplotlib")
    assert main([*WORDS, "--report", str(tmp_path / "none" / "r.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "smollm2-135m"], "--model does not count"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size does not count"),
        (["--profile", "nowhere"], "no profile 'nowhere'"),
        (["--input-len", "4000", "--max-model-len", "100"], "max_model_len"),
        (["extra"], "unexpected argument"),
        (["profile"], "--bandwidth-gb-s"),
        (["--max-tokens", "some"], "exact, none or an integer"),
        (["--compare", "sjf,best"], "unknown scheduling_policy 'best'"),
    ],
)
def test_a_wrong_call_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = [] if words == ["profile"] else ["--profile", "llama-3.1-8b-h100"]
    assert main(["simulate", *first, *words]) == 2
    assert message in capsys.readouterr().err
