"""Reads the safetensors file of an adapter once: its tensors, and the digest of all of its bytes.

The file is read, not mapped: one that another program truncates meanwhile would end this process with a signal.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError

_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_MAX_HEADER_BYTES = 16 << 20
#: Bytes that are read and hashed at once: other threads run between two pieces, and while one is read.
_PIECE = 1 << 20
_DIGEST_BYTES = 16


class Digest(Protocol):
    """A digest of what it was given, of ``hashlib``."""

    def update(self, data: Any, /) -> None:
        """Adds bytes."""

    def hexdigest(self) -> str:
        """The digest of all of them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    #: In the data after the header.
    start: int
    stop: int


def new_digest(*texts: bytes) -> Digest:
    """A digest that begins with some bytes: the files that belong to the tensors'."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest


def read_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file, in the order of their data.

    Raises:
        AdapterError: it cannot be read, is truncated, or a tensor is of a type that is not floating point.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _header(file, path)[1]
    except OSError as e:
        raise unreadable(path, e) from None


def digest_file(path: Path, digest: Digest) -> None:
    """Adds all bytes of a file to a digest.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            _digest_rest(file, digest)
    except OSError as e:
        raise unreadable(path, e) from None


def read_tensors(path: Path, names: Container[str], digest: Digest) -> dict[str, np.ndarray]:
    """The tensors ``names``, float32; all bytes of the file are added to the digest.

    Raises:
        AdapterError: as ``read_entries``.
    """
    tensors: dict[str, np.ndarray] = {}
    try:
        with path.open("rb", buffering=0) as file:
            head, entries = _header(file, path)
            digest.update(head)
            for entry in entries:
                data = np.empty(entry.stop - entry.start, np.uint8)
                _fill(file, data.data, path, digest)
                if entry.name in names:
                    tensors[entry.name] = (
                        data.view(entry.dtype.numpy).reshape(entry.shape).astype(np.float32, copy=False)
                    )
            _digest_rest(file, digest)
    except OSError as e:
        raise unreadable(path, e) from None
    return tensors


def unreadable(path: Path, error: OSError) -> AdapterError:
    """The error for a file that the system does not read."""
    return AdapterError(f"{path} cannot be read: {error.strerror or error}")


def _header(file: FileIO, path: Path) -> tuple[bytes, list[TensorEntry]]:
    """The bytes before the data, and what they say."""
    head = _exactly(file, 8, path)
    length = int.from_bytes(head, "little")
    if length > _MAX_HEADER_BYTES:
        raise AdapterError(f"{path} is no safetensors file: it claims a header of {length} bytes")
    text = _exactly(file, length, path)
    try:
        raw = json.loads(text)
        entries = [_entry(name, value, path) for name, value in raw.items() if name != "__metadata__"]
    except AdapterError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AdapterError(f"{path} is no safetensors file: its header is not the expected JSON object") from None
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    stop = 0
    for entry in entries:
        if entry.start != stop or entry.stop - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise AdapterError(f"{path} is damaged: the place of tensor {entry.name!r} does not fit its shape")
        stop = entry.stop
    size = path.stat().st_size
    if size != 8 + length + stop:
        raise AdapterError(f"{path} is truncated or damaged: it has {size} bytes, expected {8 + length + stop}")
    return head + text, entries


def _entry(name: str, value: Any, path: Path) -> TensorEntry:
    shape, (start, stop) = tuple(int(size) for size in value["shape"]), value["data_offsets"]
    if value["dtype"] not in _DTYPES:
        raise AdapterError(
            f"{path}: tensor {name!r} is of type {value['dtype']}; expected float32, bfloat16 or float16"
        )
    if not all(isinstance(place, int) for place in (start, stop)) or min(start, stop, *shape, 0) < 0:
        raise ValueError(name)
    return TensorEntry(name, _DTYPES[value["dtype"]], shape, start, stop)


def _digest_rest(file: FileIO, digest: Digest) -> None:
    while piece := file.read(_PIECE):
        digest.update(piece)


def _exactly(file: FileIO, count: int, path: Path) -> bytes:
    data = bytearray(min(count, _MAX_HEADER_BYTES))
    _fill(file, memoryview(data), path)
    return bytes(data)


def _fill(file: FileIO, target: memoryview, path: Path, digest: Digest | None = None) -> None:
    while target:
        count = file.readinto(target[:_PIECE])
        if not count:
            raise AdapterError(f"{path} is truncated or no safetensors file")
        if digest is not None:
            digest.update(target[:count])
        target = target[count:]
