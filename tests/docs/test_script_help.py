"""``--help`` of the scripts that write pages or run for long: it helps, and does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.busy_machine import PATIENCE

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    "name",
    ["demo", "docs_pictures", "install", "test_all", "try_container"],
)
def test_help_helps_and_writes_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 5 and "== wrote" not in result.stdout
    assert not list(tmp_path.iterdir())
