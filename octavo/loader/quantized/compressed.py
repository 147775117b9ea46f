"""Matrices of compressed-tensors, and those of fp8 checkpoints, which are stored alike.

Layouts: https://github.com/neuralmagic/compressed-tensors (``compressors``), and the README of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.core.model_config import QuantizationScheme
from octavo.kernels.group_rows import GroupQuantizedRows
from octavo.loader.quantized.packed import FLOATS, bits_of, expect, grouped, two_dimensions, unpack_words
from octavo.loader.stored import Stored

#: Rows of fp8 that are dequantised at once.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class PackedIntegers:
    """pack-quantized: weight_packed int32 [N, K / 8], the first column in the lowest bits; K / 4 with 8 bits.

    weight_scale is [N, groups]; weight_zero_point the same in int8, or packed along N; weight_shape holds N and K.
    """

    scheme: QuantizationScheme
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape")
    optional: ClassVar[tuple[str, ...]] = ("weight_zero_point", "weight_g_idx")

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K); without groups K must fill the words."""
        bits = bits_of(self.scheme)
        n, words = two_dimensions(stored, "weight_packed")
        expect(stored, "weight_packed", ("I32",), (n, words))
        expect(stored, "weight_shape", ("I32", "I64"), (2,))
        shape = stored["weight_scale"].shape
        groups = shape[1] if len(shape) == 2 else 1
        k = words * 32 // bits if self.scheme.group is None else groups * self.scheme.group
        if -(-k * bits // 32) != words:
            raise WeightError(
                f"weight_packed has {words} words a row and weight_scale {groups} groups, but config.json says "
                f"{self.scheme.number} in groups of {self.scheme.group}"
            )
        _expect_scales(stored, self.scheme, n, k)
        if "weight_zero_point" in stored:
            packed = -(-n * bits // 32)
            shapes = ((packed, groups),) if stored["weight_zero_point"].dtype == "I32" else ((n, groups),)
            expect(stored, "weight_zero_point", ("I32", "I8"), *shapes)
        if "weight_g_idx" in stored:
            expect(stored, "weight_g_idx", ("I32", "I64"), (k,))
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """Codes are stored as the integer plus 2^(bits - 1), and so are packed zeros."""
        bits = bits_of(self.scheme)
        n, k = tensors["weight_shape"].tolist()
        codes = unpack_words(tensors["weight_packed"], bits)
        codes = codes.reshape(len(codes), -1)
        if n != codes.shape[0] or not codes.shape[1] - 32 // bits < k <= codes.shape[1]:
            raise WeightError(f"weight_shape says {[n, k]}, weight_packed holds {list(codes.shape)}")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == np.int32:
            zeros = unpack_words(zeros.T, bits).reshape(zeros.shape[1], -1)[:, :n].T
        elif zeros is not None:
            zeros = (zeros.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
        index = tensors.get("weight_g_idx")
        index = None if index is None or bool((index == -1).all()) else index  # -1: it was never set
        scales = _row_scales(tensors["weight_scale"], n)
        return grouped(self.scheme, np.ascontiguousarray(codes[:, :k]), scales, zeros, index, dtype)


@dataclass(frozen=True)
class PlainIntegers:
    """int-quantized: weight int8 [N, K], weight_scale [N, groups] or of the whole matrix, and perhaps zeros in int8."""

    scheme: QuantizationScheme
    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("weight_zero_point",)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K)."""
        n, k = two_dimensions(stored, "weight")
        expect(stored, "weight", ("I8",), (n, k))
        _expect_scales(stored, self.scheme, n, k)
        if "weight_zero_point" in stored:
            expect(stored, "weight_zero_point", ("I8",), stored["weight_scale"].shape)
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The integers plus 128."""
        codes = tensors["weight"].view(np.uint8) ^ 128
        zeros = tensors.get("weight_zero_point")
        zeros = None if zeros is None else _row_scales(zeros.view(np.uint8) ^ 128, len(codes))
        return grouped(
            replace(self.scheme, number="int8"),
            codes,
            _row_scales(tensors["weight_scale"], len(codes)),
            zeros,
            None,
            dtype,
        )


@dataclass(frozen=True)
class Floats:
    """weight float8_e4m3fn [N, K] with a scale of the matrix, a row, a group, or a block; always dequantised.

    The scale is a factor of the weight, although its name may be weight_scale_inv.
    """

    scheme: QuantizationScheme
    #: Name of the scale.
    scale: str
    optional: ClassVar[tuple[str, ...]] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The weight and its scale."""
        return "weight", self.scale

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K)."""
        n, k = two_dimensions(stored, "weight")
        expect(stored, "weight", ("F8_E4M3",), (n, k))
        _expect_scales(stored, self.scheme, n, k, self.scale)
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> np.ndarray:
        """weight * scale, computed in float32."""
        weight, scales = tensors["weight"], tensors[self.scale].astype(np.float32)
        n, k = weight.shape
        block = self.scheme.block
        if block is None or scales.size == 1:
            scales = _row_scales(scales, n)
            rows, columns = 1, -(-k // scales.shape[1])
        else:
            rows, columns = block
        out = np.empty((n, k), dtype.numpy)
        step = -(-_ROWS_AT_ONCE // rows) * rows
        for start in range(0, n, step):
            part = weight[start : start + step].astype(np.float32)
            factors = scales[start // rows : (start + step) // rows]
            factors = np.repeat(np.repeat(factors, rows, 0)[: len(part)], columns, 1)[:, :k]
            out[start : start + step] = part * factors
        return out


def _expect_scales(
    stored: Mapping[str, Stored], scheme: QuantizationScheme, n: int, k: int, name: str = "weight_scale"
) -> None:
    """Checks the scales' shape: of groups or blocks if there are any, else of the rows or the whole matrix."""
    if scheme.block is not None:
        shapes: tuple[tuple[int, ...], ...] = ((-(-n // scheme.block[0]), -(-k // scheme.block[1])),)
    elif scheme.group is not None:
        shapes = ((n, -(-k // scheme.group)),)
    else:
        shapes = ((n, 1), (n,), (1,), (1, 1), ())
    expect(stored, name, FLOATS, *shapes)


def _row_scales(scales: np.ndarray, n: int) -> np.ndarray:
    """Scales or zeros as [N, groups]."""
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    return np.broadcast_to(scales, (n, scales.shape[1]))
