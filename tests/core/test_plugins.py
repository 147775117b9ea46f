"""Classes of one's own, named as ``module:Class``: where they are found, and when they are refused."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.core.plugins import how_to_install, load_class, pip_install, requirements
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_llm import AsyncLLM

POLICY = """
from octavo.scheduler.policies import Policy

class LongestFirst(Policy):
    def key(self, group):
        return -len(group.request.prompt_token_ids)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not on Python's path, as for a program that pip has installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def find(name: str) -> type[object]:
    return load_class(name, {}, object, "an_option", "object")


def test_a_file_in_the_current_folder_is_found(folder: Path) -> None:
    (folder / "one_of_mine.py").write_text("class Mine: pass")
    path = list(sys.path)
    assert find("one_of_mine:Mine").__name__ == "Mine"
    assert sys.path == path


def test_it_does_not_take_the_place_of_an_installed_module(folder: Path) -> None:
    (folder / "msgspec.py").write_text("class Struct: wrong = True")
    assert not hasattr(find("msgspec:Struct"), "wrong")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No module named 'broken_one'"),
        ("class Other: pass", "has no attribute 'Mine'"),
        ("class Mine(", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_reason_and_the_places(
    folder: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (folder / "broken_one.py").write_text(content)
    sys.modules.pop("broken_one", None)
    with pytest.raises(ConfigError, match=f"an_option 'broken_one:Mine' cannot be imported: .*{reason}") as e:
        find("broken_one:Mine")
    assert f"the current folder, {folder}" in str(e.value)


def test_the_engine_process_finds_it_too(folder: Path, tiny_model: Path) -> None:
    (folder / "policy_of_mine.py").write_text(POLICY)

    async def answer() -> int:
        async with AsyncLLM(str(tiny_model), scheduling_policy="policy_of_mine:LongestFirst") as llm:
            outputs = [o async for o in llm.generate("a", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))]
        return len(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(answer()) == 2


@pytest.mark.parametrize(
    "name", ["scheduling-policy", "logits-processors", "tool-call-parser", "reasoning-parser", "lora-resolver"]
)
def test_it_is_refused_before_the_model_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", "no/such-model", "--port", "0", "--enable-lora", f"--{name}", "no_such:Class"]) == 2
    assert "'no_such:Class' cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


def test_a_command_without_a_server_refuses_it_as_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such-model", "Hello", "--scheduling-policy", "no_such:Class"]) == 2
    assert "'no_such:Class' cannot be imported: ModuleNotFoundError" in capsys.readouterr().err


# How extras are installed into the environment that runs.


ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["torch", "audio", "images", "plot", "lab", "ray", "tracing"])
def test_the_command_installs_what_the_extra_needs_into_this_python(extra: str) -> None:
    declared = {str(Requirement(each)) for each in EXTRAS[extra]}
    assert {str(Requirement(each)) for each in requirements(extra)} == declared
    said, _, command = how_to_install(extra).partition(": ")
    assert f"octavo[{extra}]" in said
    assert shlex.split(command)[:4] == [sys.executable, "-m", "pip", "install"]
    assert not any(word.startswith("octavo") for word in shlex.split(command)[4:])


def test_a_checkout_that_is_not_installed_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert requirements("plot") == [f"{ROOT}[plot]"]


def test_an_environment_without_pip_is_told_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert shlex.split(pip_install("x>=1")) == ["uv", "pip", "install", "--python", sys.executable, "x>=1"]
