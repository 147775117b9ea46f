"""The first ten minutes of somebody who has never seen Octavo, typed by a script, with the seconds of each step.

    python scripts/ten_minutes.py [--wheel FILE] [--json PATH|-]

In a fresh clone of this repository: ``make demo``, the server of the README's second command, a question to it, a
policy tried in the simulator. With ``--wheel`` the same from an empty virtual environment. Caches of packages and
compilers are used as they are (``PIP_NO_CACHE_DIR=1``, ``UV_NO_CACHE=1`` and ``CCACHE_DISABLE=1``: are not); models are
downloaded into a folder of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIMULATE = ["simulate", "--num-requests", "200", "--request-rate", "2", "--output-len", "chat", "--compare", "srpt"]


def try_wheel() -> ModuleType:
    """scripts/try_wheel.py, which knows how to start a server and to ask it."""
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "scripts" / "try_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Steps:
    """What was typed, and how long each took, in a folder with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OCTAVO_"))}
        self.environ = {**kept, "OCTAVO_CACHE": str(folder / "cache")}
        self.seconds: dict[str, float] = {}

    def run(self, what: str, command: Sequence[str | Path], cwd: Path) -> None:
        """Runs a command; its output goes to standard error."""
        print(f"== {what}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        subprocess.run([str(word) for word in command], cwd=cwd, env=self.environ, check=True, stdout=sys.stderr)
        self.seconds[what] = round(time.perf_counter() - start, 1)

    def use(self, program: Path, folder: Path) -> str:
        """What follows once the program is there; returns the server's answer."""
        print("== octavo serve smollm2-135m, and a question", file=sys.stderr, flush=True)
        seconds, answer = try_wheel().first_answer(program, self.environ)
        self.seconds["octavo serve smollm2-135m, to its first answer"] = round(seconds, 1)
        self.run("octavo " + " ".join(SIMULATE), [program, *SIMULATE], folder)
        return str(answer)


def from_clone(folder: Path) -> tuple[Steps, str]:
    """The path of the README."""
    steps, clone = Steps(folder), folder / "octavo"
    steps.run("git clone", ["git", "clone", "--quiet", ROOT, clone], folder)
    steps.run("make demo", ["make", "--no-print-directory", "demo"], clone)
    return steps, steps.use(clone / ".venv" / "bin" / "octavo", folder)


def from_wheel(wheel: Path, folder: Path) -> tuple[Steps, str]:
    """The path of a release."""
    steps, environment = Steps(folder), folder / "venv"
    steps.run("python -m venv", [sys.executable, "-m", "venv", environment], folder)
    steps.run("pip install", [environment / "bin" / "pip", "install", "-qq", wheel.resolve()], folder)
    steps.run("octavo pull smollm2-135m", [environment / "bin" / "octavo", "pull", "smollm2-135m"], folder)
    return steps, steps.use(environment / "bin" / "octavo", folder)


def report(seconds: dict[str, float], answer: str) -> str:
    """A line for each step, and their sum."""
    lines = [f"{value:7.1f} s  {what}" for what, value in seconds.items()]
    return "\n".join([*lines, f"{sum(seconds.values()):7.1f} s  in all; the server said: {answer}"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel instead of a clone")
    parser.add_argument("--json", metavar="PATH", help="write the seconds as a JSON object (- for standard output)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        steps, answer = from_wheel(arguments.wheel, folder) if arguments.wheel else from_clone(folder)
    figures: dict[str, Any] = {"seconds": steps.seconds, "answer": answer}
    if arguments.json == "-":
        print(json.dumps(figures))
    else:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(figures) + "\n", encoding="utf-8")
        print(report(steps.seconds, answer))
    return 0 if "Paris" in answer else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
