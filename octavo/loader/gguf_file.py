"""Reads a GGUF file's header: metadata and offsets of tensors. All sizes are validated before use.

The ``gguf`` package has a reader too; it is not used because it makes several numpy views a token (seconds for a
vocabulary) and trusts the file's counts. Its tables of types and its dequantization are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.core.errors import UnsupportedModelError, WeightError

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
#: Longest text in bytes (chat templates and whole tokenizers are stored as texts).
_MAX_TEXT = 64 << 20
_MAX_DIMS = 4
#: Bytes read at once when a tensor is streamed.
_PIECE = 8 << 20

#: Tensor types that can be dequantized.
SUPPORTED_TYPES = frozenset(
    [
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.IQ4_XS,
    ]
)


@dataclass(frozen=True)
class GGUFTensor:
    """Type, shape and offset of a tensor in the file."""

    name: str
    #: Rows first, as in torch and numpy (reversed in the file).
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    #: From the start of the file, in bytes.
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of the last dimension."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


class GGUFFile:
    """The header of a GGUF file, in memory; tensors are read from disk on demand.

    Metadata values are int, float, bool, str, list[str] or a numpy array. Every tensor of ``tensors`` lies within the
    file and has a supported type.

    Raises:
        WeightError: the file is truncated, corrupt or not GGUF.
        UnsupportedModelError: it is GGUF of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header of the file at ``path``."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self.size = path.stat().st_size
            with path.open("rb") as f:
                self._read(_Header(f, self.size, path))
        except OSError as e:
            raise WeightError(f"{path} cannot be read: {e.strerror or e}") from e

    def _read(self, header: _Header) -> None:
        if header.take(4) != b"GGUF":
            raise WeightError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = header.number("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version}; versions 2 and 3, little-endian, are read"
            )
        tensor_count = header.count(at_least=24)
        for _ in range(header.count(at_least=13)):
            key = header.text()
            if key in self.metadata:
                raise header.corrupt(f"the key {key!r} occurs twice")
            self.metadata[key] = header.value(header.number("<I"))
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModelError(f"{self.path} is one part of a split GGUF model; merge the parts into one file")
        entries = [header.tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise header.corrupt(f"the alignment {alignment!r} is not a power of two")
        start = -(-header.position // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add_tensor(name, shape, kind, start + offset, header)

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, header: _Header) -> None:
        if name in self.tensors:
            raise header.corrupt(f"the tensor {name!r} occurs twice")
        try:
            tensor = GGUFTensor(name, shape, GGMLQuantizationType(kind), offset)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from None
        if tensor.type not in SUPPORTED_TYPES:
            names = ", ".join(sorted(t.name for t in SUPPORTED_TYPES))
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has type {tensor.type.name}, which is not supported; supported: {names}"
            )
        block = GGML_QUANT_SIZES[tensor.type][0]
        if shape[-1] % block:
            raise header.corrupt(f"the rows of tensor {name!r} hold {shape[-1]} values, not a multiple of {block}")
        end = offset + tensor.rows * tensor.row_bytes
        if end > self.size:
            raise WeightError(f"{self.path} is truncated: tensor {name!r} ends at byte {end} of {self.size}")
        self.tensors[name] = tensor

    def read_rows(self, tensor: GGUFTensor, rows: slice | None = None) -> np.ndarray:
        """Rows of a tensor, by default all, in the file's format: uint8 [rows, bytes of a row]."""
        first, last, _ = (rows or slice(None)).indices(tensor.rows)
        count = (last - first) * tensor.row_bytes
        with self.path.open("rb") as f:
            f.seek(tensor.offset + first * tensor.row_bytes)
            data = np.fromfile(f, dtype=np.uint8, count=count)
        if data.size != count:
            raise WeightError(f"{self.path} became shorter while tensor {tensor.name!r} was read")
        return data.reshape(last - first, tensor.row_bytes)

    def read_pieces(self, tensor: GGUFTensor, rows: slice | None = None) -> Iterator[np.ndarray]:
        """Rows of a tensor, by default all, dequantized: float32 [rows, columns], in pieces of a few MB."""
        first, last, _ = (rows or slice(None)).indices(tensor.rows)
        step = max(1, _PIECE // max(1, tensor.row_bytes))
        for start in range(first, last, step):
            yield dequantized(self.read_rows(tensor, slice(start, min(start + step, last))), tensor.type)


def dequantized(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The values of rows in a file's format [rows, bytes of a row]: float32 [rows, columns]."""
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # no warnings of numpy: a damaged scale may be infinite
        return dequantize(blocks, kind)


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.position = 0

    def corrupt(self, what: str) -> WeightError:
        return WeightError(f"{self._path} is corrupt near byte {self.position}: {what}")

    def take(self, length: int) -> bytes:
        if length > self._size - self.position:
            raise WeightError(
                f"{self._path} is truncated or corrupt: {length} bytes expected at byte {self.position} of {self._size}"
            )
        self.position += length
        return self._file.read(length)

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def count(self, at_least: int) -> int:
        """Reads a number of items, which is checked against the remaining bytes and the least size of an item."""
        count = self.number("<Q")
        if count * at_least > self._size - self.position:
            raise self.corrupt(f"it claims {count} items, more than the file can hold")
        return count

    def text(self) -> str:
        length = self.number("<Q")
        if length > _MAX_TEXT:
            raise self.corrupt(f"it claims a text of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.corrupt(f"a text is not UTF-8 ({e})") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.corrupt(f"unknown value type {kind}")
        kind = self.number("<I")
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)
        if kind == _STRING:
            return [self.text() for _ in range(self.count(at_least=8))]
        raise self.corrupt(f"unknown type {kind} of an array's elements")

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first), type number, offset in the data section."""
        name = self.text()
        dims = self.number("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.corrupt(f"tensor {name!r} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))[::-1]
        if not all(shape):
            raise self.corrupt(f"tensor {name!r} has the shape {shape}")
        return name, shape, self.number("<I"), self.number("<Q")
