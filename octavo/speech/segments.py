"""Segments of a transcription: what was said from when to when."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from octavo.speech.speech_tokens import TIME_STEP, SpeechTokens

#: Steps of a second.
_LEAST_STEPS = round(1 / TIME_STEP)


@dataclass(frozen=True)
class Word:
    """A word; times are seconds from the recording's beginning."""

    word: str
    start: float
    end: float
    #: Of its tokens, the mean.
    probability: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A part of a recording; times are seconds from its beginning."""

    id: int
    start: float
    end: float
    text: str
    #: Those of its text and its times.
    tokens: list[int]
    #: Where the window begins that it is in, in hundredths of a second.
    seek: int = 0
    #: Of the answer to this window: what it was drawn at, mean logprob of its tokens, how much zlib shrinks its text,
    #: and the probability that the window is silent; None: it was not asked for.
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None
    words: list[Word] | None = None


@dataclass(frozen=True)
class Transcription:
    """What was said in a recording."""

    text: str
    #: Code.
    language: str
    #: Seconds.
    duration: float
    segments: list[Segment] = field(default_factory=list)
    task: str = "transcribe"
    #: Tokens computed: those before answers, and those of answers.
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Why there is no text, of one of several recordings that failed alone.
    error: str | None = None


@dataclass(frozen=True)
class Span:
    """The tokens of a segment, and its times in steps from its window's beginning."""

    start: int
    end: int
    tokens: list[int]


def cut_answer(tokens: Sequence[int], steps: int, known: SpeechTokens) -> tuple[list[Span], int]:
    """Cuts a window's answer at the pairs of times in it.

    Args:
        tokens: the answer, without the token that ends it.
        steps: length of the window in steps of time.
        known: the model's tokens.

    Returns:
        The parts, and the steps after which the next window begins: what follows the last pair is heard again, in
        whole, unless the answer ends with a single time, after which there is nothing. It is a second at least, so that
        no answer, whatever it says, makes a recording take more windows than it has seconds.
    """
    is_time = [token >= known.first_time for token in tokens]
    pairs = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    ends_alone = is_time[-2:] == [False, True]
    if not pairs:
        times = [token - known.first_time for token, time in zip(tokens, is_time, strict=True) if time]
        end = times[-1] if times and times[-1] > 0 else steps
        return [Span(0, end, list(tokens))], steps
    spans, first = [], 0
    for last in [*pairs, len(tokens)] if ends_alone else pairs:
        part = list(tokens[first:last])
        spans.append(Span(part[0] - known.first_time, part[-1] - known.first_time, part))
        first = last
    return spans, steps if ends_alone else max(_LEAST_STEPS, spans[-1].end)


def text_ids(tokens: Sequence[int], known: SpeechTokens) -> list[int]:
    """The tokens of text among these."""
    return [token for token in tokens if token < known.end]


def compression_ratio(text: str) -> float:
    """How many times as long a text is as zlib makes it: high where it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def as_segments(
    spans: Sequence[Span], offset: float, decode: Callable[[list[int]], str], known: SpeechTokens
) -> Iterator[tuple[float, float, str, list[int]]]:
    """(start, end, text, tokens) of the parts of a window that begins at ``offset`` seconds, without empty ones."""
    for span in spans:
        text = decode(text_ids(span.tokens, known)).rstrip()
        if span.start != span.end and text.strip():
            yield offset + span.start * TIME_STEP, offset + span.end * TIME_STEP, text, span.tokens
