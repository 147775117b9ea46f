"""The script that installs the wheel into an empty environment and asks the server a question."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import ROOT, script


def test_the_sizes_are_those_of_the_files_of_each_package() -> None:
    found = script("try_wheel").sizes(Path(sys.executable))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found["numpy"] > 20e6 > found["psutil"] > 1e5 and "pip" not in found


def test_the_largest_packages_are_named() -> None:
    figures = {
        **{"install_seconds": 9.5, "install_seconds_of_processors": 4.25, "installed_megabytes": 130.5},
        **{"pull_seconds": 3, "pull_seconds_of_processors": 1, "wheel_megabytes": 2.1},
        **{"first_start_seconds": 2.5, "second_start_seconds": 1.5, "answer": "Paris."},
        "packages": {"numpy": 70.0, "tokenizers": 11.5, "octavo": 11.0},
    }
    lines = script("try_wheel").report(figures, shown=2).splitlines()
    assert lines[0] == "pip install         9.5 s (4.25 s of processor time)"
    assert lines[1] == "installed           130.5 MB in 3 packages: numpy 70.0, tokenizers 11.5"
    assert lines[-2:] == ["first start         2.5 s to the first answer: Paris.", "second start        1.5 s"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_answers_from_an_empty_environment() -> None:
    lookup = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed", "filelock"]
    if subprocess.run(lookup, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("no package registry can be reached")
    command = [sys.executable, str(ROOT / "scripts" / "try_wheel.py"), "--json", "-"]
    figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert "Paris" in figures["answer"]
    assert figures["packages"]["octavo"] < 20
    assert "torch" not in figures["packages"] and figures["installed_megabytes"] < 250
