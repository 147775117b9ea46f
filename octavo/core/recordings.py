"""Recordings of engines: files of the events that ``/engine/events`` streams, one JSON value a line after a header."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from octavo.core.bounded_file import read_bounded
from octavo.core.engine_view import EngineEvent
from octavo.core.errors import ConfigError

FORMAT = "octavo-recording"
VERSION = 1
#: Larger files are refused; each line, too.
MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 8 << 20
#: Further events are left out by who writes a recording, and refused by who reads one.
MAX_EVENTS = 4000


class RecordingHeader(msgspec.Struct):
    """The first line."""

    format: str
    version: int
    #: What was recorded, in words.
    title: str = ""


def write_recording(path: Path, title: str, events: Iterable[EngineEvent]) -> None:
    """Writes a file.

    Raises:
        ConfigError: it cannot be written.
    """
    encode = msgspec.json.encode
    try:
        with path.open("wb") as stream:
            for line in (RecordingHeader(FORMAT, VERSION, title), *events):
                stream.write(encode(line) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write the recording {path}: {e.strerror}") from None


def read_recording(path: Path) -> bytes:
    """The bytes of a file, each line of which is what it must be.

    Raises:
        ConfigError: it cannot be read, is no recording, or is too large.
    """
    data = read_bounded(path, MAX_BYTES)
    header, *lines = data.splitlines() or [b""]
    _check_header(path, header)
    if len(lines) > MAX_EVENTS:
        raise ConfigError(f"the recording {path} has {len(lines)} events; at most {MAX_EVENTS} are read")
    decoder = msgspec.json.Decoder(EngineEvent)
    for number, line in enumerate(lines, start=2):
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of the recording {path} is longer than {MAX_LINE_BYTES} bytes")
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"line {number} of the recording {path} is no event of an engine: {e}") from None
    return data


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=RecordingHeader)
    except (msgspec.DecodeError, msgspec.ValidationError):
        header = RecordingHeader("", VERSION)
    if header.format != FORMAT:
        raise ConfigError(f"{path} is no recording of an engine: its first line must name the format {FORMAT!r}")
    if header.version != VERSION:
        raise ConfigError(f"the recording {path} has version {header.version}; this program reads {VERSION}")
