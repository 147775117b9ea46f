"""Recordings: bytes or a path in, mono float32 at 16 kHz out, in pieces."""

from __future__ import annotations

import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ConfigError
from octavo.core.extras import how_to_install
from octavo.speech.audio_containers import check_complete, guess_format
from octavo.speech.log_mel import SAMPLE_RATE
from octavo.speech.resampling import Resampler

#: What is taken for a recording.
AudioSource = str | os.PathLike[str] | bytes | BinaryIO
#: Or samples in memory: floats at 16 kHz, or with their rate.
Audio = AudioSource | NDArray[Any] | tuple[NDArray[Any], int]
ACCEPTED = "wav, flac, ogg (Vorbis or Opus) and mp3 are read"
#: What ``ACCEPTED`` says, by libsndfile's names. It knows some twenty more, which are seldom used and little tested.
_CONTAINERS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
#: Seconds that are decoded and resampled at once, and samples of all channels: they bound what a recording takes in
#: memory, whatever rate and channels it has.
_BLOCK_SECONDS = 10
_BLOCK_SAMPLES = 1 << 21
_MAX_CHANNELS = 64
_RATES = (1_000, 768_000)
#: Of all channels: 64 at 64 kHz, or 5 at 768 kHz. To decode 64 at 768 kHz takes longer than they last.
_MAX_SAMPLES_PER_SECOND = 1 << 22
#: Longest period, in samples, after which a rate and 16 kHz meet again: to convert takes transforms four times as long.
#: All rates up to it have a shorter one, and of higher ones those that are in use.
_MAX_PERIOD = 50_000
#: A codec counts a few frames more or less than it gives; of more than this share of a recording it is cut off.
_MISSING_SECONDS = 0.5
#: Seconds before a sample at which decoding begins that is to go on there as if all before had been decoded.
_PREROLL_SECONDS = 1


@dataclass(frozen=True)
class AudioLimits:
    """What a recording may have at most."""

    max_bytes: int = 1 << 30
    #: Seconds of audio, as the file says and as it turns out to have.
    max_seconds: float = 4 * 3600.0
    #: Samples of all channels: 4 hours of 6 channels at 48 kHz. They are what decoding takes time for.
    max_samples: int = 1 << 32


DEFAULT_LIMITS = AudioLimits()


