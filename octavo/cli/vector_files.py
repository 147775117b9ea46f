"""Files of vectors, written row by row while they come: .npy, .jsonl and .parquet."""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.cli.parsing import check_folder
from octavo.cli.text_rows import TextRow, require_pyarrow
from octavo.core.errors import ConfigError

#: Rows of a group of a Parquet file, which are held until it is full.
_GROUP = 4096
#: Bytes of a .npy file before its numbers; of the length that the format wants, a multiple of 64.
_NPY_HEADER = 128


class VectorFile(ABC):
    """A file that vectors are written to in the order of their texts; what is written is complete once it is left."""

    @abstractmethod
    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        """Adds the vector float32 [D] of a text, or why there is none."""

    def close(self) -> None:  # noqa: B027
        """Writes what is missing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(VectorFile):
    """An object a line: ``index``, ``id`` where the text has one, and ``embedding`` or ``error``."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        """See ``VectorFile``."""
        line: dict[str, Any] = {"index": row.index}
        if row.id is not None:
            line["id"] = row.id
        line |= {"embedding": vector.tolist()} if error is None else {"error": error}
        self._stream.write(msgspec.json.encode(line) + b"\n")
        self._stream.flush()  # who reads a pipe gets each as it comes


class Npy(VectorFile):
    """A float32 array [texts, D] in NumPy's format: row i is text i, NaN where it failed."""

    def __init__(self, stream: IO[bytes], dimensions: int) -> None:
        self._stream, self._dimensions, self._rows = stream, dimensions, 0
        self._write_header()

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        """See ``VectorFile``."""
        if error is not None:
            vector = np.full(self._dimensions, np.nan, np.float32)
        self._stream.write(vector.astype("<f4").tobytes())
        self._rows += 1

    def close(self) -> None:
        """The number of rows is known now."""
        self._stream.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        shape = f"({self._rows}, {self._dimensions})"
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        length = _NPY_HEADER - 10
        self._stream.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n")


class Parquet(VectorFile):
    """Columns ``index``, ``id`` as text (null: none), ``embedding`` (a list of D float32; null: failed), ``error``."""

    def __init__(self, path: Path, dimensions: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        vectors = pa.list_(pa.float32(), dimensions)
        names = {"index": pa.int64(), "id": pa.string(), "embedding": vectors, "error": pa.string()}
        self._schema = pa.schema(list(names.items()))
        self._writer = pq.ParquetWriter(path, self._schema)
        self._rows: list[tuple[int, str | None, NDArray[np.float32] | None, str | None]] = []

    def write(self, row: TextRow, vector: NDArray[np.float32], error: str | None) -> None:
        """See ``VectorFile``."""
        name = None if row.id is None else row.id if isinstance(row.id, str) else msgspec.json.encode(row.id).decode()
        self._rows.append((row.index, name, vector if error is None else None, error))
        if len(self._rows) == _GROUP:
            self._flush()

    def close(self) -> None:
        """See ``VectorFile``."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            self._writer.write_table(pa.table(arrays, schema=self._schema))
            self._rows.clear()


def check_output(path: Path | None, read: str | None) -> None:
    """Refuses an output that cannot be written, before a model is loaded for it; ``read``: the file of the texts.

    Raises:
        ConfigError: its suffix says no format, its folder does not exist, it is the file that is read, or pyarrow is
            needed and not installed.
    """
    if path is None:
        return
    if read not in (None, "-") and path.exists() and path.samefile(read):
        raise ConfigError(f"--output {path} is the file of the texts, which it would replace while it is read")
    if path.suffix not in (".npy", ".jsonl", ".ndjson", ".parquet"):
        raise ConfigError(f"--output {path}: the name must end in .npy, .jsonl or .parquet")
    check_folder(path, "--output")
    if path.suffix == ".parquet":
        require_pyarrow(str(path))


def open_output(path: Path | None, dimensions: int, stack: ExitStack) -> VectorFile:
    """The file for vectors of ``dimensions`` numbers, closed by the stack; JSON lines on standard output without one.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return stack.enter_context(JsonLines(sys.stdout.buffer))
    try:
        if path.suffix == ".parquet":
            return stack.enter_context(Parquet(path, dimensions))
        stream = stack.enter_context(path.open("wb"))
    except OSError as e:
        raise ConfigError(f"cannot write --output {path}: {e.strerror or e}") from None
    file = Npy(stream, dimensions) if path.suffix == ".npy" else JsonLines(stream)
    return stack.enter_context(file)
