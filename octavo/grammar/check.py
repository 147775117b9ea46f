"""What is asked and answered when a form is compiled on trial; without llguidance, which the frontend does not load."""

from __future__ import annotations

import msgspec

from octavo.core.structured_outputs import Grammar, StructuredOutputsParams


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
