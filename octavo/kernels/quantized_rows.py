"""Matrices that a loader passes to layers in a checkpoint's own bits, instead of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod

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

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The values, float32 [N, K]."""
