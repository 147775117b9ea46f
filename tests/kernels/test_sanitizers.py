"""The kernel tests once more, with kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")

ROOT = Path(__file__).resolve().parents[2]

#: Puts the watched module into the place of the built one, and lets a property be tried on few examples only.
PLUGIN = """
import importlib.util, os, sys
import octavo
from hypothesis import settings

spec = importlib.util.spec_from_file_location("octavo._cpu", os.environ["OCTAVO_WATCHED_CPU"])
octavo._cpu = sys.modules["octavo._cpu"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(octavo._cpu)

def pytest_collection_modifyitems(items):
    for item in items:
        test = getattr(item.obj, "__func__", item.obj)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None:
            test._hypothesis_internal_use_settings = settings(asked, max_examples=min(5, asked.max_examples))
"""


def libraries() -> str:
    """What must be in the process before all else; skips where there is no sanitizer, or nothing to build with."""
    path = tool_path()
    for tool in ("g++", "cmake", "ninja"):
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"there is no {tool} to build the kernels with")
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("the kernels' sources are not here")
    # The C++ library too: without it the sanitizer would not find the function that throws, which it wraps.
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("g++ has no AddressSanitizer (libasan)")
    return " ".join(paths)


def tool_path() -> str:
    """Where to look for programs: beside this Python first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def build(folder: Path) -> Path:
    """Builds the watched module; returns its file."""
    environment = {**os.environ, "PATH": tool_path()}
    isas = ";".join(_cpu.available_isas())  # the others could not be run
    options = ["-DOCTAVO_SANITIZE=ON", f"-DOCTAVO_INSTRUCTION_SETS={isas}", "-DCMAKE_CXX_COMPILER=g++"]
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *options]
    for command in (
        [*configure, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(folder)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (module,) = folder.glob("_cpu*.so")
    return module


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kernel_tests_pass_with_every_access_checked(tmp_path: Path) -> None:
    preloaded = libraries()
    (tmp_path / "watched_kernels.py").write_text(PLUGIN)
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        # Python and torch keep memory until the end; huge allocations fail as they do without a sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OCTAVO_WATCHED_CPU": str(build(tmp_path / "build")),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    tests = sorted(str(file) for file in Path(__file__).parent.glob("test_cpu_*.py"))
    options = ["-v", "-x", "-p", "watched_kernels", "-p", "no:cacheprovider", "--timeout=1200", "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    for isa in _cpu.available_isas():
        assert f"[{isa}" in done.stdout, f"no test ran with the instruction set {isa}"
