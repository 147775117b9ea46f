"""Builds for arm64 on another machine, and tries the result in an emulator: on Debian or Ubuntu, without root's rights.

    apt install g++-aarch64-linux-gnu qemu-user-static      # once, as root
    python scripts/try_arm64.py [--folder build/arm64] [--digests bfloat16,int8] [--no-serve]

Into the folder come arm64's Python and its libraries (unpacked, not installed), the wheels of what Octavo needs, and
the kernels, compiled by the cross compiler. Then the emulator imports the kernels, answers a question with ``octavo
generate``, and with ``octavo serve``; the answer of this machine's ``generic`` kernels is printed beside it. With
``--digests`` one request's bits are compared with those recorded in tests/data/answer_digests.json, for these kinds of
weights (scripts/answer_digests.py). An emulated token of the demo model takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
GENERATE = ["generate", "smollm2-135m", "The capital of France is", "--temperature", "0", "--max-tokens", "6"]

#: An apt of its own: what the system has installed, and its architectures, are not touched.
APT = """\
APT::Architecture "arm64";
APT::Architectures {{"arm64";}};
APT::Sandbox::User "";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
"""
#: Processes that Python starts need the emulator, too.
SITE = """\
import os, sys
sys.executable = sys._base_executable = os.environ["EMULATED_PYTHON"]
"""


def run(command: Sequence[str | Path], environ: dict[str, str] | None = None) -> str:
    """Standard output of a command."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
    ).stdout


class Arm64:
    """What the folder holds; each part is made when it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.system, self.site, self.package = (self.folder / name for name in ("system", "site", "package"))
        self.python = self.folder / "python"

    def make(self) -> None:
        """All parts, the kernels as far as something has changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for what, part in (("system", self._make_system), ("wheels", self._make_site), ("kernels", self._make_kernels)):
            start = time.perf_counter()
            part()
            print(f"{time.perf_counter() - start:7.1f} s  {what}", flush=True)

    @property
    def version(self) -> str:
        """Of Python: that of the distribution, as 3.11."""
        [include] = (self.system / "usr" / "include").glob("python3.*")
        return include.name.removeprefix("python")

    @property
    def suffix(self) -> str:
        """Of compiled modules."""
        return f".cpython-{self.version.replace('.', '')}-aarch64-linux-gnu.so"

    def _make_system(self) -> None:
        if self.system.exists():
            return
        apt, partial = self.folder / "apt", self.folder / "system.partial"
        for name in ("state/lists/partial", "cache/archives/partial"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        (apt / "conf").write_text(APT.format(folder=apt), encoding="utf-8")
        environ = {"APT_CONFIG": str(apt / "conf")}
        run(["apt-get", "update", "-q"], environ)
        packages = ["python3-minimal", "libpython3-dev", "libpython3-stdlib", "libstdc++6"]
        run(["apt-get", "install", "-qy", "--no-install-recommends", "--download-only", *packages], environ)
        for package in sorted((apt / "cache" / "archives").glob("*.deb")):
            run(["dpkg", "-x", package, partial])
        partial.rename(self.system)

    def _make_site(self) -> None:
        if self.site.exists():
            return
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        partial = self.folder / "site.partial"
        options = [word for platform in PLATFORMS for word in ("--platform", platform)]
        options += ["--python-version", self.version, "--only-binary=:all:", "--no-compile", "--target", str(partial)]
        run([sys.executable, "-m", "pip", "install", "-qq", *options, *project["dependencies"]])
        (partial / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        partial.rename(self.site)
        self.python.write_text(
            f'#!/bin/sh\nexport EMULATED_PYTHON={self.python} PYTHONPATH="{self.package}:{self.site}"\n'
            f'exec {EMULATOR} -L {self.system} {self.system}/usr/bin/python{self.version} -P "$@"\n',
            encoding="utf-8",
        )
        self.python.chmod(0o755)

    def _make_kernels(self) -> None:
        build, include = self.folder / "build", self.system / "usr" / "include"
        environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        settings = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CMAKE_CXX_COMPILER": COMPILER,
            # Last: the C library's headers are the compiler's own.
            "CMAKE_CXX_FLAGS": f"-idirafter {include}",
            "CMAKE_CXX_COMPILER_LAUNCHER": shutil.which("ccache") or "",
            "Python_EXECUTABLE": sys.executable,
            "Python_INCLUDE_DIR": include / f"python{self.version}",
            "NB_SUFFIX": self.suffix,
            "NB_SUFFIX_S": ".abi3.so",
        }
        flags = [f"-D{name}={value}" for name, value in settings.items()]
        run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *flags], environ)
        subprocess.run(["ninja", "-C", str(build)], check=True, env={**os.environ, **environ})
        shutil.rmtree(self.package, ignore_errors=True)
        shutil.copytree(ROOT / "octavo", self.package / "octavo", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        shutil.copy(build / f"_cpu{self.suffix}", self.package / "octavo")


def generate(python: Path | str, environ: dict[str, str] | None = None) -> str:
    """The answer of ``octavo generate``."""
    return run([python, "-m", "octavo", *GENERATE], environ).strip()


def serve(arm: Arm64) -> tuple[float, str]:
    """Seconds from the start of an emulated server to its first answer, and the answer."""
    program = arm.folder / "octavo"
    program.write_text(f'#!/bin/sh\nexec {arm.python} -m octavo "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "scripts" / "try_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seconds, answer = module.first_answer(program, dict(os.environ), patience=3600)
    return float(seconds), str(answer)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arm64", help="where all of it goes")
    parser.add_argument(
        "--digests", metavar="KINDS", help="compare bits of these kinds of weights, with commas between"
    )
    parser.add_argument("--no-serve", action="store_true", help="do not try a server")
    arguments = parser.parse_args(argv)
    if missing := [name for name in (COMPILER, EMULATOR, "apt-get", "dpkg") if shutil.which(name) is None]:
        print(
            f"{', '.join(missing)}: not found; as root: apt install g++-aarch64-linux-gnu qemu-user-static",
            file=sys.stderr,
        )
        return 2
    arm = Arm64(arguments.folder)
    arm.make()
    code = "import platform; from octavo import _cpu; print(platform.machine(), _cpu.isa())"
    print("== emulated:", run([arm.python, "-c", code]).strip(), flush=True)
    start = time.perf_counter()
    emulated, native = generate(arm.python), generate(sys.executable, {"OCTAVO_CPU_ISA": "generic"})
    print(
        f"{time.perf_counter() - start:7.1f} s  octavo generate, emulated: {emulated!r}; here: {native!r}", flush=True
    )
    good = "Paris" in emulated and emulated == native
    if not arguments.no_serve:
        seconds, answer = serve(arm)
        print(f"{seconds:7.1f} s  octavo serve, emulated, to its first answer: {answer!r}", flush=True)
        good = good and "Paris" in answer
    if arguments.digests:
        command = [arm.python, ROOT / "scripts" / "answer_digests.py", "compare", "--kinds", arguments.digests]
        done = subprocess.run([*map(str, command), "--schedules", "one batch", "--requests", "0"])
        good = good and done.returncode == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
