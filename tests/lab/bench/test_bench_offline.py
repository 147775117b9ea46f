"""``octavo bench offline`` on a tiny model: the figures are there and agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.lab.bench import speculation
from octavo.lab.bench.offline import make_batches
from octavo.lab.workloads.lengths import Poisson, Uniform


def test_figures_agree_with_each_other(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    words = ["bench", "offline", str(tiny_model), "--batches", "1,3", "--input-len", "20", "--output-len", "8"]
    words += ["--again", "0", "--rounds", "2"]
    assert main([*words, "--num-gpu-blocks-override", "64", "--json", str(target)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["slowest_seconds"] >= row["seconds"] >= row["fastest_seconds"] and row["rounds"] == 2
        assert row["seconds"] > row["prefill_seconds"] > 0
        # The median of two rates is not quite the rate of the median time.
        rates = [row["batch"] * 8 / row[f"{name}_seconds"] for name in ("fastest", "slowest")]
        assert row["output_tokens_per_s"] == pytest.approx(sum(rates) / 2, rel=1e-3)
        assert row["disturbed"] == sum(each["disturbed"] for each in row["conditions"])
        assert 0 < row["share_outside_kernels"] < 1
    assert main([*words, "--num-gpu-blocks-override", "64"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("*")]
    assert len(lines) == 3 and lines[2].split()[0].rstrip("*") == "3"


def test_lengths_may_vary(tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    words = ["bench", "offline", str(tiny_model), "--batches", "6", "--input-len", "uniform:4,40"]
    lengths = ["--output-len", "poisson:9", "--num-gpu-blocks-override", "64", "--json", str(target)]
    assert main([*words, *lengths, "--rounds", "1", "--again", "0"]) == 0
    figures = json.loads(target.read_text())
    ((*items,),) = make_batches([6], Uniform(4, 40), Poisson(9))
    assert len({item.input_len for item in items}) > 2 and len({item.output_len for item in items}) > 2
    assert figures["input_len"] == pytest.approx(sum(item.input_len for item in items) / 6, rel=1e-5)
    total = sum(item.output_len for item in items)
    assert figures["output_tokens_per_s"] == pytest.approx(total / figures["seconds"], rel=0.02)


def test_drafters_are_compared_with_no_drafts(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "_SENTENCES", ("{name} sat in {place}.",) * 5)  # its context is short
    target = tmp_path / "figures.json"
    monkeypatch.setattr(speculation, "_FUNCTIONS", ("def {noun}(): pass",))
    labels = ("ngram", "ngram:adaptive=false:num_speculative_tokens=2", "suffix")
    words = ["bench", "offline", str(tiny_model), "--speculative", ",".join(labels), "--batches", "2"]
    words += ["--output-len", "12", "--rounds", "1", "--num-gpu-blocks-override", "256", "--max-model-len", "256"]
    assert main([*words, "--json", str(target)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    kinds = ("edit", "chat", "chat again", "random", "code")
    assert [(row["workload"], row["method"]) for row in rows] == [(kind, label) for kind in kinds for label in labels]
    assert all(row["tokens_per_draft"] is None or row["tokens_per_draft"] <= 3 for row in rows[1::3])
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["speedup"] > 0 and 2 <= row["output_tokens"] <= 24
        assert row["acceptance"] is None or 0 <= row["acceptance"] <= 1
    assert main([*words, "--speculative-config", '{"method": "ngram", "zzz": 1}']) == 2
    assert "unknown field 'zzz'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "needs a kind of benchmark"),
        (["bench", "offlin", "x"], "needs a kind of benchmark"),
        (["bench", "offline", "x", "--batches", "1,a"], "sizes are integers"),
        (["bench", "offline", "x", "--input-len", "0"], "a length is"),
        (["bench", "offline", "x", "--speculative", "eagle"], "speculative_config: method 'eagle'"),
        (["bench", "offline", "x", "--speculative", "ngram:adaptive"], "after the method, fields are FIELD=VALUE"),
        (["bench", "offline", "x", "--speculative", "ngram:n=3"], "unknown field 'n'"),
        (["bench", "offline", "x", "--speculative", "ngram", "--output-len", "uniform:1,2"], "--output-len must be"),
    ],
)
def test_wrong_calls_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
