"""The loop of a transcription, without a model: what to hear, what to ask, what the answers mean.

It is that of Whisper (Radford et al. 2022, section 4.5): a window of 30 s is answered with texts between times, and the
next window begins after the last text that ended within it. An answer that looks wrong is drawn again at a higher
temperature.
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
from octavo.speech.log_mel import SAMPLE_RATE
from octavo.speech.segments import (
    LANGUAGES,
    TIME_STEP,
    Segment,
    SpeechTokens,
    Transcription,
    Word,
    add_words,
    as_segments,
    compression_ratio,
    cut_answer,
    text_ids,
)

# What a caller may say of a transcription.

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
#: Tried one after the other where an answer looks wrong (Radford et al. 2022, section 4.5).
DEFAULT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_TEMPERATURES = 16
_MAX_TEXT = 10_000


class TranscriptionParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Parameters of one recording, with the names that users of Whisper know.

    >>> TranscriptionParams(language="en", word_timestamps=True)

    Raises:
        InvalidRequestError: a value is out of range or of the wrong type.
    """

    #: Code or name of the language that is spoken. None: it is detected in the first 30 s.
    language: str | None = None
    #: "transcribe": text in the language that is spoken; "translate": in English, of multilingual models.
    task: Task = "transcribe"
    #: Text before the recording, which sets its style and how names are written.
    prompt: str | None = None
    #: Words that may occur; they come before what precedes each window.
    hotwords: str | None = None
    #: One, or several, of which the next is taken where an answer fails a threshold. None: 0, 0.2, ... 1.
    temperature: float | tuple[float, ...] | None = None
    #: An answer whose text zlib makes smaller than by this factor is not one that repeats itself. None: no matter.
    compression_ratio_threshold: float | None = 2.4
    #: Least mean logprob of an answer's tokens. None: no matter.
    logprob_threshold: float | None = -1.0
    #: A window that is silent with more than this probability, and whose answer is below ``logprob_threshold``, has no
    #: text. None: no matter.
    no_speech_threshold: float | None = 0.6
    #: Whether the text of the windows before comes before each window, if it was not drawn at a high temperature.
    condition_on_previous_text: bool = True
    #: Whether each word has its times, too.
    word_timestamps: bool = False
    #: Whether answers have times at all. Without them a window is one segment, and the next begins where it ends.
    timestamps: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidRequestError(f"task must be 'transcribe' or 'translate', not {self.task!r}")
        for name in ("language", "prompt", "hotwords"):
            _check_text(name, getattr(self, name))
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if (value := getattr(self, name)) is not None:
                _check_number(name, value, -math.inf, math.inf)
        self._check_temperatures()
        for name in ("condition_on_previous_text", "word_timestamps", "timestamps"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.word_timestamps and not self.timestamps:
            raise InvalidRequestError("word_timestamps=True needs timestamps=True")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequestError(f"seed must be an integer, not {self.seed!r}")

    def _check_temperatures(self) -> None:
        given = self.temperature
        if given is None:
            return
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not 1 <= len(values) <= _MAX_TEMPERATURES:
            raise InvalidRequestError(f"temperature must be 1 to {_MAX_TEMPERATURES} numbers, not {len(values)}")
        for value in values:
            _check_number("temperature", value, 0.0, 2.0)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures to try, in order."""
        if self.temperature is None:
            return DEFAULT_TEMPERATURES
        return tuple(self.temperature) if isinstance(self.temperature, list | tuple) else (self.temperature,)


def _check_text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, not {value!r}")
    if value is not None and len(value) > _MAX_TEXT:
        raise InvalidRequestError(f"{name} may have at most {_MAX_TEXT} characters, not {len(value)}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], not {value}")


#: Samples of a step of time.
_STEP = round(TIME_STEP * SAMPLE_RATE)
#: Below a step of 16 bits there is no signal.
_LEAST_PEAK = 2.0**-15
#: A text drawn at a higher temperature is not what the next window goes on from.
_MOST_TEMPERATURE = 0.5


class Codec(Protocol):
    """Of texts without special tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True)
class Listen:
    """Asks for the window that begins at this sample: a ``Heard``."""

    start: int


@dataclass(frozen=True)
class Heard:
    """What there is of a window."""

    #: At most 30 s; 0 after the end.
    samples: int
    #: The largest of them, whatever its sign.
    peak: float

    @classmethod
    def of(cls, window: NDArray[np.float32]) -> Heard:
        """Of samples, float32 [n]."""
        return cls(len(window), float(np.abs(window).max(initial=0.0)))


@dataclass(frozen=True)
class Language:
    """Asks which of these tokens is the likeliest after the start token: a token."""

    tokens: list[int]


@dataclass(frozen=True)
class Silence:
    """Asks for the probability of the token that says that nothing is said, after the start token: a float."""


@dataclass(frozen=True)
class Decode:
    """Asks for an answer to the window: an ``Answer``."""

    prompt: list[int]
    temperature: float
    max_tokens: int
    has_times: bool
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    #: Without the token that ends it.
    tokens: list[int]
    #: Sum of the logprobs of these tokens, and of the one that ends it.
    logprob: float


