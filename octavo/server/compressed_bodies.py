"""Bodies of requests that are compressed: bounded in what they become."""

from __future__ import annotations

import zlib

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
        known = ", ".join(("gzip", "deflate", "zstd"))
        message = f"Content-Encoding {name[:50]!r} is not known here; send the body as it is, or as {known}"
        raise ApiError(415, message, code="unsupported_encoding")
    decoder = zlib.decompressobj(_ZLIB[name])
    try:
        result = decoder.decompress(body, max_bytes + 1)
    except zlib.error:
        raise _broken(name) from None
    if len(result) > max_bytes:
        raise _too_large(max_bytes)
    if not decoder.eof:
        raise _broken(name)
    return result


def _zstd(body: bytes, max_bytes: int) -> bytes:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
    except ImportError:
        message = "Content-Encoding 'zstd' needs a server with Python 3.14; send the body as it is, or in gzip"
        raise ApiError(415, message, code="unsupported_encoding") from None
    decoder = zstd.ZstdDecompressor()
    try:
        result: bytes = decoder.decompress(body, max_bytes + 1)
    except zstd.ZstdError:
        raise _broken("zstd") from None
    if len(result) > max_bytes:
        raise _too_large(max_bytes)
    if not decoder.eof:
        raise _broken("zstd")
    return result


def _broken(name: str) -> ApiError:
    return ApiError(400, f"the body is not whole, or not in its Content-Encoding ({name})", code="invalid_encoding")


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than the {max_bytes} bytes that this server takes (max_body_bytes)"
    return ApiError(413, message, code="body_too_large")
