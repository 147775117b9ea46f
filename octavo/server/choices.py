"""What of a growing completion can be handed out, and what each of its tokens says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.outputs import CompletionOutput, TokenLogprobs
from octavo.engine.text_stream import TextStream
from octavo.engine.tokenizer import Tokenizer
from octavo.server.answers import ChoiceLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob

#: JSON has no infinity.
_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Token:
    """A token, where its text begins in the text it is part of, and its logprobs."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


class Tracker:
    """The tokens of a growing completion, in the order in which they may be handed out.

    Invariant: a token's logprobs leave with its text, so that they do not tell what the text still holds back.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], *, skip_special_tokens: bool, start: int = 0
    ) -> None:
        """A completion of no tokens yet, after the tokens ``before``; its text begins at offset ``start``."""
        self._start = start
        self._stream = TextStream(tokenizer, before, skip_special_tokens=skip_special_tokens)
        #: Characters of the text of all tokens, and of the text that was handed out.
        self._end = self._shown = 0
        #: Tokens whose text was not handed out, and where it ends.
        self._held: deque[tuple[int, Token]] = deque()

    def advance(self, added: CompletionOutput) -> list[Token]:
        """The tokens whose text is handed out with this increment: at its end, all that are left."""
        self._shown += len(added.text)
        for token_id, logprobs in zip(added.token_ids, added.logprobs or (), strict=True):
            # A token whose character only a later one completes has no text: it starts where that one does.
            token = Token(token_id, self._end, logprobs)
            self._end += len(self._stream.push(token_id))
            self._held.append((self._end, token))
        ready = []
        while self._held and (added.finished or self._held[0][0] <= self._shown):
            token = self._held.popleft()[1]
            ready.append(replace(token, offset=self._start + min(token.offset, self._shown)))
        return ready


def chat_logprobs(tokenizer: Tokenizer, tokens: list[Token], top: int) -> ChoiceLogprobs:
    """Logprobs as chat answers have them, with ``top`` likeliest tokens at each position."""
    content = []
    for token in tokens:
        known = token.logprobs or {}
        own = _chat_token(tokenizer, token.token_id, known[token.token_id].logprob)
        likeliest = [_chat_token(tokenizer, i, logprob) for i, logprob in _likeliest(token, top)]
        content.append(TokenLogprob(token=own.token, bytes=own.bytes, logprob=own.logprob, top_logprobs=likeliest))
    return ChoiceLogprobs(content=content, refusal=None)


def completion_logprobs(tokenizer: Tokenizer, tokens: list[Token]) -> CompletionLogprobs:
    """Logprobs as completions have them."""
    names = [_name(tokenizer, token.token_id) for token in tokens]
    return CompletionLogprobs(
        text_offset=[token.offset for token in tokens],
        token_logprobs=[_finite(t.logprobs[t.token_id].logprob) if t.logprobs else None for t in tokens],
        tokens=names,
        top_logprobs=[_by_name(tokenizer, token.logprobs) for token in tokens],
    )


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None], length: int
) -> list[Token]:
    """The tokens of a prompt whose text has ``length`` characters."""
    stream, tokens, start = TextStream(tokenizer, []), [], 0
    for token_id, known in zip(token_ids, logprobs, strict=True):
        tokens.append(Token(token_id, min(start, length), known))
        start += len(stream.push(token_id))
    return tokens


def prompt_logprobs(logprobs: list[TokenLogprobs | None]) -> PromptLogprobs:
    """Logprobs of a prompt: for each token None, or by token id."""

    def plain(known: TokenLogprobs) -> dict[str, dict[str, Any]]:
        return {
            str(token_id): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token_id, p in known.items()
        }

    return [None if known is None else plain(known) for known in logprobs]


def _likeliest(token: Token, top: int) -> list[tuple[int, float]]:
    """Of a position's tokens the ``top`` likeliest, in order."""
    known = dict(token.logprobs or {})
    if len(known) > top:
        del known[token.token_id]  # it is there as it was chosen, not as one of the likeliest
    return [(i, p.logprob) for i, p in sorted(known.items(), key=lambda item: (-item[1].logprob, item[1].rank))]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    text = tokenizer.token_text(token_id)
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(token=text, bytes=list(text.encode() if data is None else data), logprob=_finite(logprob))


def _by_name(tokenizer: Tokenizer, known: TokenLogprobs | None) -> dict[str, float] | None:
    if known is None:
        return None
    named: dict[str, float] = {}
    for token_id, p in known.items():
        # Different tokens may have one text; the one that was chosen stands first.
        named.setdefault(_name(tokenizer, token_id), _finite(p.logprob))
    return named


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; of one that is part of a character its bytes, as OpenAI writes them."""
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return tokenizer.token_text(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
