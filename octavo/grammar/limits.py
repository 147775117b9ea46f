"""Limits within which a grammar is compiled and followed: by the frontend that checks it, and by the workers."""

from __future__ import annotations

from llguidance import LLParserLimits

#: Most texts of a choice.
MAX_CHOICES = 10_000
#: Most states of a lexer, of one to two kilobytes each.
MAX_LEXER_STATES = 50_000


def parser_limits() -> LLParserLimits:
    """Limits of llguidance: counts of work, not times, so that a grammar behaves the same on every machine."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
