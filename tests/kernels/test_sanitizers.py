"""The kernel tests once more, with kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")


def libraries() -> str:
    """What must be in the process before all else; skips where there is no sanitizer."""
    # The C++ library too: without it the sanitizer would not find the function that throws, which it wraps.
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("g++ has no AddressSanitizer (libasan)")
    return " ".join(paths)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kernel_tests_pass_with_every_access_checked(rebuilt_kernels: Any) -> None:
    isas = _cpu.processor_isas()  # the others could not be run
    sets = [f"-DOCTAVO_FLOAT_SETS={';'.join(isas.floats)}", f"-DOCTAVO_INTEGER_SETS={';'.join(isas.integers)}"]
    module = rebuilt_kernels.build("sanitized", "-DOCTAVO_SANITIZE=ON", *sets)
    reports = module.parent / "sanitizer"
    environment = {
        "LD_PRELOAD": libraries(),
        # Python and torch keep memory until the end; huge allocations fail as they do without a sanitizer.
        # Findings go to files: pytest keeps what a test prints, and a test that ends its process prints nothing.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={reports}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}",
    }
    printed = rebuilt_kernels.run_tests(module, rebuilt_kernels.tests(), environment)
    for isa in {*isas.floats, *isas.integers}:
        assert f"[{isa}" in printed, f"no test ran with the instruction set {isa}"
