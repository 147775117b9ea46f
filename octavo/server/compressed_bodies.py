"""Bodies of requests that are compressed: bounded in what they become."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.server.api_errors import ApiError

#: Encoding -> window bits of zlib, which tell its format.
_ZLIB = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

#: Most encodings, one within the other: some clients compress what is compressed, nobody does it more often.
MAX_ENCODINGS = 2
#: Bytes that a decoder is given at once, and makes at once; after each step the size is counted, and other threads
#: have a turn.
_PIECE = 64 << 10
_STEP = 1 << 20
#: Largest window of zstd, as a power of two, that takes memory beside the result: 8 MiB (RFC 9659).
_MAX_WINDOW_LOG = 23

#: A single thread, so that no number of bodies takes the processors from the event loop and the engine.
_expander = ThreadPoolExecutor(1, thread_name_prefix="octavo-unpack")


def decompressed(
    body: bytes, encoding: str, max_bytes: int, grow_to: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body of a request with the header ``Content-Encoding``; to be called beside the event loop.

    Args:
        body: as it was sent.
        encoding: the header's value; several are separated by commas, in the order in which they were applied.
        max_bytes: most bytes of the result, and of each step to it.
        grow_to: is told how many bytes there are, while they become more; what it raises ends the work.

    Raises:
        ApiError: 415, the encoding is not known, or there are too many; 400, the body is not in it; 413, the result is
            too large.
    """
    names = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(names) > MAX_ENCODINGS:
        message = f"the body is compressed {len(names)} times (Content-Encoding); at most {MAX_ENCODINGS} are taken"
        raise ApiError(415, message, code="unsupported_encoding")
    for name in reversed(names):
        body = _decoded(_decoder(name), body, name, max_bytes, grow_to)
    return body


async def decompressed_beside_loop(body: bytes, encoding: str, max_bytes: int, grow_to: Callable[[int], None]) -> bytes:
    """``decompressed`` in a thread: a body of some kilobytes may become one of the largest, in a tenth of a second."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_expander, decompressed, body, encoding, max_bytes, grow_to)


def _decoder(name: str) -> Any:
    if name == "zstd":
        return _zstd_decoder()
    if name not in _ZLIB:
        codings = ", ".join(("gzip", "deflate", "zstd"))
        message = f"Content-Encoding {name[:50]!r} is not known here; send the body as it is, or as {codings}"
        raise ApiError(415, message, code="unsupported_encoding")
    return zlib.decompressobj(_ZLIB[name])


def _zstd_decoder() -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
    except ImportError:
        message = "Content-Encoding 'zstd' needs a server with Python 3.14; send the body as it is, or in gzip"
        raise ApiError(415, message, code="unsupported_encoding") from None
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})


def _decoded(decoder: Any, body: bytes, name: str, max_bytes: int, grow_to: Callable[[int], None]) -> bytes:
    """What a decoder makes of a body in its encoding."""
    pieces, size = list[bytes](), 0
    for start in range(0, len(body), _PIECE):
        rest, is_full = body[start : start + _PIECE], True
        while rest or is_full:
            most = min(_STEP, max_bytes + 1 - size)
            try:
                piece = decoder.decompress(rest, most)
            except Exception:  # zlib.error, or zstd's own
                raise _not_whole(name) from None
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise body_too_large(max_bytes)
            grow_to(size)
            if decoder.eof:
                return b"".join(pieces)
            # zlib gives back what it has not read; zstd keeps it.
            rest, is_full = getattr(decoder, "unconsumed_tail", b""), len(piece) == most
    raise _not_whole(name)


def _not_whole(name: str) -> ApiError:
    message = f"the body is not whole, or not in its Content-Encoding ({name})"
    return ApiError(400, message, code="invalid_encoding")


def body_too_large(
    max_bytes: int, headers: Mapping[str, str] | None = None, option: str = "max_body_bytes"
) -> ApiError:
    """The error for a body of more bytes than an option allows."""
    message = f"the body is larger than the {max_bytes} bytes that this server takes ({option})"
    return ApiError(413, message, code="body_too_large", headers=headers)
