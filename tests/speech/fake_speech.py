"""A model of words that are said at known times, for the loop of a transcription."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.speech.log_mel import SAMPLE_RATE, WINDOW_SAMPLES
from octavo.speech.segments import Segment, SpeechTokens, Transcription
from octavo.speech.transcription import Align, Answer, Ask, Codec, Decode, Heard, Language, Listen, Loop, Silence

#: Ids below are those of letters.
KNOWN = SpeechTokens(
    end=300, start=301, translate=310, transcribe=311, previous=312, no_speech=313, no_times=314, context=448
)
MULTILINGUAL = SpeechTokens(
    end=300, start=301, translate=310, transcribe=311, previous=312, no_speech=313, no_times=314, context=448,
    languages={"en": 302, "de": 303, "ja": 304},
)  # fmt: skip
TIME = KNOWN.first_time


class Letters:
    """A token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


CODEC: Codec = Letters()


def said(text: str, start: float, end: float) -> list[int]:
    """The tokens of a text between times in a window."""
    return [TIME + round(start * 50), *CODEC.encode(text), TIME + round(end * 50)]


@dataclass
class FakeModel:
    """Answers what it is asked."""

    #: Seconds.
    duration: float
    #: Answer to a window that begins at these seconds, at a temperature.
    answer: Callable[[float, float], Answer]
    no_speech: float = 0.0
    language: int = 302
    #: Seconds at which windows without a signal begin.
    nothing: tuple[float, ...] = ()
    asked: list[Ask] = field(default_factory=list)
    start: int = 0

    def reply(self, ask: Ask) -> Any:
        self.asked.append(ask)
        if isinstance(ask, Listen):
            self.start = ask.start
            samples = max(0, min(WINDOW_SAMPLES, round(self.duration * SAMPLE_RATE) - ask.start))
            return Heard(samples, 0.0 if ask.start / SAMPLE_RATE in self.nothing else 0.5)
        if isinstance(ask, Decode):
            return self.answer(self.start / SAMPLE_RATE, ask.temperature)
        if isinstance(ask, Language):
            return self.language
        if isinstance(ask, Silence):
            return self.no_speech
        if isinstance(ask, Align):
            weights = np.full((2, len(ask.tokens), 1500), 1e-4, np.float32)
            for i in range(len(ask.tokens)):
                weights[:, i, 10 * i : 10 * i + 10] = 1.0
            return weights, np.full(len(ask.tokens), 0.5, np.float32)
        return None

    def run(self, loop: Loop) -> tuple[Transcription, list[Segment]]:
        """The loop's result, and the segments that it gave."""
        segments: list[Segment] = []
        reply: Any = None
        while True:
            try:
                ask = loop.send(reply)
            except StopIteration as end:
                return end.value, segments
            if isinstance(ask, Segment):
                segments.append(ask)
            reply = self.reply(ask)

    @property
    def decodes(self) -> list[Decode]:
        return [ask for ask in self.asked if isinstance(ask, Decode)]

    @property
    def windows(self) -> list[float]:
        """Seconds at which windows began."""
        return [ask.start / SAMPLE_RATE for ask in self.asked if isinstance(ask, Listen)]
