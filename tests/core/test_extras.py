"""What is said of packages that are missing."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from octavo.core.extras import install_extra, pip_install


@pytest.mark.parametrize(("extra", "package"), [("audio", "soundfile"), ("images", "pillow"), ("tracing", None)])
def test_an_extra_is_installed_for_this_python(extra: str, package: str | None) -> None:
    python, *words = shlex.split(install_extra(extra).partition(" (")[0])
    assert python == sys.executable
    assert words[:3] == ["-m", "pip", "install"]
    named = {Requirement(word).name: Requirement(word).specifier for word in words[3:]}
    assert named
    declared = {Requirement(text).name: Requirement(text) for text in metadata.requires("octavo") or ()}
    assert all(named[name] == declared[name].specifier for name in named)
    assert package is None or set(named) == {package}


def test_without_metadata_the_extra_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert "octavo[audio]" in shlex.split(install_extra("audio").partition(" (")[0])


def test_a_path_with_spaces_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my programs/python")
    assert shlex.split(pip_install("a>=1"))[0] == "/my programs/python"
