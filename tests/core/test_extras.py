"""How extras are installed into the environment that runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from octavo.core.plugins import how_to_install, pip_install, requirements

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
