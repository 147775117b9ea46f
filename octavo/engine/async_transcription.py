"""A transcription for a program with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.encoder_input import EncoderInput
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.front_end import FrontEnd
from octavo.engine.request_stream import RequestStream
from octavo.engine.speech_requests import with_arrival
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, OpenedAudio, open_audio
from octavo.speech.audio_windows import AudioWindows
from octavo.speech.segments import Segment, Transcription
from octavo.speech.transcription import Ask, Heard, Listen
from octavo.speech.transcription_params import TranscriptionParams


class Submits(Protocol):
    """What an engine does here."""

    front_end: FrontEnd

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = ...,
        *,
        streaming: bool = ...,
    ) -> RequestStream:
        """See ``AsyncEngine``."""
        ...


class AsyncTranscription:
    """One recording. Files are decoded and inputs named in threads."""

    def __init__(
        self,
        engine: Submits,
        request_id: str,
        params: TranscriptionParams | None,
        options: RequestOptions,
        scores: bool,
    ) -> None:
        """The engine is ready.

        Raises:
            InvalidRequestError: the model does not read sound.
        """
        self._engine, self._request_id = engine, request_id
        self._speech = engine.front_end.speech
        self._loop = self._speech.loop(params or TranscriptionParams(), scores=scores)
        self._options = with_arrival(options, time.monotonic())
        self._count = 0

    async def hear(
        self, audio: Audio | OpenedAudio, limits: AudioLimits | None
    ) -> AsyncGenerator[Segment | Transcription]:
        """See ``AsyncLLM.transcribe``."""
        reply: Any = None
        ask = self._loop.send(None)  # what the model cannot do is refused before anything is read
        if isinstance(audio, OpenedAudio):
            opened = audio
        else:
            opened = await asyncio.to_thread(open_audio, audio, limits or DEFAULT_LIMITS)
        windows = AudioWindows(opened.pieces())
        heard: EncoderInput | None = None
        try:
            while True:
                if isinstance(ask, Listen):
                    reply, heard = await asyncio.to_thread(self._listen, windows, ask.start)
                elif isinstance(ask, Segment):
                    yield ask
                    reply = None
                else:
                    assert heard is not None
                    reply = await self._ask(ask, heard)
                try:
                    ask = self._loop.send(reply)
                except StopIteration as end:
                    yield end.value
                    return
        finally:
            if opened is not audio:
                opened.close()

    def _listen(self, windows: AudioWindows, start: int) -> tuple[Heard, EncoderInput | None]:
        window: NDArray[np.float32] = windows.window(start)
        return Heard.of(window), self._speech.hear(window) if len(window) else None

    async def _ask(self, ask: Ask, heard: EncoderInput) -> Any:
        request = self._speech.request(ask, heard, self._options)
        name = f"{self._request_id}-{self._count}"
        self._count += 1
        stream = await self._engine.submit(name, request.prompt, request.params, request.options, streaming=False)
        with contextlib.closing(stream):
            return self._speech.answer(ask, await anext(stream))
