"""Recordings of strangers, decoded in the sandbox: a decoder may crash, fill the memory or never end there.

A call decodes some samples from a given one on, so that each can be repeated in another process, and none holds a
process for longer than that. The process keeps the decoder for the next call; where that comes to another process, or
after others, the file is opened again and decoded from a place before.
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

from octavo.core.errors import AudioError, ClientLimitError, ConfigError
from octavo.process.sandbox import Sandbox
from octavo.process.sandbox_process import SandboxAnswer, SandboxCall
from octavo.speech.audio_files import ACCEPTED, DEFAULT_LIMITS, AudioFacts, AudioLimits, Converter, Decoder

#: Of processor time for one call. It is for mp3, of which a call may have to decode again all that is before: 4 hours
#: take some 10.
SECONDS = 30.0
#: Samples that a call gives, and samples of all channels that it decodes for them: they bound its memory and its time.
_MOST_SAMPLES = 1 << 21
_MOST_DECODED = 1 << 25
#: Decoders that a process keeps, and bytes of their files; the one used last may be larger.
_MOST_KEPT = 16
_MOST_KEPT_BYTES = 64 << 20


class _Request(msgspec.Struct):
    #: Names the recording.
    key: str
    #: Samples of each channel before those that are asked for.
    position: int
    limits: AudioLimits
    name: str


class _Answer(msgspec.Struct):
    facts: AudioFacts | None = None
    #: Mono, float32; none at the end.
    samples: bytes = b""
    error: str = ""
    #: It is the server's fault.
    is_config: bool = False


class AudioReader:
    """Decodes recordings in the sandbox, for programs with an event loop."""

    def __init__(self, sandbox: Sandbox, limits: AudioLimits = DEFAULT_LIMITS) -> None:
        self._sandbox = sandbox
        self.limits = limits

    async def open(self, data: bytes, *, client: str = "", name: str = "the recording") -> SandboxRecording:
        """A recording whose first samples could be decoded; to cancel this drops the call.

        ``client``: in whose turn it is decoded; ``name``: what errors call it.

        Raises:
            AudioError: as ``Decoder``; or it took too long, or too much memory.
            ConfigError: the package that decodes is not installed.
            ClientLimitError: the client has taken its seconds in the sandbox.
            SandboxError: see ``Sandbox``.
        """
        if len(data) > self.limits.max_bytes:
            raise AudioError(f"{name} has {len(data)} bytes; at most {self.limits.max_bytes} are taken")
        if not data:
            raise AudioError(f"{name} is empty: 0 bytes; {ACCEPTED}")
        recording = SandboxRecording(self._sandbox, data, self.limits, client, name)
        await recording.begin()
        return recording


class SandboxRecording:
    """Mono audio at 16 kHz of a file that is decoded in the sandbox. Nothing of it has to be closed."""

    #: As the file says; a codec may be wrong by a few milliseconds.
    seconds: float

    def __init__(self, sandbox: Sandbox, data: bytes, limits: AudioLimits, client: str, name: str) -> None:
        """``AudioReader.open`` makes one that can be read."""
        self._sandbox, self._data, self._limits, self._client, self._name = sandbox, data, limits, client, name
        self._key = uuid.uuid4().hex
        self._facts: AudioFacts
        self._first: NDArray[np.float32]

    async def begin(self) -> None:
        """Decodes the first samples; raises as ``AudioReader.open``."""
        answer = await self._call(0)
        assert answer.facts is not None
        self._facts, self._first = answer.facts, _samples(answer)
        self.seconds = self._facts.seconds

    async def pieces(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """The audio from the beginning, float32 [n] at 16 kHz; once.

        Raises:
            AudioError: it is damaged or cut off, longer than it said and than allowed, or has samples that are not
                finite numbers.
            SandboxError: see ``Sandbox``.
        """
        converter = Converter(self._facts, self._limits, self._name)
        samples, position = self._first, 0
        self._first = samples[:0]
        while len(samples):
            position += len(samples)
            # Arrays of the thread's own: where this is cancelled, it may go on.
            if len(piece := await asyncio.to_thread(converter.feed, samples)):
                yield piece
            samples = _samples(await self._next(position))
        if len(piece := await asyncio.to_thread(converter.finish)):
            yield piece

    async def _next(self, position: int) -> _Answer:
        while True:
            try:
                return await self._call(position)
            except ClientLimitError as e:  # what has begun waits until the client may go on
                await asyncio.sleep(e.retry_after)

    async def _call(self, position: int) -> _Answer:
        request = msgspec.msgpack.encode(_Request(self._key, position, self._limits, self._name))
        call = SandboxCall(f"{__name__}:decode_call", request, SECONDS, self._data)
        read = partial(_read, self._name)
        return await asyncio.wrap_future(self._sandbox.submit(call, read, client=self._client, near=self._key))


def _samples(answer: _Answer) -> NDArray[np.float32]:
    return np.frombuffer(answer.samples, np.float32)


def _read(name: str, answer: SandboxAnswer) -> _Answer:
    if answer.failure:
        why = {
            "time": f"takes more than {SECONDS:g} seconds to be decoded",
            "memory": "needs too much memory to be decoded",
            "depth": "cannot be decoded: its decoder failed",
        }.get(answer.failure, f"cannot be decoded: {answer.details}")
        raise AudioError(f"{name} {why}; {ACCEPTED}")
    result = msgspec.msgpack.decode(answer.content, type=_Answer)
    if result.error:
        raise ConfigError(result.error) if result.is_config else AudioError(result.error)
    return result


# --- within the sandbox ----------------------------------------------------------------------------------------------

#: Decoders of this process, with the bytes of their files: the one used last comes last.
_kept: OrderedDict[str, tuple[Decoder, int]] = OrderedDict()


def decode_call(content: bytes, data: bytes) -> bytes:
    """Samples of the file ``data`` from a given one on: from a ``_Request`` to an ``_Answer``."""
    request = msgspec.msgpack.decode(content, type=_Request)
    try:
        decoder, _ = _kept.pop(request.key, (None, 0))
        if decoder is None or decoder.position != request.position:
            decoder = Decoder(io.BytesIO(data), request.limits, request.name)
            decoder.skip_to(request.position)
        parts, most = [decoder.read()], min(_MOST_SAMPLES, _MOST_DECODED // decoder.facts.channels)
        while len(parts[-1]) and decoder.position + decoder.block <= request.position + most:
            parts.append(decoder.read())
        if len(parts[0]):
            _keep(request.key, decoder, len(data))
        answer = _Answer(decoder.facts, np.concatenate(parts).tobytes())
    except (AudioError, ConfigError) as e:
        answer = _Answer(error=str(e), is_config=isinstance(e, ConfigError))
    return msgspec.msgpack.encode(answer)


def _keep(key: str, decoder: Decoder, num_bytes: int) -> None:
    _kept[key] = decoder, num_bytes
    while len(_kept) > _MOST_KEPT or (len(_kept) > 1 and sum(size for _, size in _kept.values()) > _MOST_KEPT_BYTES):
        _kept.popitem(last=False)[1][0].close()
