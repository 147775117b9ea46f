"""``octavo simulate``: equal calls print equal figures, in any process; what does not count is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.simulate.profile import load_profile

WORDS = ["simulate", "--profile", "llama-3.1-8b-h100", "--num-requests", "80", "--request-rate", "30"]
LENGTHS = ["--input-len", "chat", "--output-len", "chat", "--seed", "4", "--scheduling-policy", "srpt", "--users", "3"]


def test_equal_calls_give_equal_figures_in_every_process(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    call = [*WORDS, *LENGTHS, "--num-gpu-blocks-override", "400", "--json"]
    assert main([*call, str(files[0])]) == 0
    for file, seed in zip(files[1:], ("1", "2"), strict=True):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-m", "octavo", *call, str(file)], check=True, env=environment)
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    figures = json.loads(files[0].read_text())
    assert figures["requests"] == 80 and figures["preemptions_by_recompute"] + figures["preemptions_by_swap"] > 0
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
    ],
)
def test_a_wrong_call_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = [] if words == ["profile"] else ["--profile", "llama-3.1-8b-h100"]
    assert main(["simulate", *first, *words]) == 2
    assert message in capsys.readouterr().err