class OpenedAudio(ABC):
    """Mono audio at 16 kHz, in pieces."""

    #: As the source says; a codec may be wrong by a few milliseconds.
    seconds: float

    @abstractmethod
    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """The audio from the beginning, float32 [n] at 16 kHz, in pieces of some seconds; once.

        Raises:
            AudioError: it is damaged or cut off, longer than it said and than allowed, or has samples that are not
                finite numbers.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives up what it holds; pieces can no longer be taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class AudioFacts:
    """What a file says of itself."""

    rate: int
    channels: int
    #: Samples of each channel.
    frames: int

    @property
    def seconds(self) -> float:
        """How long it says that it lasts."""
        return self.frames / self.rate


class Decoder:
    """A file of a known container, decoded from its beginning on, its channels mixed."""

    def __init__(self, stream: BinaryIO, limits: AudioLimits, name: str) -> None:
        """Reads the beginning of ``stream``, which stays the caller's; ``name``: what errors call it.

        Raises:
            AudioError: it is no audio that can be decoded, is cut off, has no samples, or is beyond a limit.
            ConfigError: the package that decodes is not installed.
        """
        soundfile = import_soundfile()
        self._name = name
        try:
            size = stream.seek(0, io.SEEK_END)
        except (OSError, ValueError) as e:  # a pipe, or closed
            raise AudioError(f"{name} cannot be read: {getattr(e, 'strerror', None) or e}") from None
        if size > limits.max_bytes:
            raise AudioError(f"{name} has {size} bytes; at most {limits.max_bytes} are taken")
        if not size:
            raise AudioError(f"{name} is empty: 0 bytes; {ACCEPTED}")
        try:
            check_complete(stream, name)
            stream.seek(0)
            self._file = soundfile.SoundFile(stream)
        except (soundfile.SoundFileError, RuntimeError, TypeError, OSError) as e:
            stream.seek(0)
            what = guess_format(stream.read(4096))
            raise AudioError(f"{name} is {what or 'no audio that can be decoded'} ({_reason(e)}); {ACCEPTED}") from None
        self.facts = AudioFacts(self._file.samplerate, self._file.channels, self._file.frames)
        #: Samples of each channel that are read at once.
        self.block = min(_BLOCK_SECONDS * self.facts.rate, _BLOCK_SAMPLES // max(1, self.facts.channels))
        #: Samples of each channel that have been read.
        self.position = 0
        try:
            self._check(limits)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives up the decoder; no other thread may be reading."""
        self._file.close()

    def _check(self, limits: AudioLimits) -> None:
        name, facts, (low, high) = self._name, self.facts, _RATES
        if self._file.format not in _CONTAINERS:
            raise AudioError(f"{name} is {self._file.format_info}, no audio format that is read here; {ACCEPTED}")
        if not low <= facts.rate <= high:
            raise AudioError(f"{name} has {facts.rate} samples a second; expected {low} to {high}")
        if facts.rate // math.gcd(facts.rate, SAMPLE_RATE) > _MAX_PERIOD:
            raise AudioError(
                f"{name} has {facts.rate} samples a second, a rate that takes long to convert: send it at a usual one, "
                "such as 48000"
            )
        if not 1 <= facts.channels <= _MAX_CHANNELS:
            raise AudioError(f"{name} has {facts.channels} channels; at most {_MAX_CHANNELS} are mixed")
        if (samples := facts.rate * facts.channels) > _MAX_SAMPLES_PER_SECOND:
            raise AudioError(
                f"{name} has {facts.channels} channels of {facts.rate} samples a second, {samples} in all; at most "
                f"{_MAX_SAMPLES_PER_SECOND} are mixed: send it with fewer channels or at a lower rate"
            )
        if facts.frames <= 0:
            raise AudioError(f"{name} holds no audio: it has 0 samples")
        if facts.seconds > limits.max_seconds:
            raise _too_long(name, f"says that it lasts {facts.seconds:.0f} s", limits)
        if (samples := facts.frames * facts.channels) > limits.max_samples:
            raise AudioError(
                f"{name} says that it has {samples} samples in {facts.channels} channels; at most "
                f"{limits.max_samples} are taken: send it with fewer channels or at a lower rate"
            )

    def read(self) -> NDArray[np.float32]:
        """The next samples, float32 [n], channels mixed: a block, or what there is of it before the end.

        Raises:
            AudioError: they cannot be decoded, or are not finite numbers.
        """
        return self._read(self.block)

    def _read(self, frames: int) -> NDArray[np.float32]:
        try:
            block: NDArray[np.float32] = self._file.read(frames, dtype="float32", always_2d=True)
        except (RuntimeError, OSError) as e:
            seconds = self.position / self.facts.rate
            raise AudioError(f"{self._name} is damaged after {seconds:.2f} s: {_reason(e)}") from None
        self.position += len(block)
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError(f"{self._name} has samples that are not finite numbers")
        return mono

    def skip_to(self, position: int) -> None:
        """Goes on after a later block, at the sample ``position``, with the bits that follow where all are read.

        mp3 is read up to there, block by block: after a jump its decoder gives other samples, and where a read ends
        makes a difference of a bit.
        """
        before = position - _PREROLL_SECONDS * self.facts.rate
        if before > self.position and self._file.format != "MP3" and self._file.seekable():
            self._file.seek(before)
            self.position = before
        while self.position < position and len(self._read(min(self.block, position - self.position))):
            pass


