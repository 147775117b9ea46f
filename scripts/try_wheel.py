"""From the wheel to the first answer: installs it into an empty environment, and measures what that takes.

    python scripts/try_wheel.py [WHEEL] [--extra torch] [--json PATH|-]

Without WHEEL it is built from this checkout, for all instruction sets, which takes minutes. Printed are the seconds
(and those of processor time) of ``pip install`` and of ``octavo pull``, the megabytes that were installed, and the
seconds from ``octavo serve`` to the first answer: of the first start and of a second one. Needs the standard library
only. pip's cache is used as it is (``PIP_NO_CACHE_DIR=1``: is not); the model is downloaded into a folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
#: Seconds that a server may take to its first answer.
PATIENCE = 300
#: What a new environment has already.
TOOLS = ("pip", "setuptools")

#: Prints how many bytes each installed distribution has.
SIZES = """
import importlib.metadata, json, os
def size(d):
    return sum(os.path.getsize(p) for p in map(d.locate_file, d.files or []) if os.path.isfile(p))
print(json.dumps({d.metadata["Name"]: size(d) for d in importlib.metadata.distributions()}))
"""


@contextlib.contextmanager
def timed(figures: dict[str, Any], name: str, what: str) -> Iterator[None]:
    """Puts the seconds that the block takes, and those of processor time of its processes, beside the others."""
    print(f"== {what}", flush=True)
    start, before = time.perf_counter(), processor_seconds()
    yield
    figures[name] = round(time.perf_counter() - start, 2)
    figures[f"{name}_of_processors"] = round(processor_seconds() - before, 2)


def processor_seconds() -> float:
    """Those of all processes of this one that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build(folder: Path) -> Path:
    """Builds the wheel from this checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=sys.stdout)
    [wheel] = folder.glob("octavo-*.whl")
    return wheel


def sizes(python: Path) -> dict[str, int]:
    """Bytes of each package that was installed for this Python, largest first."""
    printed = subprocess.run([str(python), "-c", SIZES], check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, int] = {name: size for name, size in json.loads(printed).items() if name not in TOOLS}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def first_answer(program: Path, environ: dict[str, str], patience: float = PATIENCE) -> tuple[float, str]:
    """Seconds from the start of a server to its first answer, and the answer; it is given up after ``patience``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    message = {"role": "user", "content": QUESTION}
    body = json.dumps({"model": MODEL, "temperature": 0, "max_tokens": 16, "messages": [message]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [str(program), "serve", MODEL, "--port", str(port)], env=environ, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while time.perf_counter() - start < patience and server.poll() is None:
                # It refuses connections at first, and then answers 503 while it loads.
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    answer = json.load(urllib.request.urlopen(request, timeout=patience))
                    return time.perf_counter() - start, answer["choices"][0]["message"]["content"]
                time.sleep(0.01)
            log.seek(0)
            raise SystemExit(f"the server gave no answer:\n{log.read().decode()[-4000:]}")
        finally:
            server.terminate()
            server.wait(timeout=PATIENCE)


def measure(wheel: Path | None, extra: str | None) -> dict[str, Any]:
    """All figures, by name: seconds, megabytes, and the answer."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if wheel is None:
            with timed(figures, "build_seconds", "building the wheel"):
                wheel = build(folder)
        figures["wheel_megabytes"] = megabytes(wheel.stat().st_size)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        programs = folder / "venv" / "bin"
        # Nothing of this checkout or of the user's may be found.
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OCTAVO_"))}
        environ["OCTAVO_CACHE"] = str(folder / "cache")
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        with timed(figures, "install_seconds", f"pip install {wheel.name}{f'[{extra}]' if extra else ''}"):
            command = [str(programs / "python"), "-m", "pip", "install", "-qq", target]
            subprocess.run(command, check=True, env=environ, cwd=folder, stdout=sys.stdout)
        packages = sizes(programs / "python")
        figures["installed_megabytes"] = megabytes(sum(packages.values()))
        figures["packages"] = {name: megabytes(size) for name, size in packages.items()}
        with timed(figures, "pull_seconds", f"octavo pull {MODEL}"):
            command = [str(programs / "octavo"), "pull", MODEL]  # which prints the model's folder
            subprocess.run(command, check=True, env=environ, cwd=folder, stdout=sys.stdout)
        for name, what in (("first_start_seconds", "first"), ("second_start_seconds", "second")):
            print(f"== octavo serve {MODEL}, {what} start", flush=True)
            seconds, figures["answer"] = first_answer(programs / "octavo", environ)
            figures[name] = round(seconds, 2)
    return figures


def megabytes(size: int) -> float:
    return round(size / 1e6, 1)


def report(figures: dict[str, Any], shown: int = 8) -> str:
    """The figures as lines, with the largest packages."""
    packages = figures["packages"]
    largest = ", ".join(f"{name} {size}" for name, size in list(packages.items())[:shown])
    lines = [
        f"pip install         {seconds(figures, 'install_seconds')}",
        f"installed           {figures['installed_megabytes']} MB in {len(packages)} packages: {largest}",
        f"the wheel           {figures['wheel_megabytes']} MB",
        f"octavo pull         {seconds(figures, 'pull_seconds')}",
        f"first start         {figures['first_start_seconds']} s to the first answer: {figures['answer']}",
        f"second start        {figures['second_start_seconds']} s",
    ]
    return "\n".join(lines)


def seconds(figures: dict[str, Any], name: str) -> str:
    return f"{figures[name]} s ({figures[f'{name}_of_processors']} s of processor time)"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, metavar="WHEEL", help="a file that was built before")
    parser.add_argument("--extra", metavar="NAMES", help="extras to install too, with commas between")
    parser.add_argument("--json", metavar="PATH", help="write the figures as a JSON object (- for standard output)")
    arguments = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr) if arguments.json == "-" else contextlib.nullcontext():
        figures = measure(arguments.wheel and arguments.wheel.resolve(), arguments.extra)
    if arguments.json == "-":
        print(json.dumps(figures))
        return 0
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures) + "\n", encoding="utf-8")
    print(report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
