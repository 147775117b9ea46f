"""The input file: a request a line, ``{"custom_id", "method", "url", "body"}``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from octavo.core.errors import ConfigError

#: Routes that a row may name.
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")

#: What identifies a row: its ``custom_id``, or the number of its line if it has none.
Key = str | int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the input: a request, or what is wrong with it."""

    #: Number of the line, from 1.
    line: int
    custom_id: str | None
    url: str = ""
    #: JSON as it was given; the route decides whether it is valid.
    body: bytes = b""
    error: str | None = None

    @property
    def key(self) -> Key:
        """What identifies the row."""
        return self.line if self.custom_id is None else self.custom_id


class _Name(msgspec.Struct):
    custom_id: str


class _Envelope(msgspec.Struct):
    method: str
    url: str
    body: msgspec.Raw


_name, _envelope = msgspec.json.Decoder(_Name), msgspec.json.Decoder(_Envelope)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows, in order; empty lines are left out.

    Raises:
        ConfigError: the file cannot be read.
    """
    for number, line in _lines(path):
        try:
            custom_id = _name.decode(line).custom_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            yield Row(number, None, error=f"line {number}: {e}")
            continue
        yield _make_row(number, custom_id, line)


def index_rows(path: Path) -> dict[Key, int]:
    """What identifies each row, and the number of its line.

    Raises:
        ConfigError: the file cannot be read or holds no row, or a ``custom_id`` is there twice.
    """
    lines: dict[Key, int] = {}
    for row in read_rows(path):
        if row.key in lines:
            raise ConfigError(
                f"custom_id {row.key!r} is on lines {lines[row.key]} and {row.line} of {path}; each may be there once"
            )
        lines[row.key] = row.line
    if not lines:
        raise ConfigError(f"{path} holds no request")
    return lines


def _make_row(number: int, custom_id: str, line: bytes) -> Row:
    try:
        envelope = _envelope.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return Row(number, custom_id, error=f"line {number}: {e}")
    if envelope.method != "POST":
        return Row(number, custom_id, error=f"line {number}: method must be 'POST', not {envelope.method!r}")
    if envelope.url not in URLS:
        return Row(
            number, custom_id, error=f"line {number}: url must be one of {', '.join(URLS)}, not {envelope.url!r}"
        )
    return Row(number, custom_id, envelope.url, bytes(envelope.body))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and contents of the lines that are not empty."""
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line


def _open(path: Path) -> IO[bytes]:
    try:
        stream = path.open("rb")
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    if not stream.seekable():  # it is read twice: to find duplicates before anything runs, and to run
        stream.close()
        raise ConfigError(f"{path} must be a file, not a pipe")
    return stream