@dataclass(frozen=True)
class Align:
    """Asks how the attention of each of these tokens lies over the window: float32 [heads, tokens, steps], see
    ``word_times``, and each token's probability, [tokens].
    """

    prompt: list[int]
    tokens: list[int]


Ask = Listen | Language | Silence | Decode | Align | Segment
#: Answers are sent: see each; None for a segment, which asks nothing.
Loop = Generator[Ask, Any, Transcription]


@dataclass
class _Scored:
    """An answer, and how good it looks."""

    tokens: list[int]
    temperature: float
    mean: float
    ratio: float
    no_speech: float | None = None


@dataclass
class _State:
    """What windows carry to the next."""

    language: str
    #: Text tokens so far, those of the prompt first, and how many of them are not carried on.
    tokens: list[int]
    forgotten: int = 0
    segments: list[Segment] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


def transcribe(params: TranscriptionParams, known: SpeechTokens, codec: Codec, *, scores: bool = False) -> Loop:
    """Asks for what it needs, yields segments as they are certain, and returns all of it.

    ``scores``: whether each segment has the probability that its window is silent, even if nothing depends on it.

    Raises:
        InvalidRequestError: the model does not know the language, or cannot translate.
    """
    return _Transcriber(params, known, codec, scores).run()


class _Transcriber:
    def __init__(self, params: TranscriptionParams, known: SpeechTokens, codec: Codec, scores: bool) -> None:
        self._params, self._known, self._codec, self._scores = params, known, codec, scores
        self._most_previous = known.context // 2 - 1
        self._hotwords = self._context(params.hotwords)[: self._most_previous]

    def _context(self, text: str | None) -> list[int]:
        """Tokens of a text that comes before."""
        if not text or not text.strip():
            return []
        # Special tokens that are written out in it are left out.
        return text_ids(self._codec.encode(" " + text.strip()), self._known)

    def run(self) -> Loop:
        params, known = self._params, self._known
        language = known.check_language(params.language) if params.language else ""
        known.check_task(params.task)
        state = _State(language or ("" if known.languages else "en"), self._context(params.prompt))
        position = duration = 0
        while True:
            heard: Heard = yield Listen(position)
            if not (samples := heard.samples):
                break
            duration = position + samples
            if heard.peak < _LEAST_PEAK:  # models make words of it
                position += samples
                continue
            if not state.language:
                state.language = yield from self._detect(state)
            position += yield from self._window(state, position, samples)
        text = "".join(segment.text for segment in state.segments).lstrip()
        return Transcription(
            text,
            state.language or "en",
            duration / SAMPLE_RATE,
            state.segments,
            params.task,
            state.prompt_tokens,
            state.completion_tokens,
        )

    def _detect(self, state: _State) -> Generator[Ask, Any, str]:
        """The language of the window."""
        known = self._known
        state.prompt_tokens += 1
        found: int = yield Language(list(known.languages.values()))
        return next(code for code, token in known.languages.items() if token == found)

    def _window(self, state: _State, start: int, samples: int) -> Generator[Ask, Any, int]:
        """Transcribes a window; returns the samples after which the next one begins."""
        params, known = self._params, self._known
        best = yield from self._decoded(state, start)
        if self._is_silent(best):
            return samples
        steps = -(-samples // _STEP)
        spans, next_step = cut_answer(best.tokens, steps, known)
        if not params.timestamps:
            next_step = steps
        offset = start / SAMPLE_RATE
        facts = {
            "seek": start * 100 // SAMPLE_RATE,
            "temperature": best.temperature,
            "avg_logprob": best.mean,
            "compression_ratio": best.ratio,
            "no_speech_prob": best.no_speech,
        }
        parts = as_segments(spans, offset, self._codec.decode, known)
        made = [Segment(len(state.segments) + i, *part, **facts) for i, part in enumerate(parts)]  # type: ignore[arg-type]
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
        """The segments with their words; the next window begins no later than after the last of them."""
        known = self._known
        tokens = [token for segment in made for token in text_ids(segment.tokens, known)]
        prompt = known.prompt(state.language, self._params.task, has_times=False)
        answer: tuple[NDArray[np.float32], NDArray[np.float32]] = yield Align(prompt, [*tokens, known.end])
        state.prompt_tokens += len(prompt) + len(tokens)
        weights, probabilities = answer
        made = add_words(made, weights[:, :, :steps], probabilities, offset, known, self._codec.decode, state.language)
        words = [word for segment in made for word in segment.words or ()]
        if words and next_step < steps:
            # Not by less than a second: words that all seem to be at its beginning would make endless windows.
            least = min(next_step, round(1 / TIME_STEP))
            next_step = max(least, min(next_step, round((words[-1].end - offset) / TIME_STEP)))
        return made, next_step

    def _decoded(self, state: _State, start: int) -> Generator[Ask, Any, _Scored]:
        """The answer to a window at the first temperature at which it looks right, else the best of all."""
        params = self._params
        tried: list[_Scored] = []
        silence: float | None = None
        for number, temperature in enumerate(params.temperatures):
            prompt = self._prompt(state, temperature)
            limit = min(self._known.most_tokens, self._known.context - len(prompt))
            seed = params.seed + start + number
            answer: Answer = yield Decode(prompt, temperature, limit, params.timestamps, seed)
            state.prompt_tokens += len(prompt)
            state.completion_tokens += len(answer.tokens)
            text = self._codec.decode(text_ids(answer.tokens, self._known)).strip()
            mean = answer.logprob / (len(answer.tokens) + 1)
            scored = _Scored(answer.tokens, temperature, mean, compression_ratio(text))
            tried.append(scored)
            if silence is None and self._asks_for_silence(scored):
                silence = yield Silence()
                state.prompt_tokens += 1
            scored.no_speech = silence
            if self._looks_right(scored) or self._is_silent(scored):
                return scored
        sane = [scored for scored in tried if not self._repeats(scored)]
        return max(sane or tried, key=lambda scored: scored.mean)

    def _prompt(self, state: _State, temperature: float) -> list[int]:
        known, previous = self._known, state.tokens[state.forgotten :][-self._most_previous :]
        end = known.prompt(state.language, self._params.task, has_times=self._params.timestamps)
        room = known.context - known.most_tokens - len(end) - 1
        before = [*self._hotwords, *previous]
        return [known.previous, *before[-room:], *end] if before else end

    def _repeats(self, scored: _Scored) -> bool:
        limit = self._params.compression_ratio_threshold
        return limit is not None and scored.ratio > limit

    def _is_unlikely(self, scored: _Scored) -> bool:
        limit = self._params.logprob_threshold
        return limit is not None and scored.mean < limit

    def _looks_right(self, scored: _Scored) -> bool:
        return not self._repeats(scored) and not self._is_unlikely(scored)

    def _asks_for_silence(self, scored: _Scored) -> bool:
        if self._scores:
            return True
        params = self._params
        matters = params.logprob_threshold is None or self._is_unlikely(scored)
        return params.no_speech_threshold is not None and matters

    def _is_silent(self, scored: _Scored) -> bool:
        """Whether the window has no speech: it is likely, and the answer is not."""
        limit = self._params.no_speech_threshold
        if limit is None or scored.no_speech is None or scored.no_speech <= limit:
            return False
        return self._params.logprob_threshold is None or self._is_unlikely(scored)


# Transcriptions as text, subtitles and JSON, as the OpenAI API has them.


def as_text(made: Transcription) -> str:
    """The text, and a line's end."""
    return made.text + "\n"


def as_srt(made: Transcription) -> str:
    """SubRip subtitles: a number, times with a comma, text."""
    blocks = [
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{_line(segment)}\n"
        for number, segment in enumerate(made.segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(made: Transcription) -> str:
    """WebVTT subtitles."""
    blocks = [
        f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{_line(segment)}\n" for segment in made.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _line(segment: Segment) -> str:
    """The text of a cue: an arrow in it would be taken for that of its times."""
    return segment.text.strip().replace("-->", "->")


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and thousandths, as in 01:02:03.456."""
    thousandths = max(0, round(seconds * 1000))
    rest, thousandths = divmod(thousandths, 1000)
    minutes, rest = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{point}{thousandths:03}"


def usage(made: Transcription) -> dict[str, Any]:
    """What was computed, by the seconds of the recording, as the API bills it for this kind of model."""
    return {"type": "duration", "seconds": round(made.duration)}


def json_object(made: Transcription) -> dict[str, Any]:
    """The answer of ``response_format`` "json"."""
    return {"text": made.text, "usage": usage(made)}


def verbose_object(made: Transcription, granularities: Iterable[str] = ("segment",)) -> dict[str, Any]:
    """The answer of ``response_format`` "verbose_json"; ``granularities``: "segment", "word" or both."""
    parts = set(granularities)
    answer: dict[str, Any] = {
        "task": made.task,
        "language": LANGUAGES.get(made.language, made.language),
        "duration": round(made.duration, 2),
        "text": made.text,
    }
    if "word" in parts:
        answer["words"] = [_word(word) for segment in made.segments for word in segment.words or ()]
    if "segment" in parts:
        answer["segments"] = [segment_object(segment) for segment in made.segments]
    return answer | {"usage": usage(made)}


def segment_object(segment: Segment) -> dict[str, Any]:
    """A segment as JSON."""
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob or 0.0,
    }


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.word.strip(), "start": word.start, "end": word.end}


def _as_json(made: Transcription) -> str:
    return json.dumps(json_object(made), ensure_ascii=False) + "\n"


def _as_verbose_json(made: Transcription) -> str:
    has_words = any(segment.words is not None for segment in made.segments)
    parts = ("segment", "word") if has_words else ("segment",)
    return json.dumps(verbose_object(made, parts), ensure_ascii=False, indent=2) + "\n"


#: By the name of ``response_format``.
FORMATS: dict[str, Callable[[Transcription], str]] = {
    "json": _as_json,
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "verbose_json": _as_verbose_json,
}
