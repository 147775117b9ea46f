"""Rows of a quantised tensor in the format of GGUF files."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.quantized_rows import QuantizedRows


@dataclass(frozen=True)
class GGUFRows(QuantizedRows):
    """A matrix [N, K] in GGUF blocks."""

    #: Name of the GGUF type, such as ``Q4_0``.
    kind: str
    #: uint8 [N, bytes of a row]
    rows: np.ndarray
    #: K.
    columns: int
    #: Values in a block, which cannot be split.
    block: int
    #: Whether this is the transposed matrix, [K, N]: its blocks are those of the other.
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), or (K, N) if transposed."""
        return (self.columns, len(self.rows)) if self.transposed else (len(self.rows), self.columns)

    def t(self) -> GGUFRows:
        """The transposed matrix, of the same blocks."""
        return replace(self, transposed=not self.transposed)

    def reorder(self, order: np.ndarray) -> GGUFRows:
        """The rows ``order``, of a matrix that is not transposed."""
        assert not self.transposed
        return replace(self, rows=self.rows[order])

    def take(self, rows: slice, columns: slice) -> GGUFRows:
        """A share of the matrix.

        Raises:
            ConfigError: the columns begin or end within a block.
        """
        if self.transposed:
            return self.t().take(columns, rows).t()
        start, stop, _ = columns.indices(self.columns)
        if start % self.block or stop % self.block:
            raise ConfigError(
                f"inputs {start} to {stop} of a matrix of GGUF type {self.kind} cannot be taken: its blocks hold "
                f"{self.block}; use fewer tensor-parallel workers or load with quantization='none'"
            )
        size = self.rows.shape[1] * self.block // self.columns
        taken = self.rows[rows, start // self.block * size : stop // self.block * size]
        return GGUFRows(self.kind, np.ascontiguousarray(taken), stop - start, self.block)

    def dequantize(self) -> Tensor:
        """The values, float32 of ``shape``."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        values = torch.from_numpy(dequantize(self.rows, GGMLQuantizationType[self.kind]))
        return values.t() if self.transposed else values
