"""Grammars driven a byte at a time, without a model."""

from __future__ import annotations

import random

from llguidance import LLMatcher

from octavo.core.sampling_params import Grammar
from octavo.grammar.matcher import parser_limits
from octavo.grammar.sources import byte_tokenizer

#: The end-of-sequence token of the tokenizer.
END = 256
#: Bytes that bring JSON to an end.
_CLOSING = b'"}]'


def make_matcher(grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(byte_tokenizer(), grammar.source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text, and not more of it, has the form."""
    matcher, content = make_matcher(grammar), list(text.encode())
    return matcher.validate_tokens([*content, END]) == len(content) + 1


def generate(grammar: Grammar, random: random.Random, patience: int = 60, longest: int = 2000) -> str | None:
    """A random text of the form, which after ``patience`` bytes is ended where it can be; None: it did not end."""
    matcher, content = make_matcher(grammar), bytearray()
    while len(content) < longest:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(END + 1) if mask[i >> 3] >> (i & 7) & 1]
        assert allowed and not matcher.is_error(), (bytes(content), matcher.get_error())
        closing = [END] if END in allowed else [byte for byte in allowed if byte in _CLOSING]
        ends = bool(closing) and (len(content) > patience or random.random() < 0.2)
        # Where many bytes may come, most of them are parts of strings: half of the time an ASCII character.
        plain = [byte for byte in allowed if 32 <= byte < 127] if random.random() < 0.5 else allowed
        byte = random.choice(closing if ends else plain or allowed)
        assert matcher.consume_token(byte)
        if byte == END:
            return content.decode()
        content.append(byte)
    return None
