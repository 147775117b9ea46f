"""Grammars driven a byte at a time, without a model."""

from __future__ import annotations

from llguidance import LLMatcher

from octavo.core.structured_outputs import Grammar
from octavo.grammar.compile import byte_tokenizer
from octavo.grammar.limits import parser_limits

#: The end-of-sequence token of the tokenizer.
END = 256


def make_matcher(grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(byte_tokenizer(), grammar.source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text, and not more of it, has the form."""
    matcher, content = make_matcher(grammar), list(text.encode())
    return matcher.validate_tokens([*content, END]) == len(content) + 1
