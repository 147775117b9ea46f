"""How long an answer took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class AnswerTimes:
    """Tokens of an answer and when they came; seconds, on the clock of ``time.monotonic()``.

    They are those of the person who waits: with the time that it takes to show the text.
    """

    asked: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    #: Of the prompt's, those whose KV entries were found instead of computed.
    num_cached_tokens: int = 0
    _num_first: int = 0

    def add(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts tokens that have come now."""
        self.num_cached_tokens = num_cached_tokens
        if not num_tokens:
            return
        self.last = time.monotonic()
        if self.first is None:
            self.first, self._num_first = self.last, num_tokens
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """None without a token."""
        return None if self.first is None else self.first - self.asked

    @property
    def decoded(self) -> tuple[int, float]:
        """(tokens after those of the first step, seconds that they took)."""
        if self.first is None or self.last is None:
            return 0, 0.0
        return self.num_tokens - self._num_first, self.last - self.first

    def __str__(self) -> str:
        """As in ``42 tokens, 31.2 tokens/s; first after 0.21 s; prompt of 120 tokens, 96 of them cached``."""
        tokens, seconds = self.decoded
        rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
        first = f"; first after {self.time_to_first_token:.2f} s" if self.time_to_first_token is not None else ""
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        return f"{_tokens(self.num_tokens)}{rate}{first}; prompt of {_tokens(self.num_prompt_tokens)}{cached}"


def summary(answers: Sequence[AnswerTimes]) -> str:
    """All answers as one line."""
    tokens = sum(times.decoded[0] for times in answers)
    seconds = sum(times.decoded[1] for times in answers)
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
    firsts = [first for times in answers if (first := times.time_to_first_token) is not None]
    average = f"; first after {sum(firsts) / len(firsts):.2f} s on average" if firsts else ""
    number = "1 answer" if len(answers) == 1 else f"{len(answers)} answers"
    return f"{number}, {_tokens(sum(times.num_tokens for times in answers))}{rate}{average}"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"
