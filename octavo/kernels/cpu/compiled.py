"""``octavo._cpu``, and tensors as its operations take them: by address, so that callers keep them alive."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read

DTYPES = {torch.float32: cpu.Dtype.f32, torch.bfloat16: cpu.Dtype.bf16, torch.int8: cpu.Dtype.i8}


def address(x: Tensor | None) -> int:
    """Where a tensor begins; 0 without one."""
    return 0 if x is None else x.data_ptr()


def strided(x: Tensor | None) -> tuple[int, int]:
    """Address of a matrix, and elements from row to row; 0 without one."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def typed(x: Tensor) -> tuple[int, int, Any]:
    """Address of a matrix, elements from row to row, and type."""
    return x.data_ptr(), x.stride(0), DTYPES[x.dtype]