class Converter:
    """Makes 16 kHz of the samples of a file, and checks that there are as many as it says."""

    def __init__(self, facts: AudioFacts, limits: AudioLimits, name: str) -> None:
        self._facts, self._limits, self._name = facts, limits, name
        self._resampler = Resampler(facts.rate, SAMPLE_RATE)
        self._taken = 0

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the samples so far determine and was not given yet. ``samples``: float32 [n], the next ones.

        Raises:
            AudioError: there are more than the file says and than is allowed.
        """
        facts = self._facts
        self._taken += len(samples)
        if self._taken > self._limits.max_seconds * facts.rate + facts.rate:
            raise _too_long(self._name, f"lasts more than the {facts.seconds:.0f} s that it says", self._limits)
        return self._resampler.feed(samples)

    def finish(self) -> NDArray[np.float32]:
        """The rest, after the last samples.

        Raises:
            AudioError: there are fewer samples than the file says, or none.
        """
        seconds, says = self._taken / self._facts.rate, self._facts.seconds
        if seconds < says - max(_MISSING_SECONDS, 0.01 * says):
            raise AudioError(
                f"{self._name} is cut off: it says that it lasts {says:.2f} s, and {seconds:.2f} s can be decoded"
            )
        if not self._taken:
            raise AudioError(f"{self._name} holds no audio: it has 0 samples")
        return self._resampler.finish()


class Recording(OpenedAudio):
    """An opened recording, decoded in this process as its pieces are taken.

    Owns the file that it was opened from; ``close`` it, or use it as a context manager. For a program's own files,
    which are read where they are; what strangers send is decoded in the sandbox (``audio_reader.py``).
    """

    def __init__(self, source: AudioSource, limits: AudioLimits = DEFAULT_LIMITS, name: str | None = None) -> None:
        """``name``: what errors call it; None: the path, or "the recording".

        Raises:
            AudioError: it is no audio that can be decoded, is cut off, has no samples, or is beyond a limit.
            ConfigError: the package that decodes is not installed.
        """
        self.name = name or (os.fspath(source) if isinstance(source, str | os.PathLike) else "the recording")
        self._limits = limits
        self._stream = self._opened(source)
        try:
            self._decoder = Decoder(self._stream, limits, self.name)
        except BaseException:
            self._stream.close()
            raise
        self.seconds = self._decoder.facts.seconds

    def close(self) -> None:
        """See ``OpenedAudio``."""
        self._decoder.close()
        self._stream.close()

    def _opened(self, source: AudioSource) -> BinaryIO:
        if isinstance(source, bytes):
            return io.BytesIO(source)
        if not isinstance(source, str | os.PathLike):
            return source
        try:
            return open(source, "rb")
        except (OSError, ValueError) as e:
            raise AudioError(f"{self.name} cannot be read: {getattr(e, 'strerror', None) or e}") from None

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """See ``OpenedAudio``."""
        converter = Converter(self._decoder.facts, self._limits, self.name)
        while len(samples := self._decoder.read()):
            if len(piece := converter.feed(samples)):
                yield piece
        if len(piece := converter.finish()):
            yield piece


class Samples(OpenedAudio):
    """A recording that is in memory already."""

    def __init__(self, samples: Any, rate: int = SAMPLE_RATE, limits: AudioLimits = DEFAULT_LIMITS) -> None:
        """``samples``: [n], or [n, channels], numbers of any kind of float within [-1, 1].

        Raises:
            AudioError: they are something else, are none, or beyond a limit.
        """
        values = np.asarray(samples)
        if values.ndim not in (1, 2) or not np.issubdtype(values.dtype, np.floating):
            raise AudioError(f"samples must be floats of shape [n] or [n, channels], not {values.dtype} {values.shape}")
        if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not _RATES[0] <= rate <= _RATES[1]:
            raise AudioError(f"samples must have a rate from {_RATES[0]} to {_RATES[1]} a second, not {rate!r}")
        if not len(values):
            raise AudioError("the recording holds no audio: it has 0 samples")
        mono = values if values.ndim == 1 else values.mean(axis=1)
        self._mono, self._rate = mono.astype(np.float32, copy=False), int(rate)
        if not np.isfinite(self._mono).all():
            raise AudioError("the recording has samples that are not finite numbers")
        self.seconds = len(mono) / self._rate
        if self.seconds > limits.max_seconds:
            raise AudioError(f"the recording lasts {self.seconds:.0f} s; at most {limits.max_seconds:g} s are taken")

    def close(self) -> None:
        """Nothing is held."""

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """See ``OpenedAudio``."""
        resampler, size = Resampler(self._rate, SAMPLE_RATE), _BLOCK_SECONDS * self._rate
        for start in range(0, len(self._mono), size):
            if len(piece := resampler.feed(self._mono[start : start + size])):
                yield piece
        if len(piece := resampler.finish()):
            yield piece


def open_audio(audio: Audio, limits: AudioLimits = DEFAULT_LIMITS, name: str | None = None) -> OpenedAudio:
    """A recording given as path, bytes, opened file, samples at 16 kHz, or (samples, rate).

    Raises:
        AudioError, ConfigError: see ``Recording`` and ``Samples``.
    """
    if isinstance(audio, tuple):
        if len(audio) != 2:
            raise AudioError(f"samples with their rate are a pair, not {len(audio)} values")
        return Samples(audio[0], audio[1], limits)
    if isinstance(audio, str | os.PathLike | bytes) or hasattr(audio, "read"):
        return Recording(cast(AudioSource, audio), limits, name)
    return Samples(audio, SAMPLE_RATE, limits)


def import_soundfile() -> Any:
    """The module ``soundfile``.

    Raises:
        ConfigError: the package is not installed, or its library cannot be loaded.
    """
    try:
        import soundfile
    except (ImportError, OSError) as e:  # OSError: the library that it wraps is missing
        raise ConfigError(
            f"reading recordings needs the package soundfile, which fails to import ({e}): {how_to_install('audio')}"
        ) from None
    return soundfile


def _too_long(name: str, what: str, limits: AudioLimits) -> AudioError:
    return AudioError(f"{name} {what}; at most {limits.max_seconds:g} s are taken")


def _reason(error: Exception) -> str:
    text = str(getattr(error, "error_string", error)).strip().rstrip(".")
    return "its header has no possible sampling rate" if "SF_INFO" in text else text
