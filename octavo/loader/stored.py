"""A tensor as the header of its file describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from octavo.core.dtypes import DType

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
