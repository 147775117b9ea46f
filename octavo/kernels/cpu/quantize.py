"""Quantisation of weights to 8 or 4 bits, at load.

Formats (their names are the compiled kernels' own):

=============  ====================================================================  ===============
name           value of a weight                                                     bits per weight
=============  ====================================================================  ===============
``q8_channel`` code in -127 .. 127 times a float32 scale of its row                  8 + 32 / K
``q8_32``      int8 code times a float16 scale of 32 neighbours (GGUF's Q8_0)        8.5
``q8_128``     the same with 128 neighbours                                          8.125
``q4_32``      (code - 8), code in 0 .. 15, times such a scale (GGUF's Q4_0)         4.5
``q4_128``     the same with 128 neighbours                                          4.125
``q4_1``       code times scale plus a float16 minimum, both of 32 neighbours        5
``q4_k``       code times d * s minus dmin * m; s and m of 32, d and dmin of 256     4.625
=============  ====================================================================  ===============

Scales and minima of 32 (or 128, 256) are those of so many consecutive values of a row, along K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.cpu.compiled import DTYPES, address, cpu


@dataclass(frozen=True)
class Codes:
    """A quantised matrix [N, K]; fields that its format does not have are None."""

    format: str
    #: [N, K]; 8 bits: int8; 4 bits: uint8, one per byte.
    codes: np.ndarray
    #: float16 [N, K / group]; q8_channel: float32 [N].
    scales: np.ndarray
    #: float16 [N, K / group].
    minima: np.ndarray | None = None
    #: q4_k: uint8 [N, K / 32], 6 bits, of the scales; and of the minima.
    group_scales: np.ndarray | None = None
    group_minima: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """The values, float32 [N, K]."""
        n, k = self.codes.shape
        scales = self.scales.astype(np.float32).reshape(n, -1)
        minima = None if self.minima is None else self.minima.astype(np.float32)
        if self.group_scales is not None and self.group_minima is not None and minima is not None:
            scales = np.repeat(scales, 8, 1) * self.group_scales
            minima = -(np.repeat(minima, 8, 1) * self.group_minima)
        codes = self.codes.astype(np.float32).reshape(n, scales.shape[1], -1)
        if minima is None:
            codes = codes if self.codes.dtype == np.int8 else codes - 8
            return (codes * scales[..., None]).reshape(n, k)
        return (codes * scales[..., None] + minima[..., None]).reshape(n, k)


def quantize_weight(weight: np.ndarray, kind: str, group: int | None) -> Codes:
    """Quantises a floating-point weight [N, K].

    8 bits: the scale is the greatest magnitude of the group / 127. 4 bits: the one of ten scales with the least squared
    error.

    Args:
        weight: float32, bfloat16 or float16.
        kind: "int8" or "int4".
        group: weights of a row that share a scale, 32 or 128; None (int8 only): the whole row.

    Raises:
        ConfigError: an unknown kind or group, or K is no multiple of the group.
        WeightError: a weight is infinite or not a number, or too great for a float16 scale.
    """
    if (kind, group) not in {("int8", None), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128)}:
        raise ConfigError(
            f"quantization {kind!r} with group {group!r}: expected int8 (None, 32, 128) or int4 (32, 128)"
        )
    n, k = weight.shape
    if group is not None and k % group:
        raise ConfigError(f"{kind} in groups of {group} needs inputs in multiples of {group}, not {k}")
    bits = int(kind[-1])
    dtype = DType.of(weight) if DType.of(weight) in (DType.FLOAT32, DType.BFLOAT16) else DType.FLOAT32
    weight = np.ascontiguousarray(weight, dtype.numpy)
    codes = np.empty((n, k), np.int8 if bits == 8 else np.uint8)
    scales = np.empty(n, np.float32) if group is None else np.empty((n, k // group), np.float16)
    cpu.quantize_rows(address(weight), n, k, k, DTYPES[dtype], bits, group or 0, address(codes), address(scales))
    if not np.isfinite(scales).all():
        raise WeightError("a weight is infinite, not a number, or too great to be quantised")
    return Codes("q8_channel" if group is None else f"q{bits}_{group}", codes, scales)
