"""Runs the GPU benchmark and prints a table of figures, each with its formula.

    python3 scripts/gpu_bench.py [--out FOLDER] [--smoke]

Runs from a plain checkout; this file needs the standard library only. Each part runs in a process of its own with a
time limit, so that a part that fails or hangs does not affect the others; its figures up to then are kept. --smoke runs
every part at tiny sizes on the CPU, to test it without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: A small and a large model, and one with recurrent states.
SHAPES = ("llama-3.2-1b-shape", "llama-3.1-8b-shape", "qwen3.5-0.8b-shape")
#: The program that runs one part.
PROGRAM = ["-m", "octavo.lab.bench.gpu"]
#: Seconds for all parts.
BUDGET = 570.0
#: A part is skipped if fewer seconds are left.
MIN_SECONDS = 15.0
#: Figures of the part "limits" -> the options that pass them to the other parts.
LIMITS = {"bandwidth": "--bandwidth", "matrix peak": "--peak"}

#: (part, figure, "at least" or "at most", value)
AIMS = (
    ("engine", "decode 1 x 1024, share of bandwidth", "at least", 0.80),
    ("engine", "decode 64 x 1024, share of bandwidth", "at least", 0.75),
    ("engine", "prefill 8192, share of matrix peak", "at least", 0.60),
    ("kernels", "attention 32 x 8192, 32 rows", "at least", 0.80),
    ("engine", "decode 1 x 1024, GPU idle", "at most", 0.03),
    ("engine", "decode 64 x 1024, GPU idle", "at most", 0.03),
)

Figure = dict[str, Any]


@dataclass(frozen=True)
class Part:
    name: str
    shape: str
    #: Seconds after which the part is killed.
    limit: float


def plan(shapes: list[str]) -> list[Part]:
    """The parts, the most important first; later ones are skipped if the time runs out."""
    small, large = shapes[0], shapes[:2][-1]
    wanted = [("limits", small, 90.0)]
    wanted += [("engine", large, 180.0), ("engine", small, 150.0)]
    wanted += [(name, shape, limit) for shape in shapes[2:] for name, limit in (("kernels", 60.0), ("engine", 120.0))]
    wanted += [("kernels", large, 90.0), ("transformers", large, 120.0), ("transformers", small, 90.0)]
    wanted += [("profile", large, 90.0), ("kernels", small, 90.0), ("deterministic", small, 120.0)]
    wanted += [("profile", small, 90.0)]
    once = {(name, shape): Part(name, shape, limit) for name, shape, limit in wanted}
    return list(once.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bench", help="folder for figures and log")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="models to measure; config.json is enough")
    parser.add_argument("--parts", default="", help="only these parts, such as limits,engine")
    parser.add_argument("--kernels", help="a kernel backend instead of the device's own")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds for all parts ({BUDGET:.0f})")
    arguments = parser.parse_args(argv)
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "log.txt").unlink(missing_ok=True)
    shapes = [tiny_shape(arguments.out)] if arguments.smoke else arguments.shapes.split(",")
    parts = plan(shapes)
    if arguments.parts:
        parts = [part for part in parts if part.name in ("limits", *arguments.parts.split(","))]
    options = ["--smoke"] if arguments.smoke else []
    options += ["--kernels", arguments.kernels] if arguments.kernels else []

    deadline = time.monotonic() + arguments.budget
    report = Report(arguments.out)
    for part in parts:
        left = deadline - time.monotonic()
        if left < MIN_SECONDS:
            report.add(part, 0.0, "skipped, no time was left", [])
            continue
        limits = [f"{flag}={value}" for name, flag in LIMITS.items() if (value := report.value_of("limits", name))]
        start = time.monotonic()
        problem, figures = run(part, arguments.out, [*options, *limits], min(part.limit, left))
        report.add(part, time.monotonic() - start, problem, figures)
    return report.finish()


class Report:
    """Prints figures as they are measured, and keeps figures.json complete and valid at any time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "figures.json"
        self._content: dict[str, Any] = {"figures": [], "parts": [], "problems": [], "machine": machine()}
        print(", ".join(f"{name} {value}" for name, value in self._content["machine"].items()), flush=True)
        self._write()

    def add(self, part: Part, seconds: float, problem: str, figures: list[Figure]) -> None:
        """Adds the result of a part."""
        self._content["figures"] += figures
        for figure in figures:
            print(line(figure), flush=True)
        shape = Path(part.shape).name
        self._content["parts"].append({"part": part.name, "shape": shape, "seconds": round(seconds, 1)})
        if problem:
            self._content["problems"].append(f"{part.name} {shape}: {problem}")
            print(f"** {self._content['problems'][-1]}", flush=True)
        self._write()

    def value_of(self, part: str, name: str, shape: str | None = None) -> float | None:
        """The value of a figure, or None."""
        for figure in self._content["figures"]:
            if figure["part"] == part and figure["name"] == name and shape in (None, figure["shape"]):
                value: float | None = figure["value"]
                return value
        return None

    def finish(self) -> int:
        """Prints ratios, aims and problems; returns the exit code."""
        compared = self._ratios()
        for figure in compared:
            print(line(figure))
        self._content["figures"] += compared
        self._write()
        for text in self._aims():
            print(text)
        for part in self._content["parts"]:
            print(f"{part['seconds']:7.1f} s for {part['part']} {part['shape']}")
        problems = self._content["problems"]
        print(f"\n{len(self._content['figures'])} figures, {len(problems)} problems; all in {self._file}")
        for problem in problems:
            print(f"** {problem}")
        return int(bool(problems))

    def _ratios(self) -> list[Figure]:
        """Ratios of Octavo to transformers for the batches that both ran."""
        found = []
        for figure in self._content["figures"]:
            ours, theirs = figure["value"], self.value_of("transformers", figure["name"], figure["shape"])
            if figure["part"] == "engine" and theirs and ours:
                name, formula = f"{figure['name']}, transformers = 1", f"{ours:.1f} tok/s / {theirs:.1f} tok/s"
                ratio = {"part": "ratio", "name": name, "value": ours / theirs, "unit": "x", "formula": formula}
                found.append({**figure, **ratio})
        return found

    def _aims(self) -> list[str]:
        """A line for each aim and its measured value."""
        lines = []
        for shape in dict.fromkeys(figure["shape"] for figure in self._content["figures"]):
            for part, name, way, aim in AIMS:
                value = self.value_of(part, name, shape)
                if value is not None:
                    reached = value >= aim if way == "at least" else value <= aim
                    verdict = "reached" if reached else "MISSED"
                    lines.append(f"{shape:19} {name:46} {value:7.1%}  aim: {way} {aim:.0%}  {verdict}")
        return lines

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._content, indent=1), encoding="utf-8")


