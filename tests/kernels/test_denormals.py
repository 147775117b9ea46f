"""Denormals count as zero in kernels, on every thread, and the caller's own arithmetic is what it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.core.dtypes import DType

cpu: Any = pytest.importorskip("octavo._cpu")

from octavo.kernels.cpu.array import CpuArray  # noqa: E402
from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch  # noqa: E402

#: Far below the least normal float32, 1.2e-38.
TINY = np.float32(1e-41)


def keeps_denormals() -> bool:
    """Whether this thread computes with them as IEEE 754 says."""
    return bool((np.full(64, TINY) * np.float32(1.0) > 0).all())


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    made = CpuKernels()
    made.set_threads(request.param)
    return made


def product(kernels: CpuKernels, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    packed = kernels.pack([weight], dtype=DType.FLOAT32)
    return kernels.to_numpy(packed(kernels.array(x), DType.FLOAT32)).copy()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_is_read_and_written_is_zero(kernels: CpuKernels, rows: int) -> None:
    """Inputs that are denormals, and products of normal numbers that would be."""
    ones = np.ones((rows, 512), np.float32)
    assert keeps_denormals()
    assert (product(kernels, ones * TINY, np.full((96, 512), 1e30, np.float32)) == 0).all()
    assert (product(kernels, ones, np.full((96, 512), TINY)) == 0).all()
    assert (product(kernels, ones * np.float32(1e-25), np.full((96, 512), 1e-17, np.float32)) == 0).all()
    assert keeps_denormals()


def test_a_recorded_step_flushes_and_its_host_calls_do_not(kernels: CpuKernels) -> None:
    weight = kernels.pack([np.eye(64, dtype=np.float32)], dtype=DType.FLOAT32)
    x = kernels.zeros((4, 64), DType.FLOAT32)
    seen = []

    def look(rows: np.ndarray) -> None:
        seen.append((keeps_denormals(), bool((rows == 0).all())))

    def forward(batch: ForwardBatch) -> ForwardOutput:
        return ForwardOutput(kernels.host_call(look, weight(x, DType.FLOAT32)))

    replay = kernels.capture(forward, BatchSize(4, 4, 4, 8, 8))
    kernels.write(x, np.full((4, 64), TINY))
    replay(make_batch([1] * 4, [1] * 4, np.zeros((4, 1), np.int32), 8, kernels))
    assert seen == [(True, True)]
    assert keeps_denormals()


def test_the_mode_is_put_back_when_a_step_fails(kernels: CpuKernels) -> None:
    def fail(rows: np.ndarray) -> None:
        raise RuntimeError("no")

    x = CpuArray.empty((4, 64), DType.FLOAT32)
    replay: Callable[..., Any] = kernels.capture(
        lambda batch: ForwardOutput(kernels.host_call(fail, x)), BatchSize(4, 4, 4, 8, 8)
    )
    with pytest.raises(RuntimeError, match="no"):
        replay(make_batch([1] * 4, [1] * 4, np.zeros((4, 1), np.int32), 8, kernels))
    assert keeps_denormals()


def test_all_instruction_sets_do_alike() -> None:
    """In processes of their own, as a process has one."""
    script = (
        "import json, numpy as np\n"
        "from octavo.core.dtypes import DType\n"
        "from octavo.kernels.cpu.backend import CpuKernels\n"
        "kernels = CpuKernels()\n"
        "x = kernels.array(np.full((5, 64), 1e-41, np.float32))\n"
        "w = kernels.pack([np.full((32, 64), 1e30, np.float32)], dtype=DType.FLOAT32)\n"
        "print(json.dumps(float(np.abs(kernels.to_numpy(w(x, DType.FLOAT32))).max())))\n"
    )
    for isa in cpu.available_isas().floats:
        command, env = [sys.executable, "-c", script], {**os.environ, "OCTAVO_CPU_ISA": isa}
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert json.loads(found.stdout) == 0.0, isa
