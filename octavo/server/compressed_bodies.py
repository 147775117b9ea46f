"""Bodies of requests that are compressed: bounded in what they become."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping
from typing import Any

from octavo.server.api_errors import ApiError

#: Encoding -> window bits of zlib, which tell its format.
_ZLIB = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body of a request with the header ``Content-Encoding``.

    Args:
        body: as it was sent.
        encoding: the header's value; several are separated by commas, in the order in which they were applied.
        max_bytes: most bytes of the result, and of each step to it.

    Raises:
        ApiError: 415, the encoding is not known; 400, the body is not in it; 413, the result is too large.
    """
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name not in ("", "identity"):
            body = _one(body, name, max_bytes)
    return body


def _one(body: bytes, name: str, max_bytes: int) -> bytes:
    if name == "zstd":
        return _zstd(body, max_bytes)
    if name not in _ZLIB:
        codings = ", ".join(("gzip", "deflate", "zstd"))
        message = f"Content-Encoding {name[:50]!r} is not known here; send the body as it is, or as {codings}"
        raise ApiError(415, message, code="unsupported_encoding")
    return _decoded(zlib.decompressobj(_ZLIB[name]), zlib.error, body, name, max_bytes)


def _zstd(body: bytes, max_bytes: int) -> bytes:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
    except ImportError:
        message = "Content-Encoding 'zstd' needs a server with Python 3.14; send the body as it is, or in gzip"
        raise ApiError(415, message, code="unsupported_encoding") from None
    return _decoded(zstd.ZstdDecompressor(), zstd.ZstdError, body, "zstd", max_bytes)


def _decoded(decoder: Any, error: type[Exception], body: bytes, name: str, max_bytes: int) -> bytes:
    """What a decoder, which raises ``error``, makes of a body in its encoding."""
    result: bytes | None = None
    with contextlib.suppress(error):
        result = decoder.decompress(body, max_bytes + 1)
    if result is not None and len(result) > max_bytes:
        raise body_too_large(max_bytes)
    if result is None or not decoder.eof:
        message = f"the body is not whole, or not in its Content-Encoding ({name})"
        raise ApiError(400, message, code="invalid_encoding")
    return result


def body_too_large(
    max_bytes: int, headers: Mapping[str, str] | None = None, option: str = "max_body_bytes"
) -> ApiError:
    """The error for a body of more bytes than an option allows."""
    message = f"the body is larger than the {max_bytes} bytes that this server takes ({option})"
    return ApiError(413, message, code="body_too_large", headers=headers)
