"""The types of numbers that the engine knows: of weights, activations and caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


class DType(StrEnum):
    """A type of numbers; its value is its name in options, such as "bfloat16"."""

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
        """The type of numpy's arrays; ml_dtypes has what numpy lacks."""
        if self in (DType.BFLOAT16, DType.FP8):
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16 if self is DType.BFLOAT16 else ml_dtypes.float8_e4m3fn)
        return np.dtype(self.value)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(self.numpy.itemsize)

    @property
    def checkpoint_name(self) -> str:
        """The name in headers of safetensors and of GGUF files, such as "BF16"."""
        return _CHECKPOINT_NAMES[self]

    @property
    def is_float(self) -> bool:
        """Whether it has 16 bits or more and a floating point."""
        return self in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)

    @classmethod
    def of(cls, values: np.ndarray) -> DType:
        """The type of an array's numbers.

        Raises:
            ValueError: the engine has no such type.
        """
        name = values.dtype.name
        return cls.FP8 if name == "float8_e4m3fn" else cls(name)


_CHECKPOINT_NAMES = {
    DType.FLOAT32: "F32",
    DType.BFLOAT16: "BF16",
    DType.FLOAT16: "F16",
    DType.FP8: "F8_E4M3",
    DType.INT8: "I8",
    DType.UINT8: "U8",
    DType.INT32: "I32",
    DType.INT64: "I64",
}


def rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The values to nearest even, over the same memory if they are of this type already."""
    if values.dtype == np.float16 and dtype is DType.BFLOAT16:
        values = values.astype(np.float32)  # of which ml_dtypes knows how to round
    return values.astype(dtype.numpy, copy=False)


# A tensor as the header of its file describes it.

#: The types of safetensors: the engine's, and those that it reads to refuse or to pass over.
DTYPES: dict[str, np.dtype[Any]] = {
    **{dtype.checkpoint_name: dtype.numpy for dtype in DType},
    "F64": np.dtype(np.float64),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I16": np.dtype(np.int16),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Stored:
    """A tensor that is not read yet."""

    #: As safetensors names it, such as "I32".
    dtype: str
    shape: tuple[int, ...]
    #: Where it begins in the file.
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; 0 if its type is unknown."""
        return math.prod(self.shape) * (DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0)
