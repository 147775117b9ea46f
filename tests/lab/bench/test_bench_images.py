"""Gaps between tokens of text streams beside images, measured on a small model; and what counts as a gap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.lab.bench.image_gaps import _figures
from tests.image_models import save_smolvlm

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")


def test_gaps_within_a_time() -> None:
    """Between the tokens of one request, as far as the second one is in the time."""
    streams = [[[0.0, 1.0, 3.0], [9.0, 9.5]], [[2.0, 2.5, 4.0, 20.0]]]
    figures = _figures(streams, 0.5, 10.0, images=3, first_s=1.0, last_s=2.0)
    assert (figures.median_ms, figures.p99_ms, figures.worst_ms) == (1000.0, 2000.0, 2000.0)
    assert (figures.streams, figures.images, figures.tokens_per_s) == (2, 3, 5 / 9.5)


def test_text_streams_go_on_beside_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_smolvlm(tmp_path)
    small = ["--max-model-len", "256", "--num-gpu-blocks-override", "200", "--dtype", "float32"]
    assert (
        main(
            [
                "bench",
                "images",
                str(tmp_path),
                "--clients",
                "2",
                "--seconds",
                "0.2",
                "--side",
                "60",
                *small,
                "--json",
                "-",
            ]
        )
        == 0
    )
    alone, beside = map(json.loads, capsys.readouterr().out.splitlines())
    assert alone["images"] == 0 and beside["images"] == 2 and alone["streams"] == beside["streams"] == 2
    assert 0 < alone["median_ms"] <= alone["p99_ms"] <= alone["worst_ms"]
    assert 0 < beside["first_s"] <= beside["last_s"] <= beside["seconds"] + 0.1
