"""Forms as the frontend has them: their names in caches, and what is asked and answered when one is compiled on trial.

Without llguidance, which the frontend does not load.
"""

from __future__ import annotations

import hashlib

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import Grammar, StructuredOutputsParams

#: Most bytes of a form as a request gives it, and as it is written in llguidance's notation.
MAX_BYTES = 1 << 20
#: Most keywords that are reported as left out, and most characters of the place of each.
MAX_RELAXED = 100
LONGEST_PATH = 300


class CheckRequest(msgspec.Struct):
    """A form to compile."""

    params: StructuredOutputsParams
    #: Texts that the tokenizer has as a token of its own.
    special_tokens: list[str]
    #: Grammars may name tokens by their ids.
    vocab_size: int


class CheckAnswer(msgspec.Struct):
    """Its grammar, or what is wrong with it."""

    grammar: Grammar | None = None
    error: str = ""
    #: Places of keywords that it does not obey, and leaves out.
    relaxed: list[str] = []


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
