"""Compiled grammars: which tokens may come next, by llguidance (a token bitmask for each sequence).

Where the grammar forces text, the mask of the next token allows exactly the first of the tokens that this text begins
with (``LLMatcher.compute_ff_tokens``): tokens that are appended without sampling are those that sampling would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.core.errors import TokenizerError

#: Maximum states of a lexer, one to two kilobytes each.
MAX_LEXER_STATES = 50_000
#: Maximum symbols of a grammar, about eight for each property of a schema: they bound the time of a mask (0.5 s).
MAX_SYMBOLS = 20_000


def parser_limits() -> LLParserLimits:
    """Limits of llguidance: amounts of work, not times, so that a grammar behaves the same on every machine."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_SYMBOLS, verbose_errors=False)


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message has the error and, if possible, its place."""


class GrammarTokenizer:
    """The text of each token, and the EOS tokens; thread-safe. Making one takes a good part of a second."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size``: the network's. Raises TokenizerError if llguidance does not support the tokenizer."""
        self.network_vocab_size = vocab_size
        added = backend.get_added_tokens_decoder()
        num_tokens = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        eos = [token for token in eos_token_ids if token < max(num_tokens, vocab_size)]
        try:
            bits, slices = max(num_tokens, vocab_size), LLTokenizer.json_slices()
            self.lltokenizer = LLTokenizer(backend.to_str(), n_vocab=bits, eos_token=eos or None, slices=slices)
        except Exception as e:  # llguidance may raise anything
            raise TokenizerError(f"grammars cannot be used with this tokenizer: {e}") from e

    @property
    def vocab_size(self) -> int:
        """Bits of a mask: the larger vocabulary of tokenizer and network."""
        return self.lltokenizer.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """EOS tokens, allowed where the grammar may end."""
        return self.lltokenizer.eos_tokens


def compile_grammar(source: str, tokenizer: GrammarTokenizer) -> LLMatcher:
    """The matcher of a new sequence, to copy for each (``deep_copy``); raises GrammarError. Releases the GIL."""
    matcher = LLMatcher(tokenizer.lltokenizer, source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
