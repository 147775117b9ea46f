"""Reads a form with a recording, as OpenAI's clients send it.

A form is split beside the event loop and in slices, as a recording has tens of megabytes: how long that takes depends
on its size alone, whatever bytes are in it. Its file stays in memory, where it counts as a body, and not on the disk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.core.server_options import FORM_BYTES
from octavo.server.api_errors import ApiError
from octavo.server.audio.audio_fields import AudioRequest, read_values
from octavo.server.request_models import read_model
from octavo.server.service import Service

R = TypeVar("R", bound=AudioRequest)

#: Most texts in a form; all of them have at most FORM_BYTES. Bytes of the head of a part.
_MAX_FIELDS = 100
_MAX_HEAD_BYTES = 16 << 10
_FILE = "file"
#: Bytes that are searched at once: some milliseconds, after which other threads have a turn.
_SLICE = 1 << 20
#: Longest boundary (RFC 2046, 5.1.1), and most spaces after one that are taken.
_MAX_BOUNDARY = 70
_MAX_PADDING = 16

#: A single thread, as for other large bodies.
_splitter = ThreadPoolExecutor(1, thread_name_prefix="octavo-forms")


@dataclass(frozen=True)
class Upload:
    """A recording as it was sent."""

    #: What errors call it.
    name: str
    data: bytes


@dataclass(frozen=True)
class Part:
    """One part of a form."""

    name: str
    #: None: the part is a text; else it is a file, whose name may be empty.
    filename: str | None
    data: bytes


def split_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form (multipart/form-data: RFC 7578), in their order.

    Raises:
        ApiError: 400, it is no form, or has too much in it.
    """
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _invalid("its Content-Type names no boundary")
    parts, num_files, text_bytes = list[Part](), 0, 0
    for start, end in _spans(body, boundary):
        head_end = body.find(b"\r\n\r\n", start - 2, min(end, start + _MAX_HEAD_BYTES))
        if head_end < 0:
            raise _invalid("a part has no head, or a longer one than is read")
        name, filename = _names(body[start:head_end])
        num_files += filename is not None
        text_bytes += end - start if filename is None else 0
        if num_files > 1:
            raise _invalid("it has several files")
        if len(parts) - num_files >= _MAX_FIELDS:
            raise _invalid(f"it has more than {_MAX_FIELDS} texts")
        if text_bytes > FORM_BYTES:
            raise _invalid(f"its texts have more than {FORM_BYTES} bytes")
        parts.append(Part(name, filename, body[head_end + 4 : end]))
    return parts


def _spans(body: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each part, with its head, between two boundaries.

    What only begins as a boundary does is part of the content.
    """
    delimiter = b"--" + re.escape(boundary) + rb"(?:(--)|[ \t]{0,%d}\r\n)" % _MAX_PADDING
    # The line break before a boundary belongs to it; only the first one may be without.
    found, pattern = re.compile(delimiter).match(body), re.compile(rb"\r\n" + delimiter)
    overlap = len(boundary) + _MAX_PADDING + 8
    start, position = -1, 0
    while found or position < len(body):
        found = found or pattern.search(body, position, position + _SLICE + overlap)
        if found is None:
            position += _SLICE
            continue
        if start >= 0:
            yield start, max(start, found.start())
        if found.group(1):
            return
        start = found.end()
        position = start - 2  # of a part without content the line break is the next boundary's, too
        found = None
    raise _invalid("it ends before its last boundary")


def _names(head: bytes) -> tuple[str, str | None]:
    """Name and file name in the head of a part."""
    from python_multipart.multipart import parse_options_header

    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            _, options = parse_options_header(value.strip())
            if b"name" in options:
                filename = options.get(b"filename")
                return _text(options[b"name"]), None if filename is None else _text(filename)
    raise _invalid("a part has no name (Content-Disposition)")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")


async def read_form(request: Request, kind: type[R], service: Service) -> tuple[R, Upload]:
    """The fields and the recording of a form.

    Raises:
        ApiError: 400, it is no form, has no recording or several, or a field is wrong.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        message = "the body must be a form (multipart/form-data) with the recording as its part 'file'"
        raise ApiError(400, message, code="invalid_form")
    values, file = await _in_thread(request, content_type)
    if file is None or file.filename is None:
        what = "is missing" if file is None else "is a text"
        raise ApiError(400, f"file: it {what}; send the recording as a file", param=_FILE, code="missing_file")
    name = f"the file {file.filename[:100]!r}" if file.filename else "the file"
    return read_model(kind, values, service), Upload(name, file.data)


async def _in_thread(request: Request, content_type: str) -> tuple[dict[str, Any], Part | None]:
    """The values of the texts and the recording of a body, of which nothing else is kept."""
    bodies = [piece async for piece in request.stream() if piece]

    def split() -> tuple[dict[str, Any], Part | None]:
        parts = split_form(b"".join(bodies), content_type)
        file = next((part for part in reversed(parts) if part.name == _FILE), None)
        texts = ((part.name, _text(part.data)) for part in parts if part.filename is None and part.name != _FILE)
        try:
            return read_values(texts), file
        except ValueError as e:
            raise ApiError(400, str(e), code="invalid_form") from None

    return await asyncio.get_running_loop().run_in_executor(_splitter, split)
