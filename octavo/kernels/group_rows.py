"""Rows of integers with a scale for each group of values: GPTQ, AWQ, and the integers of compressed-tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

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
    codes: Tensor
    #: Of any floating type, [N, groups]; the number of groups divides K.
    scales: Tensor
    #: uint8 [N, groups]; None: all are 2^(bits - 1), so that the codes are symmetric around zero.
    zeros: Tensor | None = None
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
        return self._rows(torch.from_numpy(order).to(self.codes.device))

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
        scales = taken.scales.repeat_interleave(divided, 1)[:, groups]
        zeros = None if taken.zeros is None else taken.zeros.repeat_interleave(divided, 1)[:, groups]
        return replace(taken, scales=scales, zeros=zeros)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, of ``shape`` and rounded to ``dtype``."""
        values = dequantize_groups(self.codes, self.scales, self.zeros, self.bits, dtype)
        return values.t() if self.transposed else values

    def _rows(self, rows: slice | Tensor) -> GroupQuantizedRows:
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)


def dequantize_groups(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    dtype: torch.dtype,
    group_index: Tensor | None = None,
) -> Tensor:
    """(code - zero) * scale, computed in float32 and rounded to ``dtype``: [N, K].

    Args:
        codes, scales, zeros, bits: as in ``GroupQuantizedRows``.
        dtype: of the result.
        group_index: int64 [K], the group of each column; None: consecutive groups of equal size.
    """
    n, k = codes.shape
    out = torch.empty((n, k), dtype=dtype, device=codes.device)
    # A column's scale is that of its group: taken by index, or, several times faster, by broadcasting over each group.
    groups, inside = (k, 1) if group_index is not None else (scales.shape[1], k // scales.shape[1])
    step = max(1, _AT_ONCE // k)

    def by_column(values: Tensor) -> Tensor:
        return (values if group_index is None else values[:, group_index])[..., None]

    for start in range(0, n, step):
        rows = slice(start, start + step)
        zero = 2 ** (bits - 1) if zeros is None else by_column(zeros[rows].float())
        values = codes[rows].float().reshape(-1, groups, inside).sub_(zero).mul_(by_column(scales[rows].float()))
        out[rows] = values.view(-1, k)
    return out
