"""Matrices that a loader passes to layers in a checkpoint's own bits, instead of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor


class QuantizedRows(ABC):
    """A quantised matrix [N, K]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @abstractmethod
    def take(self, rows: slice, columns: slice) -> QuantizedRows:
        """A share of the matrix.

        Raises:
            ConfigError: the columns begin or end where the format cannot be divided.
        """

    def t(self) -> Tensor | QuantizedRows:
        """The transposed matrix; its values, if the format has no other way."""
        return self.dequantize().t()

    @abstractmethod
    def reorder(self, order: np.ndarray) -> QuantizedRows:
        """The rows ``order``, int64."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The values, float32 [N, K]."""
