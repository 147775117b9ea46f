"""Limits within which a grammar is compiled and followed: by the frontend that checks it, and by the workers."""

from __future__ import annotations

from llguidance import LLParserLimits

#: Most states of a lexer, of one to two kilobytes each.
MAX_LEXER_STATES = 50_000
#: Most symbols of a grammar. A mask's time is bounded by nothing else: it can grow with their square, to half a second
#: for so many. An object schema has some eight for each property.
MAX_SYMBOLS = 20_000


def parser_limits() -> LLParserLimits:
    """Limits of llguidance: counts of work, not times, so that a grammar behaves the same on every machine."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
