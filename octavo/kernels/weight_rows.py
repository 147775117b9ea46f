"""Quantised matrices in a checkpoint's own bits: GGUF blocks, and the groups of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import functools
import importlib
import math
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError, WeightError

_PLAIN = {dtype.checkpoint_name: dtype for dtype in DType if dtype.is_float}
#: Types whose values the compiled kernels compute.
_COMPILED = ("Q4_0", "Q4_1", "Q8_0")
#: Values that the gguf package dequantises at once: its steps stay in a processor's cache.
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class QuantizedRows(ABC):
    """A quantised matrix [N, K], which a loader passes to layers in the checkpoint's own bits, instead of an array."""

    #: Whether this is the transposed matrix, [K, N], of the same bits.
    transposed: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K), or (K, N) if transposed."""

    def t(self) -> Self:
        """The transposed matrix, of the same bits; it must be transposed again before it is packed."""
        return replace(self, transposed=not self.transposed)

    @abstractmethod
    def reorder(self, order: np.ndarray) -> Self:
        """The rows ``order``, of a matrix that is not transposed."""

    def take(self, rows: slice, columns: slice) -> Self:
        """A share of the matrix; ConfigError if the columns begin or end where the format cannot be divided."""
        return self.t()._take(columns, rows).t() if self.transposed else self._take(rows, columns)

    @abstractmethod
    def _take(self, rows: slice, columns: slice) -> Self:
        """``take`` of a matrix that is not transposed."""

    @abstractmethod
    def dequantize(self) -> np.ndarray:
        """The values, float32 of ``shape``."""


def to_values(tensor: np.ndarray | QuantizedRows) -> np.ndarray:
    """The tensor, dequantised if it is in a checkpoint's own bits."""
    return tensor.dequantize() if isinstance(tensor, QuantizedRows) else tensor


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
    #: float32 [N], by which rows are multiplied, or None.
    factors: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.columns, len(self.rows)) if self.transposed else (len(self.rows), self.columns)

    def reorder(self, order: np.ndarray) -> Self:
        assert not self.transposed
        return replace(self, rows=self.rows[order], factors=None if self.factors is None else self.factors[order])

    def reorder_columns(self, order: np.ndarray) -> GGUFRows:
        """The columns ``order``; where that divides blocks, as Q8_0: values are rounded once more, to 8 bits."""
        assert not self.transposed
        blocks = order.reshape(-1, self.block)
        if (blocks % self.block == np.arange(self.block)).all():
            rows = self.rows.reshape(len(self.rows), len(blocks), -1)[:, blocks[:, 0] // self.block]
            return replace(self, rows=rows.reshape(self.rows.shape))
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        rows = quantize(dequantize(self.kind, self.rows)[:, order], GGMLQuantizationType.Q8_0)
        return GGUFRows("Q8_0", rows, self.columns, 32, self.factors)

    def _take(self, rows: slice, columns: slice) -> Self:
        start, stop, _ = columns.indices(self.columns)
        if start % self.block or stop % self.block:
            raise ConfigError(
                f"inputs {start} to {stop} of a matrix of GGUF type {self.kind} cannot be taken: its blocks hold "
                f"{self.block}; use fewer tensor-parallel workers or load with quantization='none'"
            )
        size = self.rows.shape[1] * self.block // self.columns
        share = self.rows[rows, start // self.block * size : stop // self.block * size]
        factors = None if self.factors is None else self.factors[rows]
        return replace(self, rows=np.ascontiguousarray(share), columns=stop - start, factors=factors)

    def dequantize(self) -> np.ndarray:
        values = dequantize(self.kind, self.rows)
        if self.factors is not None:
            values *= self.factors[:, None]
        return values.T if self.transposed else values


def mxfp4_rows(blocks: np.ndarray, scales: np.ndarray) -> GGUFRows:
    """A matrix [N, K] of Open Compute's MXFP4, with the same bits in the order of GGUF blocks.

    Args:
        blocks: uint8 [N, K / 32, 16], codes e2m1 of two values a byte, the first one in the low half.
        scales: uint8 [N, K / 32], e8m0.

    Raises:
        WeightError: a scale is not a number.
    """
    if bool((scales == 255).any()):
        raise WeightError("a scale of MXFP4 weights is 255, which is not a number")
    n, groups, _ = blocks.shape
    rows = np.empty((n, groups, 17), np.uint8)
    rows[..., 0] = scales
    first, second = blocks[..., :8], blocks[..., 8:]  # a byte of GGUF holds the values i and i + 16
    rows[..., 1::2] = first & 15 | second << 4
    rows[..., 2::2] = first >> 4 | second & 0xF0
    return GGUFRows("MXFP4", rows.reshape(n, -1), groups * 32, 32)


def dequantize(kind: str, rows: np.ndarray, dtype: DType = DType.FLOAT32) -> np.ndarray:
    """The values of uint8 rows [N, bytes of a row] of a GGUF type, equal to the gguf package's: [N, K].

    ``dtype``: float32 or bfloat16.
    """
    if kind in _PLAIN:
        return rounded(rows.view(_PLAIN[kind].numpy), dtype)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind == "Q1_0":  # the package has no decoder for it
        return rounded(_q1_0(rows), dtype)
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    out = np.empty((len(rows), rows.shape[1] // size * block), dtype.numpy)
    if kind in _COMPILED and (cpu := _compiled()) is not None:
        rows = np.ascontiguousarray(rows)
        to = cpu.Dtype.f32 if dtype is DType.FLOAT32 else cpu.Dtype.bf16
        cpu.dequantize_gguf(kind, rows.ctypes.data, rows.size // size, out.ctypes.data, to)
        return out
    from gguf.quants import dequantize as by_package

    step = max(1, _AT_ONCE // max(1, out.shape[1]))

    def fill(start: int) -> None:
        with np.errstate(all="ignore"):  # no warnings of numpy: a damaged scale may be infinite
            out[start : start + step] = by_package(rows[start : start + step], number)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(0, len(rows), step)):
            pass
    return out


def _q1_0(rows: np.ndarray) -> np.ndarray:
    """Blocks of a float16 scale and 128 bits, the lowest ones first: the scale with a sign, minus for 0."""
    blocks = rows.reshape(len(rows), -1, 18)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    return (signs * np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)).reshape(len(rows), -1)


@functools.cache
def _compiled() -> Any:
    """The compiled kernels, if they are built and new enough; they are several times faster than numpy."""
    try:
        cpu = importlib.import_module("octavo._cpu")
    except ImportError:
        return None
    return cpu if hasattr(cpu, "dequantize_gguf") else None


#: Values that ``dequantize_groups`` computes at once, as it makes float32 copies of them.
_GROUPS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class GroupQuantizedRows(QuantizedRows):
    """Integers with a scale, and perhaps a zero, for each group of consecutive values of a row.

    The value of a weight is (code - zero) * scale.
    """

    #: 4 or 8.
    bits: int
    #: uint8 [N, K], one code in 0 .. 2^bits - 1 per byte.
    codes: np.ndarray
    #: [N, groups] of any floating type; the number of groups divides K.
    scales: np.ndarray
    #: uint8 [N, groups]; None: all are 2^(bits - 1), so that the codes are symmetric around zero.
    zeros: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return (k, n) if self.transposed else (n, k)

    @property
    def group(self) -> int:
        """Consecutive values of a row that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def reorder(self, order: np.ndarray) -> Self:
        assert not self.transposed
        zeros = None if self.zeros is None else self.zeros[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], zeros=zeros)

    def _take(self, rows: slice, columns: slice) -> Self:
        """In smaller groups of the same scales if the columns divide a group."""
        start, stop, _ = columns.indices(self.shape[1])
        codes, scales = self.codes[rows, start:stop], self.scales[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        if scales.shape[1] > 1:
            step = math.gcd(self.group, start, stop)
            divided, groups = self.group // step, slice(start // step, stop // step)
            scales = np.repeat(scales, divided, 1)[:, groups]
            zeros = None if zeros is None else np.repeat(zeros, divided, 1)[:, groups]
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, dtype: DType = DType.FLOAT32) -> np.ndarray:
        values = dequantize_groups(self.codes, self.scales, self.zeros, self.bits, dtype)
        return values.T if self.transposed else values


def dequantize_groups(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    dtype: DType,
    group_index: np.ndarray | None = None,
) -> np.ndarray:
    """(code - zero) * scale, computed in float32 and rounded to ``dtype``: [N, K].

    ``group_index``: int64 [K], the group of each column; None: consecutive groups of equal size, as in
    ``GroupQuantizedRows``.
    """
    n, k = codes.shape
    out = np.empty((n, k), dtype.numpy)
    # Scales of groups are broadcast over their columns, which is several times faster than an index by column.
    groups, inside = (k, 1) if group_index is not None else (scales.shape[1], k // scales.shape[1])
    step = max(1, _GROUPS_AT_ONCE // k)

    def by_column(values: np.ndarray) -> np.ndarray:
        return (values if group_index is None else values[:, group_index])[..., None]

    for start in range(0, n, step):
        rows = slice(start, start + step)
        values = codes[rows].astype(np.float32).reshape(-1, groups, inside)
        values -= np.float32(2 ** (bits - 1)) if zeros is None else by_column(zeros[rows].astype(np.float32))
        values *= by_column(scales[rows].astype(np.float32))
        out[rows] = values.reshape(-1, k)
    return out
