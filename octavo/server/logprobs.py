"""Logprobs of prompts and completions in the formats of the OpenAI API, in step with the text that is returned."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.outputs import CompletionOutput, TokenLogprobs
from octavo.engine.text_stream import TextStream
from octavo.engine.tokenizer import Tokenizer
from octavo.server.large_answers import LazyList
from octavo.server.protocol_answers import ChoiceLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

#: Lowest logprob that is sent, as JSON has no infinity.
_MIN_LOGPROB = -9999.0
_SPACES = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Token:
    """A token, the offset of its text in the text of the choice in characters, and its logprobs."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named in logprobs: by their text, or as ``token_id:ID``."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def of_completion(self, token_id: int) -> str:
        """A token's text; for a part of a character its bytes, in OpenAI's notation."""
        if self.as_ids:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        if not data:  # whole text, or no token of this tokenizer
            return self.tokenizer.token_text(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of_chat(self, token_id: int, logprob: float) -> TopLogprob:
        """A token, its bytes and its logprob."""
        text = self.tokenizer.token_text(token_id)
        data = self.tokenizer.token_bytes(token_id)
        plain = list(text.encode() if data is None else data)
        name = f"token_id:{token_id}" if self.as_ids else text
        return TopLogprob(token=name, bytes=plain, logprob=_finite(logprob))


class _Tracker:
    """Follows the text of a completion's tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        *,
        skip_special_tokens: bool,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """For a completion after the tokens ``before``.

        ``visible_tokens``: special tokens that are not skipped with the others.
        """
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        self._stream = TextStream(
            tokenizer, before, skip_special_tokens=skip_special_tokens, visible_tokens=visible_tokens
        )


class LogprobsTracker(_Tracker):
    """Holds back the logprobs of a completion's tokens until their text is returned.

    Invariant: a token's logprobs are returned with its text, so they do not reveal text that is still held back.
    """

    def __init__(self, *args: Any, start: int = 0, **options: Any) -> None:
        """The text of the completion begins at offset ``start``; else see the base class."""
        super().__init__(*args, **options)
        self._start = start
        #: Characters of the text of all tokens, and of the text that was returned.
        self._end = self._returned = 0
        #: (end of its text, token) of the tokens whose text was not returned yet.
        self._held: deque[tuple[int, Token]] = deque()

    def advance(self, added: CompletionOutput) -> list[Token]:
        """The tokens whose text is complete with this increment; with a finished one, all that remain."""
        self._returned += len(added.text)
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            # A token that ends within a character has no text of its own: its offset is that of the character.
            token = Token(token_id, self._end, logprobs)
            self._end += len(self._stream.push(token_id))
            self._held.append((self._end, token))
        ready = []
        while self._held and (added.finished or self._held[0][0] <= self._returned):
            token = self._held.popleft()[1]
            ready.append(replace(token, offset=self._start + min(token.offset, self._returned)))
        return ready


class TextLogprobs(_Tracker):
    """Which tokens the texts of a choice are made of, where some of what the model writes is reasoning, calls or marks.

    Invariant: a token is given once, when the last of its text is, or with ``rest`` of the text that ends within it.
    Tokens whose text is in none, such as the one that ends the choice, are not given.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class."""
        super().__init__(*args, **options)
        #: (end of its text, the tokens that it is made of) of whole characters not asked for yet; then of one begun.
        self._held: deque[tuple[int, list[Token]]] = deque()
        self._begun: list[Token] = []
        self._end = 0

    def add(self, added: CompletionOutput) -> None:
        """Tokens were generated."""
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            if token_id in self._skipped:
                continue
            self._begun.append(Token(token_id, self._end, logprobs))
            if text := self._stream.push(token_id):
                self._end += len(text)
                self._held.append((self._end, self._begun))
                self._begun = []

    def take(self, start: int, end: int) -> list[Token]:
        """The tokens whose text ends within that from ``start`` to ``end``; earlier ones are forgotten."""
        found: list[Token] = []
        while self._held and self._held[0][0] <= end:
            token_end, tokens = self._held.popleft()
            if token_end > start:
                found += tokens
        return found

    def rest(self, end: int) -> list[Token]:
        """The tokens of which only a beginning is within the text that ends at ``end``; nothing follows in it."""
        tokens = self._held[0][1] if self._held else self._begun
        if not tokens or tokens[0].offset >= end:
            return []
        if self._held:
            self._held.popleft()
        else:
            self._begun = []
        return tokens


def make_chat_logprobs(names: TokenNames, tokens: list[Token], top: int) -> ChoiceLogprobs:
    """Logprobs in the format of chat completions, with the ``top`` most likely tokens at each position."""
    content = []
    for token in tokens:
        logprobs = token.logprobs or {}
        name = names.of_chat(token.token_id, logprobs[token.token_id].logprob)
        most_likely = [names.of_chat(i, logprob) for i, logprob in _most_likely(token, top)]
        content.append(TokenLogprob(token=name.token, bytes=name.bytes, logprob=name.logprob, top_logprobs=most_likely))
    return ChoiceLogprobs(content=content, refusal=None)


def make_completion_logprobs(names: TokenNames, tokens: list[Token]) -> CompletionLogprobs:
    """Logprobs in the format of completions."""
    # Not validated, which is a single call for all of them.
    return CompletionLogprobs.model_construct(
        text_offset=[token.offset for token in tokens],
        token_logprobs=[_finite(t.logprobs[t.token_id].logprob) if t.logprobs else None for t in tokens],
        tokens=[names.of_completion(token.token_id) for token in tokens],
        top_logprobs=[_by_name(names, token.logprobs) for token in tokens],
    )


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None], text: str
) -> list[Token]:
    """The tokens of a prompt; a special one that its text does not have, such as a beginning, takes none of it."""
    stream, tokens, start = TextStream(tokenizer, [], skip_special_tokens=False), [], 0
    for token_id, known in zip(token_ids, logprobs, strict=True):
        special = tokenizer.token_text(token_id) if token_id in tokenizer.special_ids else None
        if special is not None and _place(text, special, start) is None:
            tokens.append(Token(token_id, min(start, len(text)), known))
            continue
        piece = stream.push(token_id)
        if (place := _place(text, piece, start)) is not None:
            start = place
        elif text.startswith(piece.lstrip(" "), start):  # a word that a decoder begins with a space
            piece = piece.lstrip(" ")
        tokens.append(Token(token_id, min(start, len(text)), known))
        start += len(piece)
    return tokens


def _place(text: str, piece: str, start: int) -> int | None:
    """Where a piece stands in a text, from ``start`` on; special tokens may have taken the spaces before it."""
    if text.startswith(piece, start):
        return start
    after = _SPACES.match(text, start)
    return after.end() if after is not None and text.startswith(piece, after.end()) else None


def make_prompt_logprobs(logprobs: list[TokenLogprobs | None]) -> Any:
    """``PromptLogprobs``, for ``encode_in_slices``: for each token None, or a dict by token id."""
    return LazyList(logprobs, _plain)


def _plain(entry: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
    if entry is None:
        return None
    return {
        str(token_id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for token_id, p in entry.items()
    }


def _most_likely(token: Token, top: int) -> list[tuple[int, float]]:
    """(id, logprob) of the ``top`` most likely tokens of a position, the most likely first."""
    logprobs = dict(token.logprobs or {})
    if len(logprobs) > top:
        del logprobs[token.token_id]  # it is included as the generated token, not as one of the most likely
    return [(i, p.logprob) for i, p in sorted(logprobs.items(), key=lambda item: (-item[1].logprob, item[1].rank))]


def _by_name(names: TokenNames, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
    if logprobs is None:
        return None
    named: dict[str, float] = {}
    for token_id, p in logprobs.items():
        # Different tokens may have the same text; the generated one comes first.
        named.setdefault(names.of_completion(token_id), _finite(p.logprob))
    return named


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
