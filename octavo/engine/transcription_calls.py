"""Transcriptions offline: the method of ``LLM``."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.core.encoder_input import EncoderInput
from octavo.core.errors import ConfigError, InvalidRequestError, OctavoError, WorkerError
from octavo.core.interrupts import HeldInterrupts
from octavo.core.outputs import RequestOutput
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions, check_request_keywords, options_for_each
from octavo.engine.front_end import FrontEnd
from octavo.engine.progress import Bar, make_bar
from octavo.engine.speech_requests import asks_engine, with_arrival
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, open_audio
from octavo.speech.audio_windows import AudioWindows
from octavo.speech.segments import Transcription
from octavo.speech.transcription import Ask, Heard, Listen, Loop
from octavo.speech.transcription_params import TranscriptionParams

#: Recordings that are open at once, for each sequence that can run: the next ones are read while these are computed.
_OPEN_PER_SEQUENCE = 2


@dataclass
class _Run:
    """A recording on its way."""

    number: int
    options: RequestOptions
    loop: Loop
    windows: AudioWindows
    seconds: float
    files: ExitStack = field(default_factory=ExitStack)
    #: Seconds that are done, and what the last answered question was.
    done: float = 0.0
    ask: Ask | None = None
    heard: EncoderInput | None = None
    pending: NDArray[np.float32] | None = None


class TranscriptionCalls(ABC):
    """What ``LLM`` does with recordings; the steps are the engine's."""

    front_end: FrontEnd
    #: Numbers in the names of its requests.
    _windows = itertools.count()

    @abstractmethod
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Any = None,
        options: RequestOptions = ...,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> None:
        """See ``LLMEngine``."""

    @abstractmethod
    def step(self) -> list[Any]:
        """See ``LLMEngine``."""

    @abstractmethod
    def abort_request(self, request_id: str) -> Any:
        """See ``LLMEngine``."""

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        params: TranscriptionParams | Sequence[TranscriptionParams] | None = None,
        *,
        use_tqdm: Bar = True,
        limits: AudioLimits = DEFAULT_LIMITS,
        on_end: Callable[[int, Transcription], object] | None = None,
        **keywords: Any,
    ) -> list[Transcription]:
        """What is said in recordings, one or many, of any length.

        >>> llm = LLM("whisper-tiny.en")
        >>> llm.transcribe("talk.mp3")[0].text

        Windows of a recording follow one another; those of many are computed together. Each has the priority and the
        arrival of the whole. A recording that cannot be read raises if it is alone; in a list it fails alone, and
        ``error`` says why.

        Args:
            audio: paths, bytes of files, opened files, or samples (float32 at 16 kHz, or with their rate); a list of
                them, or one.
            params: one for all, or one for each.
            use_tqdm: shows a progress bar of seconds of audio, or what makes one in place of ``tqdm.tqdm``.
            limits: what each may have at most.
            on_end: called with the number of a recording of a list, and what became of it, as soon as it has ended.
            keywords: see ``LLM``.

        Raises:
            InvalidRequestError: the model does not read sound or cannot do what the parameters ask; or, of a single
                recording, as ``Recording``.
        """
        check_request_keywords("transcribe", keywords)
        is_single = not isinstance(audio, list)
        many = [cast(Audio, audio)] if is_single else list(cast("Sequence[Audio]", audio))
        one = params or TranscriptionParams()
        each: list[Any] = [*one] if isinstance(one, list | tuple) else [one] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"params must be one, or one for each of {len(many)} recordings, not {len(each)}")
        now = time.monotonic()
        options = [with_arrival(options, now) for options in options_for_each("transcribe", keywords, len(many))]
        return _Batch(self, many, each, options, limits, None if is_single else on_end or _nothing).run(use_tqdm)


def _nothing(number: int, made: Transcription) -> None:
    """Of lists whose caller waits for all."""


