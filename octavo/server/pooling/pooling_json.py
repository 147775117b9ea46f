"""Responses of many numbers, as JSON."""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

_encode = msgspec.json.Encoder().encode


def numbers(data: np.ndarray, encoding_format: str | None) -> Any:
    """float32 numbers of any shape as JSON has them: lists of numbers, or base64 of their little-endian bytes."""
    if encoding_format == "base64":
        return binascii.b2a_base64(data.astype("<f4", copy=False).tobytes(), newline=False).decode()
    return data.tolist()


def encode_list(entries: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]) -> bytes:
    """``{"object": "list", "data": entries, **rest}``; each entry is made and written before the next one.

    So that a thread that writes a large response leaves others their turn between two entries.
    """
    data = b",".join(map(_encode, entries))
    return b'{"object":"list","data":[' + data + b"]," + _encode(rest)[1:]


def encode_object(value: Mapping[str, Any] | list[Any]) -> bytes:
    """As JSON."""
    return _encode(value)
