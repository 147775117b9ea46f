"""Matrices that a loader passes to layers in a checkpoint's own bits, instead of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class QuantizedRows(ABC):
    """A quantised matrix [N, K]."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @abstractmethod
    def t(self) -> QuantizedRows:
        """The transposed matrix, of the same bits; it must be transposed again before it is packed."""

    @abstractmethod
    def reorder(self, order: np.ndarray) -> QuantizedRows:
        """The rows ``order``, of a matrix that is not transposed."""

    @abstractmethod
    def take(self, rows: slice, columns: slice) -> QuantizedRows:
        """A share of the matrix.

        Raises:
            ConfigError: the columns begin or end where the format cannot be divided.
        """

    @abstractmethod
    def dequantize(self) -> np.ndarray:
        """The values, float32 of ``shape``."""
