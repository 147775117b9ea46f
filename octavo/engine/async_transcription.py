"""A transcription for a program with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from octavo.core.encoder_input import EncoderInput
from octavo.core.prompts import Prompt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.core.threads import finish_in_thread
from octavo.engine.front_end import FrontEnd
from octavo.engine.request_stream import RequestStream
from octavo.engine.speech_requests import with_arrival
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, OpenedAudio, open_audio
from octavo.speech.audio_reader import SandboxRecording
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
    """One recording. Inputs are named in threads, and files decoded there or in the sandbox."""

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
        self, audio: Audio | OpenedAudio | SandboxRecording, limits: AudioLimits | None
    ) -> AsyncGenerator[Segment | Transcription]:
        """See ``AsyncLLM.transcribe``."""
        reply: Any = None
        ask = self._loop.send(None)  # what the model cannot do is refused before anything is read
        if isinstance(audio, SandboxRecording | OpenedAudio):
            opened = audio
        else:
            opened = await finish_in_thread(open_audio, audio, limits or DEFAULT_LIMITS)
        windows = AudioWindows()
        heard: EncoderInput | None = None
        try:
            source = opened.pieces() if isinstance(opened, SandboxRecording) else _pieces_in_threads(opened)
            async with contextlib.aclosing(source) as pieces:
                while True:
                    if isinstance(ask, Listen):
                        reply, heard = await self._listen(pieces, windows, ask.start)
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
                cast("OpenedAudio", opened).close()

    async def _listen(
        self, pieces: AsyncGenerator[NDArray[np.float32]], windows: AudioWindows, start: int
    ) -> tuple[Heard, EncoderInput | None]:
        while windows.missing(start) and (piece := await anext(pieces, None)) is not None:
            windows.add(start, piece)
        window = windows.window(start)
        return await asyncio.to_thread(lambda: (Heard.of(window), self._speech.hear(window) if len(window) else None))

    async def _ask(self, ask: Ask, heard: EncoderInput) -> Any:
        request = self._speech.request(ask, heard, self._options)
        name = f"{self._request_id}-{self._count}"
        self._count += 1
        stream = await self._engine.submit(name, request.prompt, request.params, request.options, streaming=False)
        with contextlib.closing(stream):
            return self._speech.answer(ask, await anext(stream))


async def _pieces_in_threads(opened: OpenedAudio) -> AsyncGenerator[NDArray[np.float32]]:
    """The pieces of a recording that this process decodes; no thread reads on when this is closed or cancelled."""
    pieces = opened.pieces()
    while (piece := await finish_in_thread(next, pieces, None)) is not None:
        yield piece
