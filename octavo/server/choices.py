"""What of a growing completion has been handed out, and what each of its tokens says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Addition:
    """What is new of a choice. ``tokens`` is filled only where logprobs are asked for."""

    text: str
    tokens: list[Token]
    finished: bool


class Tracker:
    """Turns the cumulative outputs of one completion into additions.

    Invariant: a token's logprobs leave with its text, so that they do not tell what the text still holds back.
    """

    def __init__(self, layout: Layout | None) -> None:
        """``layout`` of the choice, if logprobs are wanted."""
        self._layout = layout
        self._sent_text = 0
        self._sent_tokens = 0
        self._finished = False

    def advance(self, output: CompletionOutput) -> Addition:
        """What this output has more than the one before."""
        text = output.text[self._sent_text :]
        self._sent_text = len(output.text)
        finished = output.finished and not self._finished
        self._finished = output.finished
        tokens: list[Token] = []
        if self._layout is not None and output.logprobs is not None:
            self._layout.extend(output.token_ids)
            end = len(output.token_ids)
            if not output.finished:
                end = self._layout.tokens_within(len(output.text), self._sent_tokens)
            for i in range(self._sent_tokens, end):
                offset = min(self._layout.starts[i], len(output.text))
                tokens.append(Token(output.token_ids[i], offset, output.logprobs[i]))
            self._sent_tokens = end
        return Addition(text, tokens, finished)


class Layout:
    """Where in a text each of its tokens lies, in characters."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """A text of no tokens yet, after the tokens ``before``."""
        self._stream = TextStream(tokenizer, before, skip_special_tokens=skip_special_tokens)
        self._end = 0
        #: A token whose character only a later one completes has no text: it starts where that one does.
        self.starts: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes in those of all the text's tokens that are new."""
        for token_id in token_ids[len(self.starts) :]:
            self.starts.append(self._end)
            self._end += len(self._stream.push(token_id))

    def tokens_within(self, length: int, known: int) -> int:
        """How many tokens end within the first characters of the text; ``known`` of them are known to."""
        ends = [*self.starts[known + 1 :], self._end]
        return known + sum(1 for end in ends[: len(self.starts) - known] if end <= length)


def chat_logprobs(tokenizer: Tokenizer, tokens: list[Token], top: int) -> ChoiceLogprobs:
    """Logprobs as chat answers have them, with ``top`` likeliest tokens at each position."""
    content = []
    for token in tokens:
        known = token.logprobs or {}
        own = _chat_token(tokenizer, token.token_id, known[token.token_id].logprob)
        likeliest = [_chat_token(tokenizer, i, logprob) for i, logprob in _likeliest(token, top)]
        content.append(TokenLogprob(token=own.token, bytes=own.bytes, logprob=own.logprob, top_logprobs=likeliest))
    return ChoiceLogprobs(content=content, refusal=None)


def completion_logprobs(tokenizer: Tokenizer, tokens: list[Token], shift: int = 0) -> CompletionLogprobs:
    """Logprobs as completions have them; ``shift`` characters of text stand before that of the tokens."""
    names = [_name(tokenizer, token.token_id) for token in tokens]
    return CompletionLogprobs(
        text_offset=[token.offset + shift for token in tokens],
        token_logprobs=[_finite(t.logprobs[t.token_id].logprob) if t.logprobs else None for t in tokens],
        tokens=names,
        top_logprobs=[_by_name(tokenizer, token.logprobs) for token in tokens],
    )


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None], length: int
) -> list[Token]:
    """The tokens of a prompt whose text has ``length`` characters."""
    layout = Layout(tokenizer, [])
    layout.extend(token_ids)
    return [
        Token(token_id, min(start, length), known)
        for token_id, start, known in zip(token_ids, layout.starts, logprobs, strict=True)
    ]


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
