"""Rows of a quantised tensor in the format of GGUF files."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.kernels.quantized_rows import QuantizedRows

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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

    def dequantize(self) -> Tensor:
        """The values, float32 of ``shape``."""
        values = dequantize(self.kind, self.rows)
        return values.t() if self.transposed else values


def dequantize(kind: str, rows: np.ndarray) -> Tensor:
    """The values of rows of a GGUF type, uint8 [N, bytes of a row]: float32 [N, K], with the gguf package's bits."""
    if kind in _PLAIN:
        return torch.from_numpy(rows).view(_PLAIN[kind]).float()
    if kind in _QUICK:
        size, values = _QUICK[kind]
        return values(torch.from_numpy(rows).view(-1, size)).view(len(rows), -1)
    return _by_package(kind, rows)


def _by_package(kind: str, rows: np.ndarray) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    out = np.empty((len(rows), rows.shape[1] // size * block), np.float32)
    step = max(1, _AT_ONCE // max(1, out.shape[1]))

    def fill(start: int) -> None:
        with np.errstate(all="ignore"):  # no warnings of numpy: a damaged scale may be infinite
            out[start : start + step] = dequantize(rows[start : start + step], number)

    for _ in _pool().map(fill, range(0, len(rows), step)):
        pass
    return torch.from_numpy(out)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dequantize")


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, as float32 [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Codes of bytes [B, 16], the low nibbles first: float32 [B, 32]."""
    packed = packed.contiguous()
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


#: Bytes of a block of 32 values, and its values; types that are simple enough to be several times faster here.
_QUICK = {
    "Q4_0": (18, lambda blocks: _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks, 0))),
    "Q4_1": (20, lambda blocks: _nibbles(blocks[:, 4:]).mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))),
    "Q8_0": (34, lambda blocks: blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))),
}
