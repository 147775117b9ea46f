"""Recordings are decoded in the sandbox, with the bits and the errors of a decoder in this process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ClientLimitError, ConfigError
from octavo.process.children import Failure
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer
from octavo.speech import audio_reader
from octavo.speech.audio_files import AudioLimits, Recording
from octavo.speech.audio_reader import AudioReader, SandboxRecording
from tests.busy_machine import eventually
from tests.speech.test_audio_files import encoded, noise, tone

FORMATS = [("WAV", "PCM_16"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    yield Sandbox()


def sound(rate: int, seconds: float, channels: int = 1) -> NDArray[np.float32]:
    return tone(rate, channels, seconds) + 0.1 * noise(round(rate * seconds))


async def read(sandbox: Sandbox, data: bytes, **limits: float) -> NDArray[np.float32]:
    recording = await AudioReader(sandbox, AudioLimits(**limits)).open(data)  # type: ignore[arg-type]
    return np.concatenate([piece async for piece in recording.pieces()])


def read_here(data: bytes) -> NDArray[np.float32]:
    with Recording(data) as recording:
        return np.concatenate(list(recording.pieces()))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_long_recording_has_the_same_bits_as_here(sandbox: Sandbox, kind: tuple[str, str | None]) -> None:
    data = encoded(sound(48_000, 100.0, 2), 48_000, *kind)
    assert 2 * audio_reader._MOST_SAMPLES < 100 * 48_000  # it takes several calls
    assert np.array_equal(asyncio.run(read(sandbox, data)), read_here(data))


@pytest.mark.parametrize("kind", FORMATS)
def test_it_goes_on_with_the_same_bits_in_a_process_that_does_not_know_it(
    sandbox: Sandbox, kind: tuple[str, str | None]
) -> None:
    data = encoded(sound(48_000, 100.0), 48_000, *kind)

    async def read_and_kill() -> NDArray[np.float32]:
        recording, pieces = await AudioReader(sandbox).open(data), []
        async for piece in recording.pieces():
            pieces.append(piece)
            kill_processes()
        return np.concatenate(pieces)

    assert np.array_equal(asyncio.run(read_and_kill()), read_here(data))


def kill_processes() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie that nobody has waited for
            if "octavo.process.sandbox_process" in child.cmdline():
                child.send_signal(signal.SIGKILL)


def test_errors_name_the_recording(sandbox: Sandbox) -> None:
    reader = AudioReader(sandbox, AudioLimits(max_bytes=100_000, max_seconds=5))
    for data, problem in (
        (b"", "0 bytes"),
        (bytes(100_001), "at most 100000"),
        (b"a text\n" * 9, "a text file"),
        (encoded(tone(8_000, 1, 6.0), 8_000), "at most 5 s"),
        (encoded(tone(8_000), 8_000, "AIFF"), "AIFF"),
    ):
        with pytest.raises(AudioError, match=f"^talk 3 .*{problem}"):
            asyncio.run(reader.open(data, name="talk 3"))


def test_a_file_that_is_damaged_later_is_refused_there(sandbox: Sandbox) -> None:
    data = encoded(sound(48_000, 100.0), 48_000, "FLAC")
    with pytest.raises(AudioError, match=r"cut off|damaged"):
        asyncio.run(read(sandbox, data[: len(data) * 3 // 4]))


@pytest.mark.parametrize(
    ("failure", "problem"),
    [("time", "more than 30 seconds"), ("memory", "too much memory"), ("depth", "failed"), ("error", "KeyError")],
)
def test_what_the_sandbox_stops_is_an_error_about_the_recording(failure: str, problem: str) -> None:
    with pytest.raises(AudioError, match=f"^talk .*{problem}"):
        audio_reader._read("talk", SandboxAnswer(failure=failure, details="KeyError"))  # type: ignore[arg-type]


def test_a_recording_that_the_server_cannot_convert_is_refused_when_it_is_opened(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    asyncio.run(AudioReader(sandbox).open(encoded(tone(16_000), 16_000)))
    with pytest.raises(ConfigError, match="soxr"):
        asyncio.run(AudioReader(sandbox).open(encoded(tone(8_000), 8_000)))


def test_what_the_server_lacks_is_not_the_recordings_fault() -> None:
    answer = msgspec.msgpack.encode((None, Failure("ConfigError", "pip install it")))
    with pytest.raises(ConfigError, match="pip install it"):
        audio_reader._read("talk", SandboxAnswer(answer))


def test_who_leaves_drops_the_call(sandbox: Sandbox) -> None:
    data = encoded(sound(48_000, 300.0), 48_000)

    async def leave() -> None:
        for delay in (0.0, 0.001, 0.01, 0.03):
            task = asyncio.create_task(read(sandbox, data))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(leave())
    eventually(lambda: not sandbox._jobs and not sandbox._running)


def test_a_client_that_has_taken_its_seconds_begins_nothing_and_waits_with_what_has_begun() -> None:
    sandbox, data = Sandbox(), encoded(sound(48_000, 60.0), 48_000)

    async def read_slowly() -> None:
        recording = await AudioReader(sandbox).open(data, client="a")
        sandbox.seconds_per_minute = 0.0
        with pytest.raises(ClientLimitError):
            await AudioReader(sandbox).open(data, client="a")
        rest = asyncio.create_task(_length(recording))
        await asyncio.sleep(0.3)
        assert not rest.done()
        rest.cancel()

    asyncio.run(read_slowly())


async def _length(recording: SandboxRecording) -> int:
    return sum([len(piece) async for piece in recording.pieces()])


def test_a_process_keeps_few_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    data, limits = encoded(tone(16_000), 16_000), AudioLimits()

    def call(key: str) -> None:
        request = audio_reader._Request(key, 0, limits, "it")
        audio_reader.decode_call(msgspec.msgpack.encode(request), data)

    monkeypatch.setattr(audio_reader, "_MOST_KEPT_BYTES", 3 * len(data))
    for number in range(8):
        call(str(number))
    assert [*audio_reader._kept] == ["5", "6", "7"]
    monkeypatch.setattr(audio_reader, "_MOST_KEPT_BYTES", 1)
    call("a")
    assert [*audio_reader._kept] == ["a"]
    audio_reader._kept.clear()
