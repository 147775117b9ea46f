"""Token by token to text: only whole characters leave, and what left never changes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from octavo.loader.byte_level import byte_alphabet

#: Prompt tokens looked at to see whether the output continues a text or begins one.
_CONTEXT = 8


class TokenTexts(Protocol):
    """What a stream asks of a ``Tokenizer``."""

    backend: tokenizers.Tokenizer
    special_ids: frozenset[int]
    decoder_kind: str

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None for text; empty for an unknown id."""

    def token_text(self, token_id: int) -> str:
        """What a token adds in the middle of a text."""


class TextStream:
    """The text of a growing sequence of tokens, in constant time a token.

    Invariant: what ``push`` returned so far, with ``flush`` at the end, is ``Tokenizer.decode`` of the tokens, except
    that SentencePiece's space before the first word is kept if there is text before it in the prompt.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Begins after ``prompt_token_ids``, none of whose text is returned.

        ``visible_tokens``: special tokens that are not skipped with the others.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        # Decodes incomplete characters as far as they have come; what can no longer be one becomes U+FFFD.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        context = list(prompt_token_ids[-_CONTEXT:])
        self._at_start = not context or not tokenizer.backend.decode(context, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before: empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data == b"":  # an id that is no token
            return ""
        if self._at_start and self._tokenizer.decoder_kind != "byte_level":
            return self._first(token_id, data)
        if data is not None:
            return self._utf8.decode(data)
        return self.flush() + self._tokenizer.token_text(token_id)

    def flush(self) -> str:
        """Ends an incomplete character: one U+FFFD, or nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _first(self, token_id: int, data: bytes | None) -> str:
        """A token at the start of a text, where decoders drop a space."""
        text: str = self._tokenizer.backend.decode([token_id], skip_special_tokens=False)
        if data is not None:
            self._at_start = False
            return self._utf8.decode(data) if text else ""
        self._at_start = not self._tokenizer.token_text(token_id)
        return text


def bytes_of_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the alphabet is its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def bytes_of_fallback(token: str) -> bytes | None:
    """The byte that a token such as ``<0x0A>`` stands for; None for others."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
