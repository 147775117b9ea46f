"""Responses of many numbers, as JSON."""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

_encode = msgspec.json.Encoder().encode


def numbers(data: np.ndarray, encoding_format: str | None, dtype: str | None = None, order: str | None = None) -> Any:
    """float32 numbers of any shape as JSON has them: lists of numbers, or base64 of their bytes.

    Args:
        data: the numbers.
        encoding_format: "base64", or anything else for lists.
        dtype: what they are rounded to: a ``VectorType``; None: nothing.
        order: of the bytes of a number: "big", or anything else for "little".
    """
    if dtype not in (None, "float32"):
        data = data.astype(_rounded_type(str(dtype)))
    if encoding_format == "base64":
        size = data.dtype.itemsize
        words = data.view(f"u{size}").astype(f"{'>' if order == 'big' else '<'}u{size}", copy=False)
        return binascii.b2a_base64(words.tobytes(), newline=False).decode()
    return data.astype(np.float32, copy=False).tolist()


def _rounded_type(name: str) -> np.dtype[Any]:
    import ml_dtypes

    types = {
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
    }
    return np.dtype(types[name])


def encode_list(entries: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]) -> bytes:
    """``{"object": "list", "data": entries, **rest}``; each entry is made and written before the next one.

    So that a thread that writes a large response leaves others their turn between two entries.
    """
    data = b",".join(map(_encode, entries))
    return b'{"object":"list","data":[' + data + b"]," + _encode(rest)[1:]


def encode_object(value: Mapping[str, Any] | list[Any]) -> bytes:
    """As JSON."""
    return _encode(value)
