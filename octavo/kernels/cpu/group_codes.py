"""Conversion of integers in groups (GPTQ, AWQ, compressed-tensors) to the formats of the compiled kernels.

Symmetric integers keep their codes and scales: ``q4_32``, ``q4_128``, ``q8_32`` or ``q8_128``, the scale of a larger
group repeated; 8 bits with one scale a row are ``q8_channel``.

4 bits with zeros become ``q4_1``, whose minimum is -zero * scale, rounded to float16. That moves a weight by at most
2^-11 * 15 = 0.7 % of a quantisation step, an eighth of what rounding it to bfloat16 does; codes minus zeros in 8 bits
would be exact, in 8.1 to 8.5 bits a weight instead of 5.
"""

from __future__ import annotations

import numpy as np

from octavo.core.errors import ConfigError
from octavo.kernels.cpu.quantize import Codes
from octavo.kernels.group_rows import GroupQuantizedRows

#: Greatest relative error of a scale or minimum as float16.
_HALF_ROUNDING = 2.0**-11


def group_format(rows: GroupQuantizedRows) -> str | None:
    """The kernels' format of these rows.

    None if there is none: groups that are no multiple of 32, 8 bits with zeros, or scales out of float16's range.
    """
    if rows.bits == 8 and rows.zeros is None and rows.scales.shape[1] == 1:
        return "q8_channel"
    size = 128 if rows.group % 128 == 0 else 32
    if rows.group % size or not _fits_half(rows.scales):
        return None
    if rows.zeros is None:
        return f"q{rows.bits}_{size}"
    return "q4_1" if rows.bits == 4 and _fits_half(_minima(rows)) else None


def group_codes(rows: GroupQuantizedRows) -> Codes:
    """The codes of these rows.

    Raises:
        ConfigError: they have no ``group_format``.
    """
    format = group_format(rows)
    if format is None:
        raise ConfigError(
            f"the CPU kernels have no products with {rows.bits}-bit weights in groups of {rows.group}"
            f"{'' if rows.zeros is None else ' with zeros'}: use fewer tensor-parallel workers or quantization='none'"
        )
    codes = rows.codes if rows.bits == 4 else (rows.codes ^ 128).view(np.int8)
    if format == "q8_channel":
        return Codes(format, codes, rows.scales[:, 0].astype(np.float32))
    repeats = rows.group // (128 if format.endswith("128") else 32)

    def per_unit(values: np.ndarray) -> np.ndarray:
        return np.repeat(_halves(values), repeats, 1)

    return Codes(format, codes, per_unit(rows.scales), None if rows.zeros is None else per_unit(_minima(rows)))


def _minima(rows: GroupQuantizedRows) -> np.ndarray:
    """What code 0 stands for, float32 [N, groups]."""
    assert rows.zeros is not None
    return -(rows.zeros.astype(np.float32) * rows.scales.astype(np.float32))


def _fits_half(values: np.ndarray) -> bool:
    """Whether float16 holds the values with its usual precision: none is infinite or a coarse subnormal there."""
    values = values.astype(np.float32)
    return bool((np.abs(_halves(values).astype(np.float32) - values) <= _HALF_ROUNDING * np.abs(values)).all())


def _halves(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what is out of range becomes infinite, which is looked for
        return values.astype(np.float32).astype(np.float16)
