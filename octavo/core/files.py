"""Reads files of bounded size, JSON files with typed values, JSON lines and Parquet files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from octavo.core.errors import ConfigError, OctavoError
from octavo.core.plugins import pip_install

#: Errors of ``msgspec.json.decode``: the mistake in it, an encoding other than UTF-8, and too many levels.
JSON_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)

#: Bytes of a read, which allocates them all: most files are far smaller than their limit.
_PART = 1 << 16
#: Maximum bytes of a configuration, and of a tokenizer (several times the largest published).
MAX_CONFIG = 16 << 20
MAX_TOKENIZER = 128 << 20


def read_bounded(path: Path, most: int, error: type[OctavoError] = ConfigError) -> bytes:
    """The content of a file; raises ``error`` if it is missing, unreadable, or has more than ``most`` bytes."""
    try:
        with path.open("rb") as file:
            data = bytearray()
            while len(data) <= most and (part := file.read(min(_PART, most + 1 - len(data)))):
                data += part
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise error("is missing: there is no such file", file=path) from None
    except OSError as e:
        raise error(f"cannot be read: {e.strerror}", file=path) from None
    if len(data) > most:
        raise error(f"has {size} bytes; at most {most} are read", file=path)
    return bytes(data)


def read_text(path: str | Path, what: str) -> str:
    """The text of a file; raises ConfigError, which calls the file ``what``, if it is unreadable or not UTF-8."""
    try:
        return Path(path).expanduser().read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from None


def read_value(file: Path, error: type[OctavoError] = ConfigError, most: int = MAX_CONFIG) -> Any:
    """The content of a JSON file; raises ``error`` as ``read_bounded``, and for invalid JSON."""
    data = read_bounded(file, most, error)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise error(f"is not readable JSON: {e}", file=file) from None


def read_object(file: Path, error: type[OctavoError] = ConfigError, most: int = MAX_CONFIG) -> dict[str, Any]:
    """The object in a JSON file; raises ``error`` as ``read_value``, and for other values."""
    value = read_value(file, error, most)
    if not isinstance(value, dict):
        raise error(f"must hold a JSON object, not {type(value).__name__}", file=file)
    return value


def open_binary(file: str | Path) -> IO[bytes]:
    """The file, opened for reading; raises ConfigError if that fails."""
    try:
        return Path(file).open("rb")
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from None


def numbered_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1 in the file."""
    return ((number, line) for number, line in enumerate(stream, start=1) if line.strip())


def require_pyarrow(file: str | Path) -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"{file}: Parquet files need pyarrow ({e}): {pip_install('pyarrow')}") from None


def open_parquet(file: str | Path) -> Any:
    """A ``pyarrow.parquet.ParquetFile``; raises ConfigError if it is none, unreadable, or pyarrow is missing."""
    require_pyarrow(file)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as e:
        raise ConfigError(f"cannot read {file}: it is no Parquet file: {e}") from None


@dataclass(frozen=True)
class JsonValues:
    """Typed access to the values of one JSON object; null counts as absent."""

    raw: Mapping[str, Any]
    file: Path

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def positive(self, name: str, default: int | None = None, most: int | None = None) -> int:
        """An integer from 1 to ``most``; required without a default."""
        if (value := self.get(name, default)) is None:
            raise ConfigError(f"{self.file}: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            expected = "a positive integer" if most is None else f"an integer from 1 to {most}"
            raise ConfigError(f"{self.file}: {name} must be {expected}, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self.file}: {name} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.file}: {name} must be true or false, not {value!r}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.file}: {name} must be an object, not {value!r}")
        return dict(value)
