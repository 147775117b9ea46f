"""Exact conversion of GGUF blocks to codes and scales.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Six types are converted; callers dequantise
the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.core.errors import ConfigError
from octavo.kernels.cpu.quantize import Codes


def gguf_weight(kind: str, rows: np.ndarray, columns: int) -> Codes:
    """The codes of a tensor.

    Args:
        kind: type of the tensor, one of ``KEPT_TYPES``.
        rows: uint8 [N, bytes of a row], as they are in the file.
        columns: K.

    Raises:
        ConfigError: the type is not one of ``KEPT_TYPES``, or the rows do not have the bytes of K values.
    """
    if kind not in _READERS:
        raise ConfigError(f"GGUF type {kind} is not kept in its bits; kept: {', '.join(_READERS)}")
    values, size, read = _READERS[kind]
    if columns % values or rows.shape[1] != columns // values * size:
        raise ConfigError(
            f"rows of {columns} values of GGUF type {kind} have {columns / values * size:g} bytes, not {rows.shape[1]}"
        )
    return read(rows.reshape(rows.shape[0], -1, size))


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte ``start`` of each block [N, B, size]: [N, B]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes of runs of bytes [N, B, run]: first the low nibbles of a run, then the high ones; uint8 [N, K]."""
    n, blocks, run = packed.shape
    codes = np.empty((n, blocks, 2, run), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(n, -1)


def _q8_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 32 int8."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(blocks), -1)
    return Codes("q8_32", codes, _halves(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 16 bytes."""
    return Codes("q4_32", _nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Codes:
    """A block: scale, minimum, 16 bytes."""
    return Codes("q4_1", _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Codes:
    """A block: scale, 32 fifth bits, 16 bytes of low bits; a code is 16 less than its 5 bits say."""
    low = _nibbles(blocks[..., 6:])
    fifth = np.unpackbits(np.ascontiguousarray(blocks[..., 2:6]), axis=-1, bitorder="little").reshape(low.shape)
    return Codes("q8_32", (low | fifth << 4).view(np.int8) - np.int8(16), _halves(blocks, 0))


#: The values that the codes of IQ4_NL mean.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def _iq4_nl(blocks: np.ndarray) -> Codes:
    """A block: scale, 16 bytes of indices into a table."""
    return Codes("q8_32", _IQ4_VALUES[_nibbles(blocks[..., 2:])], _halves(blocks, 0))


def _q4_k(blocks: np.ndarray) -> Codes:
    """A block: d, dmin, 12 bytes of 8 scales and 8 minima, 4 runs of 32 bytes.

    The first 4 scales and minima are the low 6 bits of bytes 0 to 3 and 4 to 7; the others have their low 4 bits in
    bytes 8 to 11 (the scale's are the low half) and their high 2 bits atop the first ones'.
    """
    n = len(blocks)
    first, second, third = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return Codes(
        "q4_k",
        _nibbles(blocks[..., 16:].reshape(n, -1, 32)),
        _halves(blocks, 0),
        _halves(blocks, 2),
        scales.reshape(n, -1),
        minima.reshape(n, -1),
    )


#: Values and bytes of a block, and its reader.
_READERS: dict[str, tuple[int, int, Callable[[np.ndarray], Codes]]] = {
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "IQ4_NL": (32, 18, _iq4_nl),
    "Q4_K": (256, 144, _q4_k),
}
#: Types that products compute without requantisation.
KEPT_TYPES = frozenset(_READERS)
