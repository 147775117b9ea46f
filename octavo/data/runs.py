"""Texts and vectors of files, written in parts that each appear complete, so that a stopped run can be resumed."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.files import JSON_ERRORS, numbered_lines, open_parquet
from octavo.core.outputs import PoolingParams
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.data.stage import (
    BATCH_SIZE,
    Columns,
    Generator,
    Params,
    Vectors,
    default_resources,
    import_ray,
    make_engine_config,
    map_batches,
)

if TYPE_CHECKING:
    import pyarrow as pa


#: File in the output folder with the run's parameters. Readers of folders skip names that begin with an underscore.
DESCRIPTION = "_octavo_run"
#: Prefix of parts that are being written.
_UNFINISHED = ".octavo-"
#: Most Ray tasks of a run; each costs the cluster a millisecond.
_MAX_TASKS = 4096


@dataclass(frozen=True)
class RowCounts:
    rows: int
    #: Answered by earlier runs.
    skipped: int
    #: Rows of this run with an error.
    failed: int


class _Part(msgspec.Struct, frozen=True):
    """Rows ``first`` to ``first + rows`` of the whole input: ``rows`` rows of a file, from ``start`` on."""

    file: str
    start: int
    first: int
    rows: int

    def path(self, folder: Path, suffix: str) -> Path:
        """The output file, named by the numbers of its first and last row."""
        return folder / f"part-{self.first:012d}-{self.first + self.rows - 1:012d}{suffix}"


def run(
    input_path: str | Path | Sequence[str | Path],
    output_path: str | Path,
    *,
    model: str,
    sampling_params: SamplingParams | BeamSearchParams | None = None,
    pooling_params: PoolingParams | None = None,
    prompt_name: str | None = None,
    prompt_column: str = "prompt",
    output_column: str | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = BATCH_SIZE,
    ray_remote_args: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> RowCounts:
    """Completes the prompts of JSON lines or Parquet files and writes the rows, with their answers, to a folder.

    >>> octavo.data.run("prompts.parquet", "answers/", model="smollm2-135m", concurrency=4)
    >>> ray.data.read_parquet("answers/")

    With ``pooling_params`` it writes vectors in place of texts, as ``embed``.

    Rows are numbered through all input files, in the order of the files' names in a folder. ``batch_size`` rows of a
    file are a part: a file of the format of the input, named by their numbers, renamed into the folder once complete.
    After a stop, also by kill -9, the same call does the missing parts: no row is lost, and none is there twice.

    Args:
        input_path: a file, a folder of files, or a list of these; on every machine under the same path.
        output_path: a folder, likewise; it is made if it is missing.
        model, sampling_params, prompt_column, concurrency, ray_remote_args, engine_options: see ``generate``.
        pooling_params, prompt_name: see ``embed``.
        output_column: default: ``generated``, of vectors ``embedding``.
        batch_size: rows of a part, completed at once by an actor. More keep the engine fuller, fewer lose less at a
            stop.

    Raises:
        ConfigError: Ray is not installed, an option is wrong, a file cannot be used, or the folder holds parts of
            another input, model or other parameters.
    """
    ray_data = import_ray()
    config = make_engine_config(model, engine_options)
    params: Params | None = sampling_params
    if pooling_params is not None:
        if sampling_params is not None:
            raise ConfigError("sampling_params asks for texts, pooling_params for vectors: give one of them")
        params = Vectors(pooling_params, prompt_name)
    elif prompt_name is not None:
        raise ConfigError("prompt_name is put before texts of which vectors are made: give pooling_params with it")
    columns = Columns(prompt_column, output_column or ("generated" if pooling_params is None else "embedding"))
    paths = [input_path] if isinstance(input_path, (str, Path)) else list(input_path)
    files, suffix = find_files([Path(path).resolve() for path in paths])
    parts = _cut(files, suffix, batch_size)
    folder = Path(output_path).resolve()
    _prepare(folder, _describe(files, config.model, params, columns, batch_size))
    missing = [part for part in parts if not part.path(folder, suffix).exists()]
    failed = 0
    if missing:
        dataset = ray_data.from_items(
            [{"part": msgspec.json.encode(part).decode()} for part in missing],
            override_num_blocks=min(len(missing), _MAX_TASKS),
        )
        done = map_batches(
            dataset,
            _Parts,
            (config.model_dump(exclude_unset=True), params, columns, folder, suffix),
            batch_size=1,
            concurrency=concurrency,
            ray_remote_args=ray_remote_args or default_resources(config),
        )
        failed = sum(row["failed"] for row in done.iter_rows())
        _remove_unfinished(folder)  # of actors that were killed
    rows, remaining = sum(part.rows for part in parts), sum(part.rows for part in missing)
    return RowCounts(rows, rows - remaining, failed)


class _Parts:
    """The actor of ``run``: answers parts, each a row of its table."""

    def __init__(
        self, engine_options: Mapping[str, Any], params: Params | None, columns: Columns, folder: Path, suffix: str
    ) -> None:
        self._generator = Generator(engine_options, params, columns)
        self._folder, self._suffix = folder, suffix

    def __call__(self, table: pa.Table) -> dict[str, list[int]]:
        return {"failed": [self._answer(text) for text in table.column("part").to_pylist()]}

    def _answer(self, text: str) -> int:
        part = msgspec.json.decode(text, type=_Part)
        target = part.path(self._folder, self._suffix)
        temporary = self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            failed = FORMATS[self._suffix].answer(Path(part.file), part.start, part.rows, self._generator, temporary)
            _publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return failed


def _publish(temporary: Path, target: Path) -> None:
    """Renames a complete file, in one step that a kill or a loss of power cannot divide."""
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.replace(target)


def _remove_unfinished(folder: Path) -> None:
    for left in folder.glob(f"{_UNFINISHED}*"):
        left.unlink(missing_ok=True)


def _cut(files: list[Path], suffix: str, batch_size: int) -> list[_Part]:
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    parts: list[_Part] = []
    first = 0
    for path in files:
        for start, rows in FORMATS[suffix].cut(path, batch_size):
            parts.append(_Part(str(path), start, first, rows))
            first += rows
    return parts


def _describe(files: list[Path], model: str, params: Params | None, columns: Columns, batch_size: int) -> bytes:
    """The parameters that all parts of a folder share."""
    content = {
        "files": [[path.name, path.stat().st_size] for path in files],
        "model": model,
        "sampling_params": params,
        "columns": columns,
        "batch_size": batch_size,
    }
    return msgspec.json.encode(content, enc_hook=lambda value: getattr(value, "__qualname__", type(value).__qualname__))


def _prepare(folder: Path, description: bytes) -> None:
    """Makes the folder, or compares the parameters of its parts, and removes unfinished files of a stopped run."""
    description_file = folder / DESCRIPTION
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        if not description_file.exists():
            if any(folder.glob("part-*")):
                raise ConfigError(f"{folder} holds parts of an unknown run; name another output_path")
            temporary = folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
            temporary.write_bytes(description)
            _publish(temporary, description_file)
            return
        earlier = description_file.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}") from None
    if earlier != description:
        before, now = msgspec.json.decode(earlier), msgspec.json.decode(description)
        changed = ", ".join(name for name in now if before.get(name) != now[name])
        raise ConfigError(f"{folder} holds rows of a run with other {changed}; name another output_path")


# File formats: how each is cut into parts, and how a part is answered and written.


class Format(ABC):
    """A file format."""

    @abstractmethod
    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
        """Parts of at most ``rows`` rows: start, in a unit of the format, and number of rows."""

    @abstractmethod
    def answer(self, path: Path, start: int, rows: int, generator: Generator, target: Path) -> int:
        """Writes a part of ``path`` with its answers to ``target``; returns the number of failed rows."""


class JsonLines(Format):
    """A JSON object per line; parts begin at an offset in bytes. An invalid line fails alone."""

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
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
        with path.open("rb") as lines:
            lines.seek(start)
            parsed = [_parse(line) for _, line in islice(numbered_lines(lines), rows)]
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
    """Parquet; parts begin at a row. A row group in several parts is read for each of them."""

    def cut(self, path: Path, rows: int) -> Iterator[tuple[int, int]]:
        with open_parquet(path) as source:
            total = source.metadata.num_rows
        for start in range(0, total, rows):
            yield start, min(rows, total - start)

    def answer(self, path: Path, start: int, rows: int, generator: Generator, target: Path) -> int:
        import pyarrow.parquet as pq

        table = generator(_read_rows(path, start, rows))
        pq.write_table(table, target)
        return rows - int(table.column(generator.columns.error).null_count)


#: Suffix of files -> their format.
FORMATS: dict[str, Format] = {".jsonl": JsonLines(), ".ndjson": JsonLines(), ".parquet": Parquet()}


def find_files(paths: Sequence[Path]) -> tuple[list[Path], str]:
    """The files that paths name, those in folders sorted by name, and their common suffix."""
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


def _read_rows(path: Path, start: int, rows: int) -> pa.Table:
    """Rows of a Parquet file; reads only the row groups that hold them."""
    import pyarrow as pa

    pieces, first = [], 0
    with open_parquet(path) as source:
        for group in range(source.num_row_groups):
            count = source.metadata.row_group(group).num_rows
            low, high = max(start, first), min(start + rows, first + count)
            if low < high:
                pieces.append(source.read_row_group(group).slice(low - first, high - low))
            first += count
    return pa.concat_tables(pieces)


def _parse(line: bytes) -> dict[str, Any] | str:
    """The object on a line, or an error."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except JSON_ERRORS as e:
        return f"the line is not a JSON object: {e}"
