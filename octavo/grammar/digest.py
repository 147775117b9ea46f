"""The names of forms in caches; without llguidance, which the frontend does not load."""

from __future__ import annotations

import hashlib

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import StructuredOutputsParams

#: Most bytes of a form as a request gives it, and as it is written in llguidance's notation.
MAX_BYTES = 1 << 20


def digest(params: StructuredOutputsParams) -> str:
    """The name of a form in caches: equal where all fields are equal, the order of properties among them.

    Raises:
        InvalidRequestError: the form has a value that JSON has not, is too deep, or too large.
    """
    try:
        content = msgspec.json.encode(params)
    except (TypeError, ValueError, RecursionError, OverflowError) as e:
        raise InvalidRequestError(f"structured_outputs.{params.form} cannot be written as JSON: {e}") from None
    if len(content) > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs.{params.form} has {len(content)} bytes as JSON; at most {MAX_BYTES} are compiled"
        )
    return hashlib.blake2b(content, digest_size=16).hexdigest()
