"""Installs torch into this Python: the CPU build, which avoids gigabytes of GPU libraries on Linux.

Needs the standard library only, as it runs before anything is installed. Variables:
    OCTAVO_TORCH=cuda   install the default build of the package index, with GPU libraries
    TORCH_INDEX_URL     index of CPU builds, instead of that of the PyTorch project
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirement(pyproject: Path = PYPROJECT) -> str:
    """The torch requirement of the project, as in ``torch>=2.11``."""
    dependencies = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(d for d in dependencies if d.startswith("torch") and not d[5:6].isalpha())


def extra_options(offered: str | None, platform: str, environ: Mapping[str, str]) -> list[str]:
    """Options of ``pip install`` that select the build.

    Args:
        offered: the version that pip would install without further options; None if it finds none.
        platform: ``sys.platform``.
        environ: environment variables.
    """
    if environ.get("TORCH_INDEX_URL"):
        return ["--extra-index-url", environ["TORCH_INDEX_URL"]]
    if offered is not None and (
        offered.endswith("+cpu")
        # On other platforms the default builds are for the CPU.
        or not platform.startswith("linux")
        or environ.get("OCTAVO_TORCH") == "cuda"
    ):
        return []
    return ["--extra-index-url", CPU_INDEX]


def offered_version(wanted: str) -> str | None:
    """The version that ``pip install`` without further options would install."""
    command = [*_pip(), "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", wanted]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if result.returncode != 0:
        return None
    version: str = json.loads(result.stdout)["install"][0]["metadata"]["version"]
    return version


def installed_fits(wanted: str) -> bool:
    """Whether an installed torch satisfies the requirement."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    check = [*_pip(), "install", "--quiet", "--dry-run", "--no-index", "--no-deps", wanted]
    return subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def main() -> int:
    """Installs torch; returns the exit code of pip."""
    if os.environ.get("OCTAVO_TORCH", "cpu") not in ("cpu", "cuda"):
        print(f"OCTAVO_TORCH must be cpu or cuda, not {os.environ['OCTAVO_TORCH']!r}", file=sys.stderr)
        return 2
    wanted = requirement()
    if installed_fits(wanted):
        print(f"== torch {importlib.metadata.version('torch')} is installed")
        return 0
    offered = offered_version(wanted)
    extra = extra_options(offered, sys.platform, os.environ)
    what = offered if offered is not None and not extra else f"{wanted} {' '.join(extra)}"
    print(f"== installing torch: {what} (the largest download, some 200 MB for the CPU build)", flush=True)
    return subprocess.run([*_pip(), "install", *extra, wanted]).returncode


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip"]


if __name__ == "__main__":
    sys.exit(main())
