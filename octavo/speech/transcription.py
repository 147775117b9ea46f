"""The loop of a transcription, without a model: what to hear, what to ask, what the answers mean.

It is that of Whisper (Radford et al. 2022, section 4.5): a window of 30 s is answered with texts between times, and the
next window begins after the last text that ended within it. An answer that looks wrong is drawn again at a higher
temperature.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.speech.log_mel import SAMPLE_RATE
from octavo.speech.segments import Segment, Transcription, as_segments, compression_ratio, cut_answer, text_ids
from octavo.speech.speech_tokens import TIME_STEP, SpeechTokens
from octavo.speech.transcription_params import TranscriptionParams
from octavo.speech.word_times import add_words

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
