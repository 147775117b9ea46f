"""Texts of ``octavo embed`` and ``octavo rerank``, one after the other: from arguments, a file or standard input."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.extras import pip_install

#: Keys of a JSON line, and columns of a Parquet file, that hold the text, and what it is called.
TEXT_KEYS = ("text", "prompt", "input")
ID_KEYS = ("id", "_id", "custom_id")
#: Rows of a Parquet file that are read at once.
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text, or the error that prevents it."""

    #: Its number among all, from 0 on.
    index: int
    #: Text or token ids; empty if there is an error.
    text: str | list[int] = ""
    #: What the file calls it; None: nothing.
    id: Any = None
    error: str | None = None


@dataclass(frozen=True)
class TextSource:
    """Where texts come from. They are read while they are needed, so that a file of any size can be."""

    words: list[str]
    #: A path, ``-`` for standard input, or None.
    file: str | None = None
    #: The key or column that holds the text; None: that of ``TEXT_KEYS`` that is there.
    column: str | None = None

    def check(self) -> None:
        """Refuses what cannot be read, before a model is loaded for it.

        Raises:
            ConfigError: the file is missing, or is of Parquet and pyarrow is not installed.
        """
        if self.file is None or self.file == "-":
            return
        if not Path(self.file).is_file():
            raise ConfigError(f"cannot read texts from {self.file}: there is no such file")
        if self._is_parquet:
            require_pyarrow(self.file)

    def count(self) -> int | None:
        """Texts in all; None where they come from standard input.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.file == "-":
            return None
        if self.file is None:
            return len(self.words)
        if self._is_parquet:
            with _parquet(self.file) as source:
                return len(self.words) + int(source.metadata.num_rows)
        with _opened(self.file) as stream:
            return len(self.words) + sum(1 for line in stream if line.strip())

    def __iter__(self) -> Iterator[TextRow]:
        """The texts in order; one that is wrong carries its error and does not affect the others.

        Raises:
            ConfigError: the file cannot be read, or has no such column.
        """
        yield from (TextRow(index, word) for index, word in enumerate(self.words))
        if self.file is not None:
            read = self._read_parquet if self._is_parquet else self._read_lines
            yield from read(self.file, len(self.words))

    @property
    def _is_parquet(self) -> bool:
        return self.file is not None and self.file.endswith(".parquet")

    @property
    def _keys(self) -> tuple[str, ...]:
        return TEXT_KEYS if self.column is None else (self.column,)

    def _read_lines(self, file: str, start: int) -> Iterator[TextRow]:
        with _opened(file) as stream:
            lines = (line for line in stream if line.strip())
            first = next(lines, None)
            if first is None:
                return
            first = first.removeprefix(codecs.BOM_UTF8)
            is_json = file.endswith((".jsonl", ".ndjson")) or (not file.endswith(".txt") and _is_object(first))
            for index, line in enumerate(chain([first], lines), start):
                yield self._from_json(index, line) if is_json else _from_text(index, line)

    def _from_json(self, index: int, line: bytes) -> TextRow:
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            return TextRow(index, error=f"the line is not valid JSON: {e}")
        if isinstance(content, str):
            return TextRow(index, content)
        if not isinstance(content, dict):
            shown = line[:80].decode(errors="replace").strip()
            return TextRow(index, error=f"the line must be a JSON object or a text, not {shown}")
        name = next((content[key] for key in ID_KEYS if content.get(key) is not None), None)
        keys = [key for key in self._keys if content.get(key) is not None]
        if len(keys) != 1:
            has = ", ".join(content) or "nothing"
            return TextRow(index, id=name, error=f"the line needs one of {', '.join(self._keys)}, and has {has}")
        return _checked(index, keys[0], content[keys[0]], name)

    def _read_parquet(self, file: str, start: int) -> Iterator[TextRow]:
        with _parquet(file) as source:
            there = source.schema_arrow.names
            keys = [key for key in self._keys if key in there]
            if len(keys) != 1:
                raise ConfigError(
                    f"{file} must have one of the columns {', '.join(self._keys)}, and has {', '.join(there)}; "
                    "--column names another"
                )
            column, name = keys[0], next((key for key in ID_KEYS if key in there), None)
            for batch in source.iter_batches(_BATCH, columns=[column, *([name] if name else [])]):
                texts = batch.column(column).to_pylist()
                names = batch.column(name).to_pylist() if name else [None] * len(texts)
                for index, (text, each) in enumerate(zip(texts, names, strict=True), start):
                    yield _checked(index, column, text, each)
                start += len(texts)


def require_pyarrow(file: str) -> None:
    """Refuses a Parquet file where pyarrow is not installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"{file}: Parquet files need pyarrow ({e}): {pip_install('pyarrow')}") from None


def _checked(index: int, key: str, value: Any, name: Any) -> TextRow:
    """The row of a text or of token ids."""
    if isinstance(value, str):
        return TextRow(index, value, name)
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        return TextRow(index, value, name)
    return TextRow(index, id=name, error=f"{key} must be a text or a list of token ids, not {value!r}"[:200])


def _from_text(index: int, line: bytes) -> TextRow:
    try:
        return TextRow(index, line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as e:
        return TextRow(index, error=f"the line is not UTF-8 text: {e}")


def _is_object(line: bytes) -> bool:
    """Whether a line is a JSON object with a text in it."""
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(content, dict) and any(key in content for key in TEXT_KEYS)


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(file).open("rb")  # noqa: SIM115  closed below, outside of this try
    except OSError as e:
        raise ConfigError(f"cannot read texts from {file}: {e.strerror}") from None
    with stream:
        yield stream


@contextmanager
def _parquet(file: str) -> Iterator[Any]:
    require_pyarrow(file)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as e:
        raise ConfigError(f"cannot read texts from {file}: it is no Parquet file: {e}") from None
    with source:
        yield source
