"""From the form that a request asks for to a checked grammar."""

from __future__ import annotations

import functools
from collections.abc import Collection

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from octavo.core.errors import InvalidRequestError
from octavo.core.structured_outputs import Grammar, StructuredOutputsParams
from octavo.grammar.digest import MAX_BYTES, digest
from octavo.grammar.limits import parser_limits
from octavo.grammar.sources import make_source


def make_grammar(params: StructuredOutputsParams, special_tokens: Collection[str] = ()) -> Grammar:
    """The grammar of a form, which was compiled on trial; for bounds of time and memory see ``GrammarCompiler``.

    ``special_tokens``: texts that the tokenizer has as a token of its own.

    Raises:
        InvalidRequestError: naming the field and the place of the error.
    """
    key = digest(params)
    source = make_source(params, special_tokens)
    if len(source.encode()) > MAX_BYTES:
        raise InvalidRequestError(f"structured_outputs.{params.form} becomes a grammar of more than {MAX_BYTES} bytes")
    error = compile_error(source, frozenset(special_tokens))
    if error:
        raise InvalidRequestError(f"structured_outputs.{params.form}: {error}")
    return Grammar(key, source, params.begin_after)


def compile_error(source: str, special_tokens: frozenset[str] = frozenset()) -> str:
    """What llguidance finds wrong with a grammar; empty: nothing."""
    matcher = LLMatcher(byte_tokenizer(special_tokens), source, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return ""
    return matcher.get_error()


@functools.lru_cache(1)
def byte_tokenizer(special_tokens: frozenset[str] = frozenset()) -> LLTokenizer:
    """A tokenizer with a token for each byte, an end-of-sequence token (256), and special tokens after it."""
    return LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)))


class _Bytes:
    """A tokenizer with a token for each byte, as ``TokenizerWrapper`` wants it: what a grammar allows of any text."""

    bos_token_id = None

    def __init__(self, special_tokens: Collection[str]) -> None:
        special = [b"</s>", *(text.encode() for text in sorted(special_tokens))]
        self.tokens = [bytes([i]) for i in range(256)] + special
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, 256 + len(special)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
