"""Structured output: what a request asks for, and the grammar that the workers hold its tokens to."""

from __future__ import annotations

from typing import Any

import msgspec


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an output must have: exactly one of the first six fields. Names are those of vLLM.

    >>> StructuredOutputsParams(choice=["yes", "no"])
    """

    #: A JSON schema, as a mapping or as JSON text.
    json: str | dict[str, Any] | bool | None = None
    #: True: any JSON object.
    json_object: bool | None = None
    #: A regular expression that the whole output matches.
    regex: str | None = None
    #: The output is one of these texts.
    choice: list[str] | None = None
    #: A grammar in Lark or in GBNF notation.
    grammar: str | None = None
    #: Free text in which certain tags begin a part of a certain schema.
    structural_tag: str | dict[str, Any] | None = None
    #: JSON without spaces and line breaks between its tokens.
    disable_any_whitespace: bool = False


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A checked grammar, as an engine core takes it."""

    #: Digest of the other fields.
    key: str
    #: In llguidance's own notation (Lark, or JSON).
    source: str
    #: The output is free up to the first occurrence of these tokens, which end a model's reasoning; empty: it is bound
    #: from its first token on.
    begin_after: list[int] = []
