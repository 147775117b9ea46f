"""The scripts for a GPU machine list missing packages, and download the required versions."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.busy_machine import PATIENCE

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def gpu_test(python: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_test.sh")],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_packages_that_a_bare_python_lacks_are_listed(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    done = gpu_test(bare)
    assert done.returncode != 0
    assert "lacks: torch, triton, numpy, ml_dtypes, transformers" in done.stderr
    assert "make gpu-site" in done.stderr


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_so_before_pytest_starts() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = gpu_test(Path(sys.executable))
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr
    assert "collected" not in done.stdout


def test_packages_are_asked_for_as_the_project_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gpu_site", ROOT / "scripts" / "gpu_site.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pinned = script.pinned([*script.MISSING, "unheard-of"])
    assert pinned["msgspec"].startswith("msgspec>=")
    assert pinned["unheard-of"] == "unheard-of"
    assert all(text != name for name, text in pinned.items() if name != "unheard-of")
    asked: list[list[str]] = []

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", pip)
    monkeypatch.setattr(script, "SITE", ROOT / "no-such-folder")
    assert script.main(["--python", "3.13"]) == 0
    whole, alone = asked
    assert whole[whole.index("--python-version") + 1] == "3.13"
    assert "--no-deps" in alone
    assert "--no-deps" not in whole
    assert pinned["gguf"] in alone
    assert "manylinux_2_28_x86_64" in whole
