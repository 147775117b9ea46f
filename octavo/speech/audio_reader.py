"""Decodes clients' recordings in the sandbox, where a decoder may crash, fill the memory or hang.

A call decodes some samples from a position on, so that it can be repeated in another process and holds none for long.
The process keeps the decoder for the next call; if that runs in another process, the file is opened again there.
"""

from __future__ import annotations

import asyncio
import io
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ClientLimitError
from octavo.process.sandbox import Sandbox, encode_result, read_result
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall
from octavo.speech.audio_files import ACCEPTED, DEFAULT_LIMITS, AudioFacts, AudioLimits, Converter, Decoder

#: Processor seconds of a call. mp3 may have to be decoded from the start: 4 hours take about 10.
SECONDS = 30.0
#: Samples that a call returns, and samples of all channels that it decodes: they bound its memory and its time.
_MOST_SAMPLES = 1 << 21
_MOST_DECODED = 1 << 25
#: Decoders that a process keeps, and bytes of their files; the last used one may be larger.
_MOST_KEPT = 16
_MOST_KEPT_BYTES = 64 << 20


class _Request(msgspec.Struct):
    #: Identifies the recording.
    key: str
    #: First sample of each channel.
    position: int
    limits: AudioLimits
    name: str


class _Answer(msgspec.Struct):
    facts: AudioFacts
    #: Mono, float32; empty at the end.
    samples: bytes


class AudioReader:
    def __init__(self, sandbox: Sandbox, limits: AudioLimits = DEFAULT_LIMITS) -> None:
        self._sandbox = sandbox
        self.limits = limits

    async def open(self, data: bytes, *, client: str = "", name: str = "the recording") -> SandboxRecording:
        """A recording whose first samples could be decoded; raises AudioError, ConfigError, and as ``submit``."""
        if len(data) > self.limits.max_bytes:
            raise AudioError(f"{name} has {len(data)} bytes; at most {self.limits.max_bytes} are taken")
        if not data:
            raise AudioError(f"{name} is empty: 0 bytes; {ACCEPTED}")
        recording = SandboxRecording(self._sandbox, data, self.limits, client, name)
        recording._first = await recording._call(0)
        facts = recording._first.facts
        recording.seconds, recording._converter = facts.seconds, Converter(facts, self.limits, name)
        return recording


class SandboxRecording:
    """Mono audio at 16 kHz of a file that is decoded in the sandbox; needs no closing."""

    #: By the header; codecs may be wrong by a few milliseconds.
    seconds: float

    def __init__(self, sandbox: Sandbox, data: bytes, limits: AudioLimits, client: str, name: str) -> None:
        self._sandbox, self._data, self._limits, self._client, self._name = sandbox, data, limits, client, name
        self._key = uuid.uuid4().hex
        self._first: _Answer
        self._converter: Converter

    async def pieces(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """The audio from the start, once: float32 [n] at 16 kHz; raises AudioError and SandboxError."""
        facts, samples, position = self._first.facts, _samples(self._first), 0
        converter, self._first = self._converter, _Answer(facts, b"")
        while len(samples):
            position += len(samples)
            # Arrays that no one else changes: the thread may outlive a cancellation.
            if len(piece := await asyncio.to_thread(converter.feed, samples)):
                yield piece
            samples = _samples(await self._next(position))
        if len(piece := await asyncio.to_thread(converter.finish)):
            yield piece

    async def _next(self, position: int) -> _Answer:
        while True:
            try:
                return await self._call(position)
            except ClientLimitError as e:  # a recording that was begun waits
                await asyncio.sleep(e.retry_after)

    async def _call(self, position: int) -> _Answer:
        request = msgspec.msgpack.encode(_Request(self._key, position, self._limits, self._name))
        call = SandboxCall(f"{__name__}:decode_call", request, SECONDS, self._data)
        read = partial(_read, self._name)
        return await asyncio.wrap_future(self._sandbox.submit(call, read, client=self._client, near=self._key))


def _samples(answer: _Answer) -> NDArray[np.float32]:
    return np.frombuffer(answer.samples, np.float32)


def _read(name: str, answer: SandboxAnswer) -> _Answer:
    return read_result(answer, _Answer, AudioError, name, SECONDS, ACCEPTED)


# Within the sandbox.

#: Decoders of this process with the bytes of their files; the last used one comes last.
_kept: OrderedDict[str, tuple[Decoder, int]] = OrderedDict()


def decode_call(content: bytes, data: bytes) -> bytes:
    """Decodes samples of the file ``data``: a ``_Request`` to an ``_Answer`` for ``read_result``."""
    request = msgspec.msgpack.decode(content, type=_Request)
    return encode_result(lambda: _decode(request, data))


def _decode(request: _Request, data: bytes) -> _Answer:
    decoder, _ = _kept.pop(request.key, (None, 0))
    if decoder is None or decoder.position != request.position:
        decoder = Decoder(io.BytesIO(data), request.limits, request.name)
        decoder.skip_to(request.position)
    parts, most = [decoder.read()], min(_MOST_SAMPLES, _MOST_DECODED // decoder.facts.channels)
    while len(parts[-1]) and decoder.position + decoder.block <= request.position + most:
        parts.append(decoder.read())
    if len(parts[0]):
        _kept[request.key] = decoder, len(data)
        while len(_kept) > _MOST_KEPT or (
            len(_kept) > 1 and sum(size for _, size in _kept.values()) > _MOST_KEPT_BYTES
        ):
            _kept.popitem(last=False)[1][0].close()
    return _Answer(decoder.facts, np.concatenate(parts).tobytes())
