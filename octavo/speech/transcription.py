"""The loop of a transcription, without a model: which windows to hear, which questions to ask, what answers mean.

It is Whisper's (Radford et al. 2022, section 4.5): each window of 30 s is answered with texts between timestamps, and
the next window starts after the last text that ended within it. An answer that fails a threshold is sampled again at a
higher temperature. ``transcribe`` is the entry point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import check_number
from octavo.speech.log_mel import SAMPLE_RATE
from octavo.speech.segments import (
    LANGUAGES,
    TIME_STEP,
    Segment,
    SpeechTokens,
    Transcription,
    add_words,
    as_segments,
    compression_ratio,
    cut_answer,
    text_ids,
)

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
#: Tried in order while an answer fails a threshold.
DEFAULT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_TEMPERATURES = 16
_MAX_TEXT = 10_000


class TranscriptionParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Parameters of one recording; names are Whisper's. Raises InvalidRequestError for invalid values.

    >>> TranscriptionParams(language="en", word_timestamps=True)
    """

    #: Code or name of the spoken language. None: detected in the first 30 s.
    language: str | None = None
    #: "transcribe": text in the spoken language; "translate": English text (multilingual models).
    task: Task = "transcribe"
    #: Text before the recording, to set style and spelling.
    prompt: str | None = None
    #: Words that may occur; placed before the context of each window.
    hotwords: str | None = None
    #: One, or several to try in order while an answer fails a threshold. None: 0, 0.2, ... 1.
    temperature: float | tuple[float, ...] | None = None
    #: Maximum compression ratio of an answer's text by zlib: above it, the text repeats itself. None: no limit.
    compression_ratio_threshold: float | None = 2.4
    #: Minimum mean logprob of an answer's tokens. None: no limit.
    logprob_threshold: float | None = -1.0
    #: A window with a higher probability of silence, and an answer below ``logprob_threshold``, has no text. None: off.
    no_speech_threshold: float | None = 0.6
    #: Whether each window gets the text of earlier ones as context, unless that was sampled at a high temperature.
    condition_on_previous_text: bool = True
    #: Whether each word gets times, too.
    word_timestamps: bool = False
    #: Whether answers have timestamps. Without, a window is one segment, and the next one starts at its end.
    timestamps: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidRequestError("must be 'transcribe' or 'translate'", path="task", got=self.task)
        for name in ("language", "prompt", "hotwords"):
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, str):
                    raise InvalidRequestError("must be text", path=name, got=value)
                if len(value) > _MAX_TEXT:
                    raise InvalidRequestError(f"may have at most {_MAX_TEXT} characters, not {len(value)}", path=name)
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, -math.inf, math.inf)
        if not 1 <= len(self.temperatures) <= _MAX_TEMPERATURES:
            count = len(self.temperatures)
            raise InvalidRequestError(f"must be 1 to {_MAX_TEMPERATURES} numbers, not {count}", path="temperature")
        for value in self.temperatures:
            check_number("temperature", value, 0.0, 2.0)
        for name in ("condition_on_previous_text", "word_timestamps", "timestamps"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError("must be True or False", path=name, got=getattr(self, name))
        if self.word_timestamps and not self.timestamps:
            raise InvalidRequestError("needs timestamps=True", path="word_timestamps")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequestError("must be an integer", path="seed", got=self.seed)

    @property
    def temperatures(self) -> tuple[float, ...]:
        if self.temperature is None:
            return DEFAULT_TEMPERATURES
        return tuple(self.temperature) if isinstance(self.temperature, list | tuple) else (self.temperature,)


#: Samples of a time step.
_STEP = round(TIME_STEP * SAMPLE_RATE)
#: Samples below one step of 16 bits are silence.
_LEAST_PEAK = 2.0**-15
#: Text sampled at a higher temperature is no context of the next window.
_MOST_TEMPERATURE = 0.5


class Codec(Protocol):
    """Encodes and decodes text without special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


# Questions of the loop, and their answers.


@dataclass(frozen=True)
class Listen:
    """Asks for the window that starts at this sample; the answer is a ``Heard``."""

    start: int


@dataclass(frozen=True)
class Heard:
    #: Number of samples: 30 s at most, 0 after the end.
    samples: int
    #: Largest absolute value.
    peak: float

    @classmethod
    def of(cls, window: NDArray[np.float32]) -> Heard:
        """``window``: float32 [n]."""
        return cls(len(window), float(np.abs(window).max(initial=0.0)))


@dataclass(frozen=True)
class Language:
    """Asks for the most likely of these tokens after the start token; the answer is a token."""

    tokens: list[int]


@dataclass(frozen=True)
class Silence:
    """Asks for the probability of the no-speech token after the start token; the answer is a float."""


@dataclass(frozen=True)
class Decode:
    """Asks for the model's text of the window; the answer is an ``Answer``."""

    prompt: list[int]
    temperature: float
    max_tokens: int
    has_times: bool
    seed: int


@dataclass(frozen=True)
class Answer:
    #: Without the end token.
    tokens: list[int]
    #: Sum of the logprobs of these tokens and of the end token.
    logprob: float


@dataclass(frozen=True)
class Align:
    """Asks for cross attention, float32 [heads, tokens, steps], and probabilities, float32 [tokens], of tokens."""

    prompt: list[int]
    tokens: list[int]


Ask = Listen | Language | Silence | Decode | Align | Segment
#: Answers are sent into the generator (None for a segment); it returns the transcription.
Loop = Generator[Ask, Any, Transcription]


@dataclass
class _Scored:
    tokens: list[int]
    temperature: float
    mean: float
    ratio: float
    no_speech: float | None = None


@dataclass
class _State:
    """What one window passes on to the next."""

    language: str
    #: Text tokens so far, from the prompt's on, and how many of them are no context of the next window.
    tokens: list[int]
    forgotten: int = 0
    segments: list[Segment] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


def transcribe(params: TranscriptionParams, special: SpeechTokens, codec: Codec, *, scores: bool = False) -> Loop:
    """Asks questions, yields final segments, and returns the transcription; ``scores``: always asks for ``Silence``.

    Raises InvalidRequestError if the model lacks the language, or cannot translate.
    """
    return _Transcriber(params, special, codec, scores).run()


class _Transcriber:
    def __init__(self, params: TranscriptionParams, special: SpeechTokens, codec: Codec, scores: bool) -> None:
        self._params, self._special, self._codec, self._scores = params, special, codec, scores
        self._most_previous = special.context // 2 - 1
        self._hotwords = self._context(params.hotwords)[: self._most_previous]

    def _context(self, text: str | None) -> list[int]:
        """Tokens of a text before the recording, without special tokens that it spells out."""
        if not text or not text.strip():
            return []
        return text_ids(self._codec.encode(" " + text.strip()), self._special)

    def run(self) -> Loop:
        params, special = self._params, self._special
        language = special.check_language(params.language) if params.language else ""
        special.check_task(params.task)
        state = _State(language or ("" if special.languages else "en"), self._context(params.prompt))
        position = duration = 0
        while True:
            heard: Heard = yield Listen(position)
            if not (samples := heard.samples):
                break
            duration = position + samples
            if heard.peak < _LEAST_PEAK:  # models hallucinate words in silence
                position += samples
                continue
            if not state.language:
                state.prompt_tokens += 1
                likeliest: int = yield Language(list(special.languages.values()))
                state.language = next(code for code, token in special.languages.items() if token == likeliest)
            position += yield from self._window(state, position, samples)
        text, seconds = "".join(segment.text for segment in state.segments).lstrip(), duration / SAMPLE_RATE
        counts = state.prompt_tokens, state.completion_tokens
        return Transcription(text, state.language or "en", seconds, state.segments, params.task, *counts)

    def _window(self, state: _State, start: int, samples: int) -> Generator[Ask, Any, int]:
        """Transcribes a window; returns the samples after which the next one starts."""
        params, special = self._params, self._special
        best = yield from self._decoded(state, start)
        if self._is_silent(best):
            return samples
        steps = -(-samples // _STEP)
        spans, next_step = cut_answer(best.tokens, steps, special)
        if not params.timestamps:
            next_step = steps
        offset = start / SAMPLE_RATE
        facts = start * 100 // SAMPLE_RATE, best.temperature, best.mean, best.ratio, best.no_speech
        parts = as_segments(spans, offset, self._codec.decode, special)
        made = [Segment(len(state.segments) + i, *part, *facts) for i, part in enumerate(parts)]  # type: ignore[arg-type]
        if params.word_timestamps and made:
            made, next_step = yield from self._with_words(state, made, offset, steps, next_step)
        for segment in made:
            state.segments.append(segment)
            state.tokens += segment.tokens
            yield segment
        if not params.condition_on_previous_text or best.temperature > _MOST_TEMPERATURE:
            state.forgotten = len(state.tokens)
        return min(samples, next_step * _STEP)

    def _with_words(
        self, state: _State, made: list[Segment], offset: float, steps: int, next_step: int
    ) -> Generator[Ask, Any, tuple[list[Segment], int]]:
        """The segments with their words; the next window starts no later than after the last word."""
        special = self._special
        tokens = [token for segment in made for token in text_ids(segment.tokens, special)]
        prompt = special.prompt(state.language, self._params.task, has_times=False)
        answer: tuple[NDArray[np.float32], NDArray[np.float32]] = yield Align(prompt, [*tokens, special.end])
        state.prompt_tokens += len(prompt) + len(tokens)
        weights, probabilities = answer
        made = add_words(
            made, weights[:, :, :steps], probabilities, offset, special, self._codec.decode, state.language
        )
        words = [word for segment in made for word in segment.words or ()]
        if words and next_step < steps:
            # At least a second: words that all seem to be at its start would make endless windows.
            least = min(next_step, round(1 / TIME_STEP))
            next_step = max(least, min(next_step, round((words[-1].end - offset) / TIME_STEP)))
        return made, next_step

    def _decoded(self, state: _State, start: int) -> Generator[Ask, Any, _Scored]:
        """The first answer that passes the thresholds, else the most likely of all."""
        params = self._params
        tried: list[_Scored] = []
        silence: float | None = None
        for number, temperature in enumerate(params.temperatures):
            prompt = self._prompt(state, temperature)
            limit = min(self._special.most_tokens, self._special.context - len(prompt))
            seed = params.seed + start + number
            answer: Answer = yield Decode(prompt, temperature, limit, params.timestamps, seed)
            state.prompt_tokens += len(prompt)
            state.completion_tokens += len(answer.tokens)
            text = self._codec.decode(text_ids(answer.tokens, self._special)).strip()
            mean = answer.logprob / (len(answer.tokens) + 1)
            scored = _Scored(answer.tokens, temperature, mean, compression_ratio(text))
            tried.append(scored)
            unlikely = params.logprob_threshold is None or self._is_unlikely(scored)
            if silence is None and (self._scores or (params.no_speech_threshold is not None and unlikely)):
                silence = yield Silence()
                state.prompt_tokens += 1
            scored.no_speech = silence
            if not (self._repeats(scored) or self._is_unlikely(scored)) or self._is_silent(scored):
                return scored
        sane = [scored for scored in tried if not self._repeats(scored)]
        return max(sane or tried, key=lambda scored: scored.mean)

    def _prompt(self, state: _State, temperature: float) -> list[int]:
        special, previous = self._special, state.tokens[state.forgotten :][-self._most_previous :]
        end = special.prompt(state.language, self._params.task, has_times=self._params.timestamps)
        room = special.context - special.most_tokens - len(end) - 1
        before = [*self._hotwords, *previous]
        return [special.previous, *before[-room:], *end] if before else end

    def _repeats(self, scored: _Scored) -> bool:
        limit = self._params.compression_ratio_threshold
        return limit is not None and scored.ratio > limit

    def _is_unlikely(self, scored: _Scored) -> bool:
        limit = self._params.logprob_threshold
        return limit is not None and scored.mean < limit

    def _is_silent(self, scored: _Scored) -> bool:
        """Whether the window has no speech: silence is likely, and the answer is not."""
        limit = self._params.no_speech_threshold
        if limit is None or scored.no_speech is None or scored.no_speech <= limit:
            return False
        return self._params.logprob_threshold is None or self._is_unlikely(scored)


# Formats of the OpenAI API: text, subtitles and JSON.


def as_text(made: Transcription) -> str:
    return made.text + "\n"


def as_srt(made: Transcription) -> str:
    return "\n".join(f"{number}\n{cue}" for number, cue in enumerate(_cues(made, ","), 1))


def as_vtt(made: Transcription) -> str:
    return "\n".join(["WEBVTT\n", *_cues(made, ".")])


def _cues(made: Transcription, point: str) -> list[str]:
    texts = (segment.text.strip().replace("-->", "->") for segment in made.segments)  # an arrow would separate times
    times = (f"{clock(segment.start, point)} --> {clock(segment.end, point)}" for segment in made.segments)
    return [f"{time}\n{text}\n" for time, text in zip(times, texts, strict=True)]


def clock(seconds: float, point: str) -> str:
    rest, thousandths = divmod(max(0, round(seconds * 1000)), 1000)
    minutes, rest = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{point}{thousandths:03}"


def usage(made: Transcription) -> dict[str, Any]:
    """Usage by the recording's seconds, as the API bills this kind of model."""
    return {"type": "duration", "seconds": round(made.duration)}


def json_object(made: Transcription) -> dict[str, Any]:
    return {"text": made.text, "usage": usage(made)}


def verbose_object(made: Transcription, granularities: Iterable[str] = ("segment",)) -> dict[str, Any]:
    """``response_format`` "verbose_json"; ``granularities``: "segment", "word" or both."""
    parts = set(granularities)
    language = LANGUAGES.get(made.language, made.language)
    answer: dict[str, Any] = {"task": made.task, "language": language}
    answer |= {"duration": round(made.duration, 2), "text": made.text}
    if "word" in parts:
        answer["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end}
            for segment in made.segments
            for word in segment.words or ()
        ]
    if "segment" in parts:
        answer["segments"] = [segment_object(segment) for segment in made.segments]
    return answer | {"usage": usage(made)}


def segment_object(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id, "seek": segment.seek, "start": round(segment.start, 2), "end": round(segment.end, 2),
        "text": segment.text, "tokens": segment.tokens,
        "temperature": segment.temperature, "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio, "no_speech_prob": segment.no_speech_prob or 0.0,
    }  # fmt: skip


def _verbose_json(made: Transcription) -> str:
    parts = ("segment", "word") if any(segment.words is not None for segment in made.segments) else ("segment",)
    return json.dumps(verbose_object(made, parts), ensure_ascii=False, indent=2) + "\n"


#: By the name of ``response_format``.
FORMATS: dict[str, Callable[[Transcription], str]] = {
    "json": lambda made: json.dumps(json_object(made), ensure_ascii=False) + "\n",
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "verbose_json": _verbose_json,
}
