"""Rows of integers with a scale for each group of values: GPTQ, AWQ, and the integers of compressed-tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.quantized_rows import QuantizedRows

#: Values that ``dequantize_groups`` computes at once, as it makes float32 copies of them.
_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class GroupQuantizedRows(QuantizedRows):
    """Integers with a scale, and perhaps a zero, for each group of consecutive values of a row.

    The value of a weight is (code - zero) * scale.
    """

    #: 4 or 8.
    bits: int
    #: uint8 [N, K], one code in 0 .. 2^bits - 1 a byte.
    codes: np.ndarray
    #: Of any floating type, [N, groups]; the number of groups divides K.
    scales: np.ndarray
    #: uint8 [N, groups]; None: all are 2^(bits - 1), so that the codes are symmetric around zero.
    zeros: np.ndarray | None = None
    #: Whether this is the transposed matrix, [K, N]: its groups are those of the other.
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), or (K, N) if transposed."""
        n, k = self.codes.shape
        return (k, n) if self.transposed else (n, k)

    @property
    def group(self) -> int:
        """Consecutive values of a row that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def t(self) -> GroupQuantizedRows:
        """The transposed matrix, of the same groups."""
        return replace(self, transposed=not self.transposed)

    def reorder(self, order: np.ndarray) -> GroupQuantizedRows:
        """The rows ``order``, of a matrix that is not transposed."""
        assert not self.transposed
        return self._rows(order)

    def take(self, rows: slice, columns: slice) -> GroupQuantizedRows:
        """A share of the matrix, in smaller groups of the same scales if its columns divide a group."""
        if self.transposed:
            return self.t().take(columns, rows).t()
        start, stop, _ = columns.indices(self.shape[1])
        taken = self._rows(rows)
        taken = replace(taken, codes=taken.codes[:, start:stop])
        if self.scales.shape[1] == 1:
            return taken
        step = math.gcd(self.group, start, stop)
        divided, groups = self.group // step, slice(start // step, stop // step)
        scales = np.repeat(taken.scales, divided, 1)[:, groups]
        zeros = None if taken.zeros is None else np.repeat(taken.zeros, divided, 1)[:, groups]
        return replace(taken, scales=scales, zeros=zeros)

    def dequantize(self, dtype: DType = DType.FLOAT32) -> np.ndarray:
        """The values, of ``shape`` and rounded to ``dtype``."""
        values = dequantize_groups(self.codes, self.scales, self.zeros, self.bits, dtype)
        return values.T if self.transposed else values

    def _rows(self, rows: slice | np.ndarray) -> GroupQuantizedRows:
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)


def dequantize_groups(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    dtype: DType,
    group_index: np.ndarray | None = None,
) -> np.ndarray:
    """(code - zero) * scale, computed in float32 and rounded to ``dtype``: [N, K].

    Args:
        codes, scales, zeros, bits: as in ``GroupQuantizedRows``.
        dtype: of the result.
        group_index: int64 [K], the group of each column; None: consecutive groups of equal size.
    """
    n, k = codes.shape
    out = np.empty((n, k), dtype.numpy)
    # A column's scale is that of its group: taken by index, or, several times faster, by broadcasting over each group.
    groups, inside = (k, 1) if group_index is not None else (scales.shape[1], k // scales.shape[1])
    step = max(1, _AT_ONCE // k)

    def by_column(values: np.ndarray) -> np.ndarray:
        return (values if group_index is None else values[:, group_index])[..., None]

    for start in range(0, n, step):
        rows = slice(start, start + step)
        values = codes[rows].astype(np.float32).reshape(-1, groups, inside)
        values -= np.float32(2 ** (bits - 1)) if zeros is None else by_column(zeros[rows].astype(np.float32))
        values *= by_column(scales[rows].astype(np.float32))
        out[rows] = values.reshape(-1, k)
    return out
