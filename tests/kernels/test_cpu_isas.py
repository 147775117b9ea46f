"""Which instruction sets there are: what was built, what the processor runs, and what may be chosen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.busy_machine import PATIENCE
from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
KINDS = ("floats", "integers")
NOT_BUILT = [
    (kind, isa)
    for kind in KINDS
    for isa in getattr(_cpu.processor_isas(), kind)
    if isa not in getattr(_cpu.built_isas(), kind)
]


@pytest.fixture(autouse=True)
def _isa_as_before() -> Iterator[None]:
    with cpu_settings():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_built_and_the_processor_runs_is_available(kind: str) -> None:
    runs, built, available = (
        getattr(isas, kind) for isas in (_cpu.processor_isas(), _cpu.built_isas(), _cpu.available_isas())
    )
    assert available == [isa for isa in runs if isa in built]
    assert available[-1] == "generic"


@pytest.mark.skipif("EMULATED_CPU_KERNELS" in os.environ, reason="emulated kernels run everywhere")
def test_bfloat16_dot_products_come_first_only_where_they_are_fast() -> None:
    floats = [isa for isa in _cpu.processor_isas().floats if isa != "amx_bf16"]
    info = Path("/proc/cpuinfo")
    if "avx512_bf16" not in floats or not info.exists():
        pytest.skip("needs a processor with AVX-512 BF16, on Linux")
    intel = "GenuineIntel" in info.read_text()
    assert floats[:2] == (["avx512", "avx512_bf16"] if intel else ["avx512_bf16", "avx512"])


def test_tiles_come_first_where_they_are_available_and_are_else_not_offered() -> None:
    for isas, tiles in ((_cpu.processor_isas().floats, "amx_bf16"), (_cpu.processor_isas().integers, "amx_int8")):
        assert (tiles in isas) == (_cpu.amx() == "available")
        assert tiles not in isas[1:]


@pytest.mark.skipif("EMULATED_CPU_KERNELS" in os.environ, reason="emulated tiles need no permission")
def test_a_signal_stack_without_room_for_tiles_is_the_reason_not_to_use_them() -> None:
    if _cpu.amx() != "available":
        pytest.skip(f"no AMX here: {_cpu.amx()}")
    script = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
from octavo import _cpu
print(_cpu.amx(), _cpu.available_isas().floats)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "signal stack" in answer
    assert "amx_bf16" not in answer


def test_both_kinds_may_be_chosen_apart() -> None:
    available = _cpu.available_isas()
    for floats in available.floats:
        for integers in available.integers:
            _cpu.choose_isa(f"{floats}+{integers}")
            assert (_cpu.float_isa(), _cpu.integer_isa()) == (floats, integers)
            assert _cpu.isa() == f"{floats}+{integers}"


def test_one_name_is_for_all_kinds_that_have_it_and_the_other_kind_keeps_its_best() -> None:
    available = _cpu.available_isas()
    for name in {*available.floats, *available.integers}:
        _cpu.choose_isa("generic")
        _cpu.choose_isa(name)
        assert _cpu.float_isa() == (name if name in available.floats else available.floats[0])
        assert _cpu.integer_isa() == (name if name in available.integers else available.integers[0])


@pytest.mark.parametrize(("kind", "isa"), NOT_BUILT or [("", "")])
def test_one_that_was_not_built_is_refused_with_the_way_to_build_it(kind: str, isa: str) -> None:
    if not isa:
        pytest.skip("the kernels are built for all instruction sets of this processor")
    names = f"{isa}+generic" if kind == "floats" else f"generic+{isa}"
    with pytest.raises(
        ValueError, match=f"not built for the instruction set '{isa}' of {kind} but for.*generic.*OCTAVO_ALL_ISAS=1"
    ):
        _cpu.choose_isa(names)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ("avx3", "no instruction set 'avx3'; of floats there are: amx_bf16, .*; of integers: amx_int8, avx512_vnni"),
        ("", "no instruction set ''"),
        (
            "avx_vnni+generic",
            "no instruction set 'avx_vnni' of floats; there are: amx_bf16, avx512_bf16, avx512, avx2, generic",
        ),
        ("generic+avx512_bf16", "no instruction set 'avx512_bf16' of integers; there are: amx_int8"),
        ("generic+", "no instruction set '' of integers"),
        ("generic+generic+generic", r"no instruction set 'generic\+generic' of integers"),
    ],
)
def test_names_that_there_are_not_are_refused_and_nothing_changes(names: str, error: str) -> None:
    before = _cpu.isa()
    with pytest.raises(ValueError, match=error):
        _cpu.choose_isa(names)
    assert _cpu.isa() == before


def test_what_the_variable_names_is_taken_and_shown() -> None:
    """In processes of their own, as a process has one choice."""
    script = "from octavo.kernels.cpu.backend import CpuKernels; print(CpuKernels().describe())"
    for names, error in (("generic+generic", None), ("avx3", "ConfigError: OCTAVO_CPU_ISA: there is no")):
        env = {**os.environ, "OCTAVO_CPU_ISA": names}
        found = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        if error is None:
            assert found.stdout.startswith("cpu (float generic, integer generic, "), found.stderr
        else:
            assert error in found.stderr


def test_all_instruction_sets_of_this_processor_are_tested() -> None:
    if NOT_BUILT:
        missing = ", ".join(f"{isa} of {kind}" for kind, isa in NOT_BUILT)
        pytest.skip(f"the kernels are not built for {missing} (OCTAVO_ALL_ISAS=1)")
    for kind in KINDS:
        assert getattr(_cpu.available_isas(), kind) == getattr(_cpu.processor_isas(), kind)


def test_set_up_finds_the_best_ones_by_the_same_rule(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or not SOURCES.exists():
        pytest.skip("needs the sources and a compiler")
    program = tmp_path / "best_isa"
    emulated = ["-DOCTAVO_EMULATED"] if "EMULATED_CPU_KERNELS" in os.environ else []
    command = [compiler, "-std=c++17", *emulated, "-o", str(program), str(SOURCES / "best_isa.cpp")]
    subprocess.run(command, check=True, timeout=PATIENCE)
    printed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    runs = _cpu.processor_isas()
    assert printed == f"{runs.floats[0]} {runs.integers[0]}\n"
