"""What the first and last bytes of a file say of it that its decoder does not."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

from octavo.core.errors import AudioError

#: Beginnings of files that are audio or are taken for it, and what an error calls them.
_FORMATS = (
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska file"),
    (4, b"ftyp", "an MP4 or M4A file"),
    (0, b"RIFF", "a RIFF file without audio that can be decoded"),
    (0, b"OggS", "an Ogg file without audio that can be decoded"),
    (0, b"fLaC", "a damaged FLAC file"),
    (0, b"ID3", "a damaged mp3 file"),
    (0, b"\xff\xf1", "a file of AAC"),
    (0, b"\xff\xf9", "a file of AAC"),
    (0, b"#!AMR", "an AMR file"),
    (0, b"0&\xb2u", "a Windows Media file"),
    (0, b"%PDF", "a PDF file"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GGUF", "a GGUF file"),
)
#: Sizes that programs write which stream and do not know the size.
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x80000000)
_NEARLY_MAX = 0xFFFFFF00
#: Chunks of a WAV file before its samples that are looked at.
_MAX_CHUNKS = 1000
_OGG_TAIL = 1 << 17


def guess_format(start: bytes) -> str:
    """What a file seems to be by its first bytes; empty: unknown."""
    for offset, magic, name in _FORMATS:
        if start[offset : offset + len(magic)] == magic:
            return name
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as e:
        text = start[: e.start].decode("utf-8") if e.start > len(start) - 4 else ""
    return "a text file" if _is_lines(text) else ""


def _is_lines(text: str) -> bool:
    return bool(text.strip()) and all(line.isprintable() for line in text.replace("\t", " ").splitlines())


def check_complete(stream: BinaryIO, name: str) -> None:
    """Refuses WAV and Ogg files that end before they say: their decoder gives what there is, in silence.

    Raises:
        AudioError: it is cut off.
    """
    stream.seek(0)
    start = stream.read(12)
    if start[:4] in (b"RIFF", b"RF64") and start[8:12] == b"WAVE":
        _check_wav(stream, name, is_wide=start[:4] == b"RF64")
    elif start[:4] == b"OggS":
        _check_ogg(stream, name)


def _check_wav(stream: BinaryIO, name: str, *, is_wide: bool) -> None:
    end, position = stream.seek(0, io.SEEK_END), 12
    for _ in range(_MAX_CHUNKS):
        stream.seek(position)
        header = stream.read(8)
        if len(header) < 8:
            raise AudioError(f"{name} is cut off: a WAV file without samples, of {end} bytes")
        kind, size = header[:4], struct.unpack("<I", header[4:])[0]
        if kind == b"data":
            has = end - position - 8
            if not is_wide and size not in _UNKNOWN_SIZES and size < _NEARLY_MAX and size > has:
                raise AudioError(f"{name} is cut off: it says that it has {size} bytes of samples, and has {has}")
            return
        position += 8 + size + size % 2


def _check_ogg(stream: BinaryIO, name: str) -> None:
    """Its last page must be whole."""
    end = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, end - _OGG_TAIL))
    tail = stream.read(_OGG_TAIL)
    at = tail.rfind(b"OggS\0")
    if at < 0:
        raise AudioError(f"{name} is damaged: the end of this Ogg file has no page")
    page = tail[at:]
    segments = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) < 27 or len(segments) < page[26] or len(page) < 27 + page[26] + sum(segments):
        raise AudioError(f"{name} is cut off within the last page of an Ogg file")
