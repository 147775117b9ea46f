"""Files of rows, JSON lines and Parquet: how each is cut into parts, and how a part is answered and written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.data.generator import Generator


class Format(ABC):
    """A kind of file."""

    @abstractmethod
    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
        """Parts of at most ``rows`` rows: where each begins, in a unit of the format's own, and how many rows it has.

        Raises:
            ConfigError: the file cannot be read.
        """

    @abstractmethod
    def answer(self, path: Path, start: int, rows: int, generator: Generator, target: Path) -> int:
        """Writes a part of ``path`` with its answers to ``target``; returns how many rows have failed.

        Raises:
            ConfigError: the rows do not have the columns.
        """


class JsonLines(Format):
    """A JSON object a line; parts begin at an offset in bytes. A line that is none fails alone."""

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
        """See ``Format``."""
        offset = start = count = 0
        with path.open("rb") as stream:
            for line in stream:
                if line.strip():
                    if count == rows:
                        yield start, count
                        start, count = offset, 0
                    count += 1
                offset += len(line)
        if count:
            yield start, count

    def answer(self, path: Path, start: int, rows: int, generator: Generator, target: Path) -> int:
        """See ``Format``."""
        parsed = [_parse(line) for line in _lines(path, start, rows)]
        good, columns = [row for row in parsed if isinstance(row, dict)], generator.columns
        for fields in good:
            columns.check([columns.prompt, *fields])  # a row without a prompt fails alone
        answers = iter(generator.answer([fields.get(columns.prompt) for fields in good]))
        failed = 0
        with target.open("wb") as stream:
            for row in parsed:
                if isinstance(row, str):
                    line: dict[str, Any] = {columns.output: None, columns.error: row}
                else:
                    answer = next(answers)
                    line = {**row, columns.output: answer.output, columns.error: answer.error}
                failed += line[columns.error] is not None
                stream.write(msgspec.json.encode(line) + b"\n")
        return failed


class Parquet(Format):
    """Parquet; parts begin at a row. Row groups that reach into several parts are read for each of them."""

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
        """See ``Format``."""
        total = self._open(path).metadata.num_rows
        for start in range(0, total, rows):
            yield start, min(rows, total - start)

    def answer(self, path: Path, start: int, rows: int, generator: Generator, target: Path) -> int:
        """See ``Format``."""
        import pyarrow.parquet as pq

        table = generator(self._read(path, start, rows))
        pq.write_table(table, target)
        return rows - int(table.column(generator.columns.error).null_count)

    def _read(self, path: Path, start: int, rows: int) -> Any:
        import pyarrow as pa

        source, pieces, first = self._open(path), [], 0
        for group in range(source.num_row_groups):
            count = source.metadata.row_group(group).num_rows
            low, high = max(start, first), min(start + rows, first + count)
            if low < high:
                pieces.append(source.read_row_group(group).slice(low - first, high - low))
            first += count
        return pa.concat_tables(pieces)

    def _open(self, path: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(path)
        except pa.ArrowInvalid as e:
            raise ConfigError(f"{path} is not a Parquet file: {e}") from None


#: Suffix of files -> their format.
FORMATS: dict[str, Format] = {".jsonl": JsonLines(), ".ndjson": JsonLines(), ".parquet": Parquet()}


def find_files(paths: Sequence[Path]) -> tuple[list[Path], str]:
    """The files that paths name, those in folders sorted by name, and their suffix.

    Raises:
        ConfigError: there is none, one is of another format, or they are of several.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(child for child in path.iterdir() if child.suffix in FORMATS and child.name[0] not in "._")
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"there is no file or folder {path}")
    suffixes = {path.suffix for path in files}
    if len(suffixes) != 1 or not suffixes <= FORMATS.keys():
        raise ConfigError(
            f"the input must be files of one format ({', '.join(FORMATS)}), not {sorted(suffixes) or 'none at all'}"
        )
    return files, suffixes.pop()


def _lines(path: Path, offset: int, count: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(offset)
        for line in stream:
            if line.strip():
                yield line
                count -= 1
                if not count:
                    return


def _parse(line: bytes) -> dict[str, Any] | str:
    """The object on a line, or what is wrong with it."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return f"the line is not a JSON object: {e}"
