"""Number types of weights, activations and caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


class DType(StrEnum):
    """A number type; its value is its name in options, such as "bfloat16"."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    #: float8_e4m3fn.
    FP8 = "fp8"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        if self in (DType.BFLOAT16, DType.FP8):
            return np.dtype(ml_dtypes.bfloat16 if self is DType.BFLOAT16 else ml_dtypes.float8_e4m3fn)
        return np.dtype(self.value)

    @cached_property
    def itemsize(self) -> int:
        return int(self.numpy.itemsize)

    @property
    def checkpoint_name(self) -> str:
        """The name in safetensors and GGUF files, such as "BF16"."""
        return _CHECKPOINT_NAMES[self]

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type of 16 bits or more."""
        return self in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)

    @classmethod
    def of(cls, values: np.ndarray) -> DType:
        """The type of an array; raises ValueError for others."""
        name = values.dtype.name
        return cls.FP8 if name == "float8_e4m3fn" else cls(name)


_CHECKPOINT_NAMES = {
    DType.FLOAT32: "F32", DType.BFLOAT16: "BF16", DType.FLOAT16: "F16", DType.FP8: "F8_E4M3",
    DType.INT8: "I8", DType.UINT8: "U8", DType.INT32: "I32", DType.INT64: "I64",
}  # fmt: skip


def rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The values, rounded to nearest even; the same memory if they have this type already."""
    if values.dtype == np.float16 and dtype is DType.BFLOAT16:
        values = values.astype(np.float32)  # ml_dtypes rounds float32 only
    return values.astype(dtype.numpy, copy=False)


#: The types of safetensors: the engine's, and others that it skips or refuses.
DTYPES: dict[str, np.dtype[Any]] = {
    **{dtype.checkpoint_name: dtype.numpy for dtype in DType},
    "F64": np.dtype(np.float64),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I16": np.dtype(np.int16),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, by its header."""

    #: As in safetensors, such as "I32".
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its bytes; 0 if its type is unknown."""
        return math.prod(self.shape) * (DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0)
