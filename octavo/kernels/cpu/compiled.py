"""``octavo._cpu``, and arrays as its operations take them: by address, so that callers keep them alive."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.cpu.array import CpuArray

cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read

DTYPES = {DType.FLOAT32: cpu.Dtype.f32, DType.BFLOAT16: cpu.Dtype.bf16, DType.INT8: cpu.Dtype.i8}


def address(x: CpuArray | np.ndarray | None) -> int:
    """Where an array begins; 0 without one."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    return 0 if x is None else x.address


def strided(x: CpuArray | None) -> tuple[int, int]:
    """Address of a matrix, and elements from row to row; 0 without one."""
    return (0, 0) if x is None else (x.address, x.strides[0])


def typed(x: CpuArray) -> tuple[int, int, Any]:
    """Address of a matrix, elements from row to row, and type."""
    return x.address, x.strides[0], DTYPES[x.dtype]
