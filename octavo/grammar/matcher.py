"""Compiled grammars: which tokens may come next, by llguidance.

A matcher follows the tokens of one sequence. Where the grammar forces text, the mask of the next token allows exactly
the first of the tokens that this text begins with (``LLMatcher.compute_ff_tokens``). So tokens that are appended
without sampling are those that sampling under the masks would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.core.errors import TokenizerError

# Limits within which a grammar is compiled and followed: by the frontend that checks it, and by the workers.

#: Most states of a lexer, of one to two kilobytes each.
MAX_LEXER_STATES = 50_000
#: Most symbols of a grammar. A mask's time is bounded by nothing else: it can grow with their square, to half a second
#: for so many. An object schema has some eight for each property.
MAX_SYMBOLS = 20_000


def parser_limits() -> LLParserLimits:
    """Limits of llguidance: counts of work, not times, so that a grammar behaves the same on every machine."""
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_SYMBOLS, verbose_errors=False)


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message says what is wrong, and where as far as it is known."""


class GrammarTokenizer:
    """The vocabulary as grammars see it: the text of each token, and the tokens that may follow a complete output.

    Making one takes a good part of a second; it never changes, so threads may share it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size`` is the network's: ids without a token, if it has more than the tokenizer, never occur.

        Raises:
            TokenizerError: it is not known what text the tokens of such a tokenizer stand for.
        """
        #: The network's.
        self.network_vocab_size = vocab_size
        added = backend.get_added_tokens_decoder()
        num_tokens = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        known = [token for token in eos_token_ids if token < max(num_tokens, vocab_size)]
        try:
            self.lltokenizer = LLTokenizer(
                backend.to_str(),
                n_vocab=max(num_tokens, vocab_size),
                eos_token=known or None,
                slices=LLTokenizer.json_slices(),
            )
        except Exception as e:  # the library raises what it comes upon
            raise TokenizerError(f"grammars cannot be used with this tokenizer: {e}") from e

    @property
    def vocab_size(self) -> int:
        """Bits of a mask: ids of the tokenizer or of the network, whichever has more."""
        return self.lltokenizer.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an output, allowed where its grammar may end."""
        return self.lltokenizer.eos_tokens


def compile_grammar(source: str, tokenizer: GrammarTokenizer) -> LLMatcher:
    """The matcher of a new sequence, to be copied for each (``deep_copy``); the interpreter is not held meanwhile.

    Args:
        source: in llguidance's own notation, see ``Grammar.source``.

    Raises:
        GrammarError: it is no grammar, or exceeds the limits.
    """
    matcher = LLMatcher(tokenizer.lltokenizer, source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
