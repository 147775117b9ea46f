"""The kernel tests once more, with the AVX-512 and AVX-VNNI kernels: their instructions are emulated."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from tests.kernels import torch_facade  # noqa: E402

HERE = Path(__file__).parent
#: Of floats and of integers; those of AVX2 are not emulated, but the others are compared with them.
EMULATED = {
    "FLOAT": ("amx_bf16", "avx512_bf16", "avx512", "avx2"),
    "INTEGER": ("amx_int8", "avx512_vnni", "avx_vnni", "avx512", "avx2"),
}
_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
#: The processor's features, as Linux names them, without which the kernels would end the process.
NEEDED = {
    "amx_bf16": _AVX512 | {"amx_tile", "amx_bf16"},
    "amx_int8": _AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": set(),
}

within_the_emulated_run = pytest.mark.skipif(
    "EMULATED_CPU_KERNELS" not in os.environ, reason="needs the emulated kernels, which the slow test builds"
)


@pytest.fixture
def run_emulated(rebuilt_kernels: Any) -> Callable[[list[Path]], str]:
    """Runs these tests with the emulated kernels; gives what was printed."""
    if "avx2" not in _cpu.processor_isas().floats:
        pytest.skip("AVX-512 is emulated with AVX2, which this processor lacks")
    sets = [f"-DOCTAVO_{kind}_SETS={';'.join(isas)}" for kind, isas in EMULATED.items()]
    module = rebuilt_kernels.build("emulated", "-DOCTAVO_EMULATE=ON", *sets)

    def run(tests: list[Path]) -> str:
        environment = {"EMULATED_CPU_KERNELS": "1", "OCTAVO_CPU_ISA": "avx512_bf16+avx512_vnni"}
        printed: str = rebuilt_kernels.run_tests(module, tests, environment)
        return printed

    return run


def names(isa: str, printed: str) -> bool:
    """Whether a test with the instruction set is listed."""
    return re.search(rf"\[(?:[^\]]*-)?{isa}[-\]]", printed) is not None


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_kernel_tests_pass_with_emulated_avx512(
    rebuilt_kernels: Any, run_emulated: Callable[[list[Path]], str]
) -> None:
    printed = run_emulated([*rebuilt_kernels.tests(), Path(__file__)])
    for isa in {isa for isas in EMULATED.values() for isa in isas}:
        assert names(isa, printed), f"no test ran with the instruction set {isa}"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_answers_with_emulated_avx512_are_those_of_processors_that_have_it(
    run_emulated: Callable[[list[Path]], str],
) -> None:
    printed = run_emulated([HERE.parent / "engine" / "test_answer_digests.py"])
    for isa in EMULATED["FLOAT"]:
        assert names(isa, printed), f"no answer was computed with the instruction set {isa}"


@pytest.mark.skipif("EMULATED_CPU_KERNELS" in os.environ, reason="the emulated kernels run anywhere")
def test_no_instruction_set_is_offered_that_the_processor_lacks() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")] if cpuinfo.exists() else []
    if not flags:
        pytest.skip("needs the processor's features in /proc/cpuinfo")
    present = set(flags[0].split())
    runs = _cpu.processor_isas()
    for isa, needed in NEEDED.items():
        if isa in runs.floats or isa in runs.integers:
            assert needed <= present
        else:
            with pytest.raises(ValueError, match=f"cannot run the instruction set '{isa}'"):
                _cpu.choose_isa(isa)


def test_a_processor_with_the_features_is_offered_the_instruction_set() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")] if cpuinfo.exists() else []
    if not flags:
        pytest.skip("needs the processor's features in /proc/cpuinfo")
    runs, present = _cpu.processor_isas(), set(flags[0].split())
    for isa, needed in NEEDED.items():
        if isa.startswith("amx") and _cpu.amx() != "available":  # the system must permit it, too
            continue
        assert not needed <= present or isa in runs.floats or isa in runs.integers


# ---- within the emulated run ----------------------------------------------------------------------------------------


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kernels = torch_facade.make_kernels()
    _cpu.choose_isa("avx512_bf16")
    out: torch.Tensor = kernels.pack([weight])(x, torch.float32)
    return out


@within_the_emulated_run
@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_pairs_are_added_the_odd_one_first_with_a_rounding_after_each(k: int) -> None:
    """Intel's manual of VDPBF16PS. Products of two bfloat16, and sums with them of like magnitude, fit a float64."""
    generator = torch.Generator().manual_seed(k)
    weight, x = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (40, 9))
    terms = (x.double()[:, None] * weight.double()).numpy()
    if k % 2:
        terms = np.concatenate([terms, np.zeros((9, 40, 1))], axis=2)
    sums = np.zeros((9, 40), dtype=np.float32)
    for pair in range(0, k, 2):
        for term in (terms[..., pair + 1], terms[..., pair]):
            sums = (sums + term).astype(np.float32)
    assert np.array_equal(product(weight, x).numpy(), sums)


@within_the_emulated_run
def test_what_is_not_normal_counts_as_zero() -> None:
    least = 2.0**-126
    x = torch.tensor([[least / 2, 0.0], [least, 0.0], [least, -least * 1.5], [2.0**-60, 0.0]]).bfloat16()
    weight = torch.tensor([[1.0, 1.0], [1.5, 1.5], [2.0**-70, 0.0]]).bfloat16()
    expected = [[0.0, 0.0, 0.0], [least, 1.5 * least, 0.0], [0.0, 0.0, 0.0], [2.0**-60, 1.5 * 2.0**-60, 0.0]]
    # -1.5 + 1 of the least normal number is -0.5 of it, and 1.5 times that is less than it too.
    assert torch.equal(product(weight, x), torch.tensor(expected))
