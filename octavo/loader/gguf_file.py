"""Reads a GGUF file's header: metadata and offsets of tensors. All sizes are validated before use.

The ``gguf`` package has a reader too; it is not used because it makes several numpy views a token (seconds for a
vocabulary) and trusts the file's counts. Its tables of types and names are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.loader.gguf_parts import split_paths

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
#: The file type of a file that does not say it.
_GUESSED = LlamaFileType.GUESSED

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
    #: From the start of its file, in bytes.
    offset: int
    path: Path

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

    A model that is split into files ``NAME-00001-of-00003.gguf`` is opened as one, whichever of them is named.

    Metadata values are int, float, bool, str, list[str] or a numpy array. Every tensor of ``tensors`` lies within its
    file and has a supported type.

    Raises:
        WeightError: a file is missing, truncated, corrupt or not GGUF.
        UnsupportedModelError: it is GGUF of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        """Reads the headers of the file at ``path`` and of the files that belong to it."""
        self.path = path
        self.metadata, self.tensors = _read_header(path)
        count = self.metadata.get("split.count", 1)
        if count in (0, 1):
            return
        paths = split_paths(path)
        if len(paths) != count:
            raise WeightError(
                f"{path} is one of {count} parts of a model: expected a name such as model-00001-of-{count:05}.gguf"
            )
        self.metadata, self.tensors = {}, {}
        for number, part in enumerate(paths):
            if not part.is_file():
                raise WeightError(f"{part} is missing: the model of {path.name} is split into {count} files")
            metadata, tensors = _read_header(part)
            found = metadata.get("split.no"), metadata.get("split.count")
            if found != (number, count):
                raise WeightError(f"{part} says that it is part {found[0]} of {found[1]}, counted from 0")
            if twice := self.tensors.keys() & tensors.keys():
                raise WeightError(f"{part}: the tensor {min(twice)!r} is also in another part")
            self.metadata = metadata | self.metadata  # the first part has those of the model
            self.tensors |= tensors
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise WeightError(f"the parts of {path} hold {len(self.tensors)} tensors; they should hold {total}")

    @property
    def file_type(self) -> str:
        """How the file is quantized, in llama.cpp's words (``Q4_K_M``); where it does not say, what most bytes are."""
        kind = self.metadata.get("general.file_type")
        named = next((each.name for each in LlamaFileType if each.value == kind and each is not _GUESSED), None)
        if named is not None:
            return named.removeprefix("MOSTLY_").removeprefix("ALL_")
        bytes_of_type: Counter[str] = Counter()
        for tensor in self.tensors.values():
            bytes_of_type[tensor.type.name] += tensor.rows * tensor.row_bytes
        return max(bytes_of_type, key=lambda name: bytes_of_type[name], default="none")

    def read_rows(self, tensor: GGUFTensor, rows: slice | None = None) -> np.ndarray:
        """Rows of a tensor, by default all, in the file's format: uint8 [rows, bytes of a row]."""
        first, last, _ = (rows or slice(None)).indices(tensor.rows)
        count = (last - first) * tensor.row_bytes
        with tensor.path.open("rb") as f:
            f.seek(tensor.offset + first * tensor.row_bytes)
            data = np.fromfile(f, dtype=np.uint8, count=count)
        if data.size != count:
            raise WeightError(f"{tensor.path} became shorter while tensor {tensor.name!r} was read")
        return data.reshape(last - first, tensor.row_bytes)


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of one file."""
    try:
        with path.open("rb") as f:
            header = _Header(f, path.stat().st_size, path)
            return header.metadata(), header.tensors()
    except OSError as e:
        raise WeightError(f"{path} cannot be read: {e.strerror or e}") from e


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.position = 0
        self._tensor_count = 0
        self._alignment = 32

    def metadata(self) -> dict[str, Any]:
        """Everything before the list of tensors."""
        if self.take(4) != b"GGUF":
            raise WeightError(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.number("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, are read"
            )
        self._tensor_count = self.count(at_least=24)
        metadata: dict[str, Any] = {}
        for _ in range(self.count(at_least=13)):
            key = self.text()
            if key in metadata:
                raise self.corrupt(f"the key {key!r} occurs twice")
            metadata[key] = self.value(self.number("<I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.corrupt(f"the alignment {alignment!r} is not a power of two")
        self._alignment = alignment
        return metadata

    def tensors(self) -> dict[str, GGUFTensor]:
        """The tensors, in the file's order; read after ``metadata``."""
        entries = [self.tensor_entry() for _ in range(self._tensor_count)]
        start = -(-self.position // self._alignment) * self._alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.corrupt(f"the tensor {name!r} occurs twice")
            tensors[name] = self._checked(name, shape, kind, start + offset)
        return tensors

    def _checked(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            tensor = GGUFTensor(name, shape, GGMLQuantizationType(kind), offset, self._path)
        except ValueError:
            raise UnsupportedModelError(f"{self._path}: tensor {name!r} has the unknown type {kind}") from None
        if tensor.type not in SUPPORTED_TYPES:
            names = ", ".join(sorted(t.name for t in SUPPORTED_TYPES))
            raise UnsupportedModelError(
                f"{self._path}: tensor {name!r} has type {tensor.type.name}, which is not supported; supported: {names}"
            )
        block = GGML_QUANT_SIZES[tensor.type][0]
        if shape[-1] % block:
            raise self.corrupt(f"the rows of tensor {name!r} hold {shape[-1]} values, not a multiple of {block}")
        end = offset + tensor.rows * tensor.row_bytes
        if end > self._size:
            raise WeightError(f"{self._path} is truncated: tensor {name!r} ends at byte {end} of {self._size}")
        return tensor

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
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Reads texts that follow each other; a vocabulary has hundreds of thousands."""
        texts, read, position = [], self._file.read, self.position
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            position += 8 + length
            if position > self._size:
                raise WeightError(
                    f"{self._path} is truncated or corrupt: a text ends at byte {position} of {self._size}"
                )
            if length > _MAX_TEXT:
                raise self.corrupt(f"it claims a text of {length} bytes")
            try:
                texts.append(read(length).decode())
            except UnicodeDecodeError as e:
                raise self.corrupt(f"a text is not UTF-8 ({e})") from None
        self.position = position
        return texts

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
            return self.texts(self.count(at_least=8))
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
