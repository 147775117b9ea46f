"""Which instruction sets there are: what was built, what the processor runs, and what may be chosen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.busy_machine import PATIENCE

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
NOT_BUILT = [isa for isa in _cpu.processor_isas() if isa not in _cpu.built_isas()]


def test_what_was_built_and_the_processor_runs_may_be_chosen() -> None:
    assert _cpu.available_isas() == [isa for isa in _cpu.processor_isas() if isa in _cpu.built_isas()]
    assert _cpu.available_isas()[-1] == "generic"
    before = _cpu.isa()
    for isa in _cpu.available_isas():
        _cpu.choose_isa(isa)
        assert _cpu.isa() == isa
    _cpu.choose_isa(before)


@pytest.mark.parametrize("isa", NOT_BUILT or [""])
def test_one_that_was_not_built_is_refused_with_the_way_to_build_it(isa: str) -> None:
    if not isa:
        pytest.skip("the kernels are built for all instruction sets of this processor")
    with pytest.raises(
        ValueError, match=f"not built for the instruction set '{isa}' but for.*generic.*OCTAVO_ALL_ISAS=1"
    ):
        _cpu.choose_isa(isa)


def test_all_instruction_sets_of_this_processor_are_tested() -> None:
    if NOT_BUILT:
        pytest.skip(f"the kernels are not built for {', '.join(NOT_BUILT)} (OCTAVO_ALL_ISAS=1)")
    assert _cpu.available_isas() == _cpu.processor_isas()


def test_set_up_finds_the_best_one_by_the_same_rule(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or not SOURCES.exists():
        pytest.skip("needs the sources and a compiler")
    program = tmp_path / "best_isa"
    subprocess.run([compiler, "-std=c++17", "-o", program, SOURCES / "best_isa.cpp"], check=True, timeout=PATIENCE)
    printed = subprocess.run([program], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert printed == f"{_cpu.processor_isas()[0]}\n"
