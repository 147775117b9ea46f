"""``octavo bench offline`` on a tiny model: the figures are there and agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main


def test_figures_agree_with_each_other(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    words = ["bench", "offline", str(tiny_model), "--batches", "1,3", "--input-len", "20", "--output-len", "8"]
    assert main([*words, "--num-gpu-blocks-override", "64", "--json", str(target)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["seconds"] > row["prefill_seconds"] > 0
        assert row["output_tokens_per_s"] == pytest.approx(row["batch"] * 8 / row["seconds"], rel=0.02)
        assert 0 < row["share_outside_kernels"] < 1
    assert main([*words, "--num-gpu-blocks-override", "64"]) == 0
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "needs a kind of benchmark"),
        (["bench", "offlin", "x"], "needs a kind of benchmark"),
        (["bench", "offline", "x", "--batches", "1,a"], "sizes are integers"),
        (["bench", "offline", "x", "--input-len", "0"], "--input-len must be at least 1"),
    ],
)
def test_wrong_calls_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
