"""Arrays of a step: what the rooms above the kernels may know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

from octavo.core.dtypes import DType

#: An array of a backend, which makes it and computes with it: ``CpuArray``, or a tensor of torch. Other rooms may ask
#: for its ``shape`` and length, and take views: by slices, integers and None, and ``reshape`` where that needs no copy.
#: Not a protocol, as a backend's operations take its own arrays alone, which would narrow what the interface takes.
Array: TypeAlias = Any


class ArrayMaker(ABC):
    """How a backend makes arrays of values, and values of arrays."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: DType | None = None) -> Array:
        """A copy of the values, by default of their own type; ``dtype`` rounds to nearest even."""

    @abstractmethod
    def wrap(self, values: np.ndarray) -> Array:
        """The values where the backend computes: on the host over their own memory, which must not change meanwhile."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of zeros."""

    @abstractmethod
    def write(self, target: Array, values: np.ndarray) -> None:
        """Copies values of the target's shape into it, rounded to its type."""

    @abstractmethod
    def to_numpy(self, x: Array) -> np.ndarray:
        """The values once they are computed; on the host over the array's own memory."""

    # Between recorded steps:

    @abstractmethod
    def take_rows(self, x: Array, rows: np.ndarray) -> Array:
        """A copy of these rows of x."""

    @abstractmethod
    def put_rows(self, target: Array, rows: np.ndarray, x: Array) -> None:
        """Copies the rows of x to these rows of the target, converted to its type."""

    @abstractmethod
    def scatter_columns(self, x: Array, columns: Array, width: int) -> Array:
        """x, float32 [n, m], in the columns int64 [m] of [n, width] that is -inf elsewhere."""

    @abstractmethod
    def as_token_ids(self, tokens: Any) -> Array:
        """What a ``SamplingBackend`` has sampled as a step's token ids; a negative one, which is none, is 0."""

    @abstractmethod
    def put_tokens(self, token_ids: Array, targets: np.ndarray, tokens: Any, sources: np.ndarray) -> None:
        """Copies the sampled tokens at ``sources`` to ``targets`` of a step's token ids, negative ones as 0."""
