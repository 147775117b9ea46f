"""Types of numbers, of torch and of the engine."""

from __future__ import annotations

import torch

from octavo.core.dtypes import DType
from octavo.kernels.torch_backend import torch_dtype

_NAMES = {torch_dtype(name): name for name in DType}


def engine_dtype(dtype: torch.dtype) -> DType:
    """The engine's name of a type of torch."""
    return _NAMES[dtype]
