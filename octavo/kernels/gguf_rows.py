"""Rows of a quantised tensor in the format of GGUF files."""

from __future__ import annotations

import functools
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import ConfigError
from octavo.kernels.quantized_rows import QuantizedRows

_PLAIN = {dtype.checkpoint_name: dtype for dtype in DType if dtype.is_float}
#: Types of which the compiled kernels compute the values.
_COMPILED = ("Q4_0", "Q4_1", "Q8_0")
#: Values that the gguf package dequantises at once: its steps stay in a processor's cache.
_AT_ONCE = 1 << 16


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

    def dequantize(self) -> np.ndarray:
        """The values, float32 of ``shape``."""
        values = dequantize(self.kind, self.rows)
        return values.T if self.transposed else values


def dequantize(kind: str, rows: np.ndarray, dtype: DType = DType.FLOAT32) -> np.ndarray:
    """The values of rows of a GGUF type, those of the gguf package, rounded to ``dtype``.

    Args:
        kind: name of the type.
        rows: uint8 [N, bytes of a row].
        dtype: of the result [N, K]: float32 or bfloat16.
    """
    if kind in _PLAIN:
        return rounded(rows.view(_PLAIN[kind].numpy), dtype)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

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


@functools.cache
def _compiled() -> Any:
    """The compiled kernels, if they are built and new enough; they are several times faster, whatever the backend."""
    try:
        cpu = importlib.import_module("octavo._cpu")
    except ImportError:
        return None
    return cpu if hasattr(cpu, "dequantize_gguf") else None
