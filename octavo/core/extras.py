"""Extras of the package: how to install one into the environment that runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The end of a message about a package that is missing: the extra, and the command that installs it.

    The command names the running Python, as another ``pip`` may come first on the path, and the extra's requirements
    instead of ``octavo[...]``, as the package may be a checkout or a wheel that no index has.
    """
    return f"install the extra octavo[{extra}]: {pip_install(*requirements(extra))}"


def pip_install(*wanted: str) -> str:
    """The shell command that installs requirements into the running environment; with uv where that has no pip."""
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


def requirements(extra: str) -> list[str]:
    """What an extra needs, from the installed package's metadata; of a checkout that is not installed, its folder."""
    try:
        declared = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    found = []
    for requirement in declared:
        name, _, marker = requirement.partition(";")
        if re.search(rf"""extra\s*==\s*["']{re.escape(extra)}["']""", marker):
            found.append(name.strip())
    return found or [f"{Path(__file__).resolve().parents[2]}[{extra}]"]
