"""What the methods have in common: checks of types and shapes, packed integers, and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.core.model_config import QuantizationScheme
from octavo.kernels.group_rows import GroupQuantizedRows, dequantize_groups
from octavo.loader.stored import Stored

#: Types of scales, as safetensors names them.
FLOATS = ("F16", "BF16", "F32")


class Method(Protocol):
    """How one quantised matrix is stored; tensors are named by what follows the matrix's name."""

    @property
    def required(self) -> tuple[str, ...]:
        """The tensors that it must have."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Those that it may have besides."""

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K).

        Raises:
            WeightError: the tensors fit neither each other nor the checkpoint's configuration.
        """

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The matrix; dequantised to ``dtype`` if its groups are not consecutive values of a row.

        Raises:
            WeightError: a value of a tensor is impossible.
        """


def expect(stored: Mapping[str, Stored], name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Checks the type and shape of a tensor.

    Raises:
        WeightError: it has another type, or none of the shapes.
    """
    tensor = stored[name]
    if tensor.dtype not in dtypes:
        raise WeightError(f"{name} is of type {tensor.dtype}; expected {' or '.join(dtypes)}")
    if tensor.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise WeightError(f"{name} has shape {list(tensor.shape)}; expected {wanted}")


def two_dimensions(stored: Mapping[str, Stored], name: str) -> tuple[int, int]:
    """The shape of a tensor that is a matrix.

    Raises:
        WeightError: it is none, or empty.
    """
    shape = stored[name].shape
    if len(shape) != 2 or not all(shape):
        raise WeightError(f"{name} has shape {list(shape)}; expected a matrix")
    return shape[0], shape[1]


def bits_of(scheme: QuantizationScheme) -> int:
    """Bits of a weight."""
    return 4 if scheme.number == "int4" else 8


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [A, B] to uint8 [A, B, 32 / bits], the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return octets if bits == 8 else np.stack((octets & 15, octets >> 4), axis=-1).reshape(*words.shape, 8)


def grouped(
    scheme: QuantizationScheme,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    index: np.ndarray | None,
    dtype: DType,
) -> GroupQuantizedRows | np.ndarray:
    """Rows of 4 or 8 bits in groups.

    They are dequantised to ``dtype`` if the groups are not consecutive values, or the last one is smaller.

    Args:
        scheme: the size of the groups, and the type of a weight if it is not 8 bits.
        codes, scales, zeros: as in ``GroupQuantizedRows``; zeros may all be the middle.
        index: [K] of any integer type, the group of each column; None: consecutive ones.

    Raises:
        WeightError: ``index`` names a group that is none.
    """
    bits, columns, groups = bits_of(scheme), codes.shape[1], scales.shape[1]
    size = scheme.group or columns
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    in_order = np.arange(columns) // size
    index = in_order if index is None else index.astype(np.int64)
    if bool(((index < 0) | (index >= groups)).any()):
        raise WeightError(f"g_idx names a group outside 0 to {groups - 1}")
    if columns % size or not np.array_equal(index, in_order):
        return dequantize_groups(codes, scales, zeros, bits, dtype, index)
    return GroupQuantizedRows(bits, codes, scales, zeros)