class _Batch:
    """The recordings of one call."""

    def __init__(
        self,
        engine: TranscriptionCalls,
        audio: Sequence[Audio],
        params: Sequence[TranscriptionParams],
        options: Sequence[RequestOptions],
        limits: AudioLimits,
        on_end: Callable[[int, Transcription], object] | None,
    ) -> None:
        """``on_end``: None of a recording that is alone."""
        self._engine, self._speech = engine, engine.front_end.speech
        self._audio, self._params, self._options = audio, params, options
        self._limits, self._on_end = limits, on_end
        self._made: list[Transcription | None] = [None] * len(audio)
        self._active: dict[str, _Run] = {}
        for each in params:  # before anything is read
            next(self._speech.loop(each))

    def run(self, use_tqdm: Bar) -> list[Transcription]:
        """All of them, in their order."""
        most = _OPEN_PER_SEQUENCE * self._engine.front_end.files.options.max_num_seqs
        waiting = iter(range(len(self._audio)))
        with HeldInterrupts() as interrupts, make_bar(use_tqdm, desc="Audio", unit="s", total=None) as bar:
            self._bar = bar
            try:
                while True:
                    self._fill(waiting, most)
                    if not self._active:
                        break
                    interrupts.deliver()
                    for output in self._engine.step():
                        if output.request_id in self._active:
                            self._receive(output)
            finally:  # an interrupt leaves nothing behind
                for request_id, run in self._active.items():
                    self._engine.abort_request(request_id)
                    run.files.close()
        return cast("list[Transcription]", self._made)

    def _fill(self, waiting: Iterator[int], most: int) -> None:
        while len(self._active) < most and (number := next(waiting, None)) is not None:
            try:
                run = self._open(number)
            except OctavoError as e:
                self._fail(number, e)
                continue
            self._advance(run, None)

    def _open(self, number: int) -> _Run:
        params, files = self._params[number], ExitStack()
        recording = files.enter_context(open_audio(self._audio[number], self._limits))
        run = _Run(
            number,
            self._options[number],
            self._speech.loop(params),
            AudioWindows(recording.pieces()),
            recording.seconds,
            files,
        )
        self._bar.total = round((self._bar.total or 0) + recording.seconds, 1)
        return run

    def _receive(self, output: RequestOutput) -> None:
        run = self._active.pop(output.request_id)
        assert run.ask is not None
        try:
            answer = self._speech.answer(run.ask, output)
        except WorkerError as e:
            self._end(run)
            self._fail(run.number, e)
            return
        self._advance(run, answer)

    def _advance(self, run: _Run, answer: Any) -> None:
        """Goes on until the engine is asked, or all is said."""
        try:
            while True:
                ask = run.loop.send(answer)
                if asks_engine(ask):
                    self._submit(run, ask)
                    return
                answer = self._listen(run, ask) if isinstance(ask, Listen) else None
        except StopIteration as end:
            self._end(run)
            self._keep(run.number, end.value)
        except OctavoError as e:
            self._end(run)
            self._fail(run.number, e)

    def _listen(self, run: _Run, ask: Listen) -> Heard:
        window = run.windows.window(ask.start)
        run.heard, run.pending = None, window
        seconds = min(run.seconds, ask.start / 16_000)
        self._bar.update(round(seconds - run.done, 1))
        run.done = seconds
        return Heard.of(window)

    def _submit(self, run: _Run, ask: Ask) -> None:
        if run.heard is None:
            assert run.pending is not None
            run.heard = self._speech.hear(run.pending)
        request, request_id = self._speech.request(ask, run.heard, run.options), f"audio-{next(self._engine._windows)}"
        self._engine.add_request(request_id, request.prompt, request.params, request.options, streaming=False)
        run.ask = ask
        self._active[request_id] = run

    def _end(self, run: _Run) -> None:
        run.files.close()
        self._bar.update(round(run.seconds - run.done, 1))

    def _fail(self, number: int, error: OctavoError) -> None:
        if self._on_end is None or isinstance(error, ConfigError):
            raise error
        self._keep(number, Transcription("", "", 0.0, error=str(error)))

    def _keep(self, number: int, made: Transcription) -> None:
        self._made[number] = made
        if self._on_end is not None:
            self._on_end(number, made)
