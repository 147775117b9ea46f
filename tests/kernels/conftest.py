"""The kernel tests once more, in a process of their own, with a module that was built in another way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Puts the other module into the place of the built one, and lets a property be tried on few examples only.
PLUGIN = """
import importlib.util, os, sys
import octavo
from hypothesis import settings

spec = importlib.util.spec_from_file_location("octavo._cpu", os.environ["REBUILT_CPU_KERNELS"])
octavo._cpu = sys.modules["octavo._cpu"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(octavo._cpu)

def pytest_collection_modifyitems(items):
    for item in items:
        test = getattr(item.obj, "__func__", item.obj)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None:
            test._hypothesis_internal_use_settings = settings(asked, max_examples=min(5, asked.max_examples))
"""

#: Tests of recurrent states, on each instruction set.
_STATES = ("gated_delta", "selective_scan", "states")


@dataclass(frozen=True)
class RebuiltKernels:
    """Builds ``octavo._cpu`` in another way, and runs the kernel tests with what was built."""

    folder: Path

    def build(self, name: str, *options: str) -> Path:
        """Builds with these CMake options; returns the module's file. Skips where there is nothing to build with.

        What was built is kept in ``build/NAME-PYTHON``, so that the next time only what has changed is compiled.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        for tool in ("g++", "cmake", "ninja"):
            if shutil.which(tool, path=path) is None:
                pytest.skip(f"there is no {tool} to build the kernels with")
        if not (ROOT / "CMakeLists.txt").exists():
            pytest.skip("the kernels' sources are not here")
        target = str(ROOT / "build" / f"{name}-{sys.implementation.cache_tag}")
        configure = ["cmake", "-S", str(ROOT), "-B", target, "-G", "Ninja", "-DCMAKE_CXX_COMPILER=g++", *options]
        if shutil.which("ccache", path=path):
            configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        for command in (
            [*configure, f"-DPython_EXECUTABLE={sys.executable}"],
            ["cmake", "--build", target],
        ):
            done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (module,) = Path(target).glob("_cpu*.so")
        return module

    def tests(self) -> list[Path]:
        """The tests of the compiled kernels on each instruction set."""
        here = Path(__file__).parent
        return [*sorted(here.glob("test_cpu_*.py")), *(here / f"test_{name}.py" for name in _STATES)]

    def run_tests(self, module: Path, tests: list[Path], environment: dict[str, str]) -> str:
        """Runs these tests, all but the slow ones, with the module; returns what was printed.

        They run in as many processes as there are processors, up to four; meanwhile what they print is in ``tests.log``
        beside the module, and what a sanitizer finds in ``sanitizer.*``.
        """
        (self.folder / "rebuilt_kernels.py").write_text(PLUGIN)
        variables = {
            **os.environ,
            **environment,
            "REBUILT_CPU_KERNELS": str(module),
            "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]),
        }
        processes = min(4, os.cpu_count() or 1)
        options = ["-v", "-p", "rebuilt_kernels", "-p", "no:cacheprovider", "--timeout=3600", "-m", "not slow"]
        options += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
        log = module.parent / "tests.log"
        for file in module.parent.glob("sanitizer.*"):
            file.unlink()
        with log.open("w") as output:
            done = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        printed = log.read_text(errors="replace")
        found = "".join(file.read_text(errors="replace")[:6000] for file in sorted(module.parent.glob("sanitizer.*")))
        assert done.returncode == 0, printed[-6000:] + found
        return printed


@pytest.fixture
def rebuilt_kernels(tmp_path: Path) -> RebuiltKernels:
    """A folder to build the kernels in."""
    return RebuiltKernels(tmp_path)