def run(part: Part, folder: Path, options: list[str], limit: float) -> tuple[str, list[Figure]]:
    """(problem or "", figures) of a part; its output is appended to log.txt."""
    with tempfile.TemporaryDirectory() as scratch:
        file, log = Path(scratch, "figures.jsonl"), Path(scratch, "log.txt")
        command = [sys.executable, *PROGRAM, part.name, part.shape, str(file), *options]
        problem = ""
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, timeout=limit
                )
                if done.returncode:
                    problem = f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                problem = f"ended after {limit:.0f} s"
        written = file.read_text(encoding="utf-8") if file.exists() else ""
        said = log.read_text(encoding="utf-8", errors="replace").strip()
    with (folder / "log.txt").open("a", encoding="utf-8") as whole:
        whole.write(f"===== {' '.join(command)}\n{said}\n")
    figures = []
    for text in written.splitlines():
        try:
            figures.append(json.loads(text))
        except ValueError:  # the process ended while it wrote this line
            problem = problem or "a figure was cut off"
    if problem:
        problem += f"; see {folder / 'log.txt'}" + "".join(f"\n     {text}" for text in said.splitlines()[-12:])
    return problem, figures


def environment() -> dict[str, str]:
    """Environment in which Python finds this checkout, and packages that it lacks in .site."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "msgspec", "pydantic", "zmq")):
        path.append(str(ROOT / ".site"))  # built for one Python version, and would hide installed packages
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def tiny_shape(folder: Path) -> str:
    """A folder with the config.json of a tiny model."""
    sys.path.insert(0, str(ROOT))
    from octavo.lab.bench.gpu_scale import TINY

    target = folder / "tiny-shape"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(target)


def line(figure: Figure) -> str:
    value, unit = figure["value"], figure["unit"]
    if value is None:
        shown = "-"
    elif unit.startswith("of "):
        shown = f"{value:.1%} {unit}"
    else:
        shown = f"{value:,.3f} {unit}" if abs(value) < 100 else f"{value:,.0f} {unit}"
    return f"{figure['shape']:19} {figure['part']:13} {figure['name']:46} {shown:>18}  = {figure['formula']}"


def machine() -> dict[str, str]:
    """Versions of the software, and the GPU as nvidia-smi describes it."""
    facts = {"python": sys.version.split()[0]}
    for package in ("torch", "triton", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "missing"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"]
    try:
        done = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        facts["gpu"] = done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as e:
        facts["gpu"] = f"unknown ({e})"
    return facts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
