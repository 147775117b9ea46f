"""Reads the headers of CTranslate2's ``model.bin``: named tensors, each behind its own header, then other names.

The layout is what CTranslate2's converters write (``ctranslate2/specs/model_spec.py``), of binary versions 4 to 6.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.loader.stored import DTYPES, Stored

#: Binary versions whose tensors have a type and a number of bytes.
_VERSIONS = (4, 5, 6)
#: By CTranslate2's number of a type.
_TYPES = ("F32", "I8", "I16", "I32", "F16", "BF16")
_MAX_TENSORS = 1 << 17
_MAX_RANK = 8


@dataclass(frozen=True)
class CTranslate2File:
    """What the headers of a file say."""

    path: Path
    version: int
    #: Such as "WhisperSpec", and its revision.
    spec: str
    revision: int
    #: By name, in the order of the file.
    tensors: Mapping[str, Stored]
    #: Other names of tensors.
    aliases: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def tensor(self, name: str) -> Stored:
        """A tensor by one of its names.

        Raises:
            WeightError: there is none.
        """
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            raise WeightError(f"{self.path} lacks the tensor {name!r}")
        return self.tensors[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """The value of a tensor that is one integer; ``default`` if there is none of this name.

        Raises:
            WeightError: there is none, and no default; or it is no integer.
        """
        if default is not None and name not in self.tensors:
            return default
        stored = self.tensor(name)
        if stored.dtype not in ("I8", "I16", "I32") or stored.shape:
            raise WeightError(f"tensor {name!r} in {self.path} is {stored.dtype} {list(stored.shape)}, not one integer")
        with self.path.open("rb") as file:
            file.seek(stored.offset)
            return int.from_bytes(file.read(stored.nbytes), "little", signed=True)


def read_ctranslate2(path: Path) -> CTranslate2File:
    """The headers of a file; no tensor is read.

    Raises:
        WeightError: it is truncated, or what it says contradicts itself; the message names the tensor.
        UnsupportedModelError: its binary version is another.
    """
    with path.open("rb") as file:
        reader = _Reader(path, file)
        (version,) = reader.unpack("<I", "its version")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{path} has the binary version {version}; versions {_VERSIONS[0]} to {_VERSIONS[-1]} are read: "
                "convert the model with a current CTranslate2"
            )
        spec = reader.text("its kind of model")
        (revision, count) = reader.unpack("<II", "the number of its tensors")
        if count > _MAX_TENSORS:
            raise WeightError(f"{path} says that it has {count} tensors; at most {_MAX_TENSORS} are read")
        tensors: dict[str, Stored] = {}
        for number in range(count):
            name = reader.text(f"the name of tensor {number}")
            if name in tensors:
                raise WeightError(f"tensor {name!r} occurs twice in {path}")
            tensors[name] = reader.tensor(name)
        aliases: dict[str, str] = {}
        (count,) = reader.unpack("<I", "the number of other names")
        if count > _MAX_TENSORS:
            raise WeightError(f"{path} says that it has {count} other names; at most {_MAX_TENSORS} are read")
        for number in range(count):
            other, name = reader.text(f"other name {number}"), reader.text(f"what other name {number} stands for")
            if name not in tensors:
                raise WeightError(f"{path} calls {name!r} also {other!r}, and has no such tensor")
            aliases[other] = name
        return CTranslate2File(path, version, spec, revision, tensors, aliases)


class _Reader:
    """Reads values one after the other, within the bounds of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def unpack(self, form: str, what: str) -> tuple[int, ...]:
        length = struct.calcsize(form)
        if len(data := self._file.read(length)) < length:
            raise WeightError(f"{self._path} is truncated: it ends before {what}")
        return struct.unpack(form, data)

    def text(self, what: str) -> str:
        (length,) = self.unpack("<H", what)
        data = self._file.read(length)
        if len(data) < length:
            raise WeightError(f"{self._path} is truncated: it ends before {what}")
        try:
            if not data.endswith(b"\0"):
                raise ValueError
            return data[:-1].decode("utf-8")
        except ValueError:
            raise WeightError(
                f"{self._path} is damaged: {what} is {data[:40]!r}, no text that ends in a zero"
            ) from None

    def tensor(self, name: str) -> Stored:
        (rank,) = self.unpack("<B", f"the shape of {name!r}")
        if rank > _MAX_RANK:
            raise WeightError(f"{self._path} is damaged: tensor {name!r} has {rank} dimensions")
        shape = self.unpack(f"<{rank}I", f"the shape of {name!r}")
        kind, length = self.unpack("<BI", f"the type of {name!r}")
        if kind >= len(_TYPES):
            raise WeightError(f"{self._path} is damaged: tensor {name!r} is of type {kind}, which does not exist")
        dtype, offset = _TYPES[kind], self._file.tell()
        if math.prod(shape) * DTYPES[dtype].itemsize != length:
            raise WeightError(f"tensor {name!r} in {self._path} is {dtype} {list(shape)} in {length} bytes")
        if offset + length > self._size:
            raise WeightError(
                f"{self._path} is truncated: tensor {name!r} ends at byte {offset + length}, the file at {self._size}"
            )
        self._file.seek(length, 1)
        return Stored(dtype, shape, offset)
