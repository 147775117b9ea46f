"""Recordings for programs with an event loop: what a thread reads is not closed under it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.core.request import RequestOptions
from octavo.engine import transcription as async_transcription
from octavo.engine.transcription import AsyncTranscription
from octavo.speech.audio_files import OpenedAudio
from octavo.speech.transcription import TranscriptionParams, transcribe
from tests.busy_machine import PATIENCE
from tests.speech.fake_speech import CODEC, KNOWN


class SlowAudio(OpenedAudio):
    """Each piece takes until it is let go."""

    seconds = 60.0

    def __init__(self) -> None:
        self.reading, self.go = threading.Event(), threading.Event()
        self.in_use = False
        #: Whether it was in use when it was closed.
        self.closed: bool | None = None

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        while True:
            self.in_use = True
            self.reading.set()
            assert self.go.wait(PATIENCE)
            self.in_use = False
            yield np.zeros(160_000, np.float32)

    def close(self) -> None:
        self.closed = self.in_use


def hear(audio: Any) -> AsyncGenerator[Any]:
    """A transcription whose engine is not asked: nothing is said."""

    def loop(params: TranscriptionParams, scores: bool) -> Any:
        return transcribe(params, KNOWN, CODEC, scores=scores)

    speech = SimpleNamespace(loop=loop, hear=lambda window: None)
    engine: Any = SimpleNamespace(front_end=SimpleNamespace(speech=speech))
    return AsyncTranscription(engine, "a", None, RequestOptions(), scores=False).hear(audio, None)


@pytest.mark.parametrize("opens", [False, True])
def test_who_is_cancelled_closes_nothing_that_a_thread_reads(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    audio = SlowAudio()
    monkeypatch.setattr(async_transcription, "open_audio", lambda *_: audio)

    async def cancel() -> None:
        task = asyncio.create_task(anext(hear("a path" if opens else audio)))
        assert await asyncio.to_thread(audio.reading.wait, PATIENCE)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        assert audio.closed is None
        audio.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not audio.in_use
    assert audio.closed is (False if opens else None)  # whoever opens it closes it


def test_a_recording_that_is_opened_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    audio, opening = SlowAudio(), threading.Event()

    def open_slowly(*_: Any) -> SlowAudio:
        opening.set()
        assert audio.go.wait(PATIENCE)
        return audio

    monkeypatch.setattr(async_transcription, "open_audio", open_slowly)

    async def cancel() -> None:
        task = asyncio.create_task(anext(hear("a path")))
        assert await asyncio.to_thread(opening.wait, PATIENCE)
        task.cancel()
        audio.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert audio.closed is False
