"""``octavo fit``, ``octavo serve --fit``, and the nearest choice in errors of memory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Q

from octavo.cli import fit, serve
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, InsufficientMemoryError
from octavo.engine import fit as engine_fit
from octavo.engine.machine_rates import AttentionRate, MachineRates, StepRate
from tests.cli.helpers import Capture, Run
from tests.fake_hub import serving_hub
from tests.loader.conftest import tiny_llama  # noqa: F401  a fixture

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that need no measurement, and 2 GiB of free memory."""
    monkeypatch.setattr(MachineRates, "product", lambda self, form, rows, size: 1e-10 * (1 + rows / 16))
    monkeypatch.setattr(MachineRates, "attention", lambda self, *key: AttentionRate(1e-10, 1e-11))
    step = StepRate(1e-4, 1e-5, 1e-5, 1e-9, 80 * MIB, 400 * MIB, 60 * MIB)
    monkeypatch.setattr(MachineRates, "step", lambda self: step)
    monkeypatch.setattr(engine_fit, "_free_of_limits", lambda: 2048 * MIB)


def facts(octavo: Run, capsys: Capture, *words: object, code: int = 0) -> dict[str, Any]:
    assert octavo("fit", *words, "--json", "-") == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_recommended_choice_and_its_command(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    found = facts(octavo, capsys, tiny_model, "--users", 4, "--context", 128)
    best = found["recommended"]
    assert (best["dtype"], best["quantization"], best["max_model_len"], best["max_num_seqs"]) == (
        "float32",
        "none",
        128,
        4,
    )
    assert best["speed"]["users"] == 4
    assert best["speed"]["tokens_per_second"] == pytest.approx(4 / best["speed"]["tpot"])
    words = shlex.split(found["command"])
    assert words[:3] == ["octavo", "serve", str(tiny_model)]
    parsed = serve.make_parser().read(words[2:]).group("engine")
    assert parsed == best["options"] == {
        "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": best["kv_cache_bytes"], "swap_space": 0.0
    }  # fmt: skip
    assert len(found["choices"]) == 8 and found["available_bytes"] == 2048 * MIB


def test_the_table_has_the_best_first_and_its_reason(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("fit", tiny_model, "--users", 4, "--dtype", "bfloat16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["weights", "kv"]
    assert lines[1].startswith("bfloat16") and lines[3].startswith("int8")
    assert lines[-2].startswith("recommended: bfloat16, 4 sequences of 256 tokens")
    assert lines[-1].startswith("octavo serve ")


def test_options_that_are_given_stay(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    found = facts(
        octavo,
        capsys,
        tiny_model,
        "--quantization",
        "int8",
        "--kv-cache-dtype",
        "int8",
        "--max-model-len",
        64,
        "--no-speed",
    )
    assert [choice["quantization"] for choice in found["choices"]] == ["int8"]
    assert found["recommended"]["max_model_len"] == 64 and found["recommended"]["speed"] is None
    assert "--quantization int8" in found["command"]


def test_what_does_not_fit_is_said_in_one_line_with_the_nearest(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    whole = facts(octavo, capsys, tiny_model, "--users", 64, "--context", 256)
    least = min(whole["choices"], key=lambda choice: choice["needed_bytes"])
    memory = int((least["needed_bytes"] - least["kv_cache_bytes"] // 2) / 0.98)
    assert octavo("fit", tiny_model, "--users", 64, "--context", 256, "--memory", memory) == 1
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert "does not fit" in error and "the nearest that fits: octavo serve" in error and "--max-num-seqs 64" in error
    assert "recommended" not in captured.out
    # What it names does fit.
    words = shlex.split(error.partition("the nearest that fits: ")[2].partition(" (")[0])
    named = serve.make_parser().read(words[2:]).group("engine")
    flags = ["--max-model-len", named["max_model_len"], "--max-num-seqs", 64, "--memory", memory]
    assert facts(octavo, capsys, tiny_model, *flags)["recommended"]["max_model_len"] == named["max_model_len"]


def test_nothing_fits_at_all(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("fit", tiny_model, "--memory", "1MiB") == 1
    assert "the least is" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.F16])
def test_gguf_files(octavo: Run, capsys: Capture, tiny_llama: Callable[..., Path], tmp_path: Path, kind: Q) -> None:  # noqa: F811
    file = tiny_llama(tmp_path / "m.gguf", kind)
    found = facts(octavo, capsys, file, "--users", 1)
    forms = {choice["quantization"] for choice in found["choices"]}
    assert forms == ({"auto"} if kind is Q.Q8_0 else {"none", "int8", "int4"})
    assert found["recommended"]["speed"]["tpot"] > 0
    assert "--quantization" not in found["command"]


def test_of_a_model_of_the_hub_only_headers_are_fetched(
    octavo: Run, capsys: Capture, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("owner/tiny", {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()})
        found = facts(octavo, capsys, "owner/tiny", "--users", 2)
    assert found["recommended"] == facts(octavo, capsys, tiny_model, "--users", 2)["recommended"]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_wrong_calls(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    assert octavo("fit", tiny_model, "--users", 0) == 2
    assert octavo("fit", tiny_model, "--memory", "much") == 2
    assert "must be a number of bytes, as in 4GiB, not 'much'" in capsys.readouterr().err
    assert octavo("fit", tiny_model, "--tpot", "-1") == 2
    assert octavo("fit", "no-such-model") == 2


# ---- octavo serve --fit


def test_serve_takes_the_recommended_choice(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = serve.make_parser().read([str(tiny_model), "--fit", "--users", "3", "--context", "100", "--seed", "5"])
    given = make_config(model=str(tiny_model), seed=5)
    with caplog.at_level("INFO", "octavo.startup"):
        config = fit.recommended(given, arguments, None)
    assert (config.max_num_seqs, config.max_model_len, config.seed) == (3, 100, 5)
    assert config.kv_cache_memory_bytes and config.quantization == "auto"
    assert "--fit: recommended: float32, 3 sequences of 100 tokens" in caplog.text


def test_serve_refuses_what_does_not_fit(tiny_model: Path) -> None:
    arguments = serve.make_parser().read([str(tiny_model), "--fit", "--memory", "1MiB"])
    with pytest.raises(InsufficientMemoryError, match="does not fit"):
        fit.recommended(make_config(model=str(tiny_model)), arguments, 1 << 20)
    arguments = serve.make_parser().read([str(tiny_model), "--users", "3"])
    with pytest.raises(ConfigError, match="--users is of --fit"):
        fit.refuse_load_without_fit(arguments)


# ---- errors of other commands


def test_a_model_that_does_not_fit_is_told_the_nearest(octavo: Run, capsys: Capture, tiny_model: Path) -> None:
    words = (tiny_model, "Hello", "--max-model-len", 256, "--kv-cache-memory-bytes", 4096)
    assert octavo("generate", *words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "one sequence of 256 tokens needs" in error
    assert "the nearest that fits: octavo serve" in error and "--max-model-len 256" in error


def test_other_errors_stay_as_they_are(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^wrong$"), fit.nearest_in_errors(make_config(model=str(tiny_model))):
        raise ConfigError("wrong")
    # A model that cannot be read again has the plain error.
    with pytest.raises(InsufficientMemoryError, match=r"^full$"), fit.nearest_in_errors(make_config(model="none")):
        raise InsufficientMemoryError("full")
