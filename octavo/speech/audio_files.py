"""Recordings: bytes or a path in, mono float32 at 16 kHz out, in pieces."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ConfigError
from octavo.speech.audio_containers import check_complete, guess_format
from octavo.speech.log_mel import SAMPLE_RATE
from octavo.speech.resampling import Resampler

#: What is taken for a recording.
AudioSource = str | os.PathLike[str] | bytes | BinaryIO
#: Or samples in memory: floats at 16 kHz, or with their rate.
Audio = AudioSource | NDArray[Any] | tuple[NDArray[Any], int]
ACCEPTED = "wav, flac, ogg (Vorbis or Opus) and mp3 are read"
#: Seconds that are decoded at once, which bounds what a long recording takes in memory.
_PIECE_SECONDS = 10
_MAX_CHANNELS = 64
_RATES = (1_000, 768_000)
#: A codec counts a few frames more or less than it gives; of more than this share of a recording it is cut off.
_MISSING_SECONDS = 0.5


@dataclass(frozen=True)
class AudioLimits:
    """What a recording may have at most."""

    max_bytes: int = 1 << 30
    #: Seconds of audio, as the file says and as it turns out to have.
    max_seconds: float = 4 * 3600.0


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


class Recording(OpenedAudio):
    """An opened recording, decoded as its pieces are taken.

    Owns the file that it was opened from; ``close`` it, or use it as a context manager.
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
            self._file = self._decoder()
        except BaseException:
            self._stream.close()
            raise
        self._rate = self._file.samplerate
        self.seconds = self._file.frames / self._rate

    def close(self) -> None:
        """See ``OpenedAudio``."""
        self._file.close()
        self._stream.close()

    def _opened(self, source: AudioSource) -> BinaryIO:
        if isinstance(source, bytes):
            stream: BinaryIO = io.BytesIO(source)
        elif isinstance(source, str | os.PathLike):
            try:
                stream = open(source, "rb")  # noqa: SIM115 - held until ``close``
            except (OSError, ValueError) as e:
                raise AudioError(f"{self.name} cannot be read: {getattr(e, 'strerror', None) or e}") from None
        else:
            stream = source
        try:
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
        except OSError as e:
            raise AudioError(f"{self.name} cannot be read: {e.strerror}") from None
        if size > self._limits.max_bytes:
            raise AudioError(f"{self.name} has {size} bytes; at most {self._limits.max_bytes} are taken")
        if not size:
            raise AudioError(f"{self.name} is empty: 0 bytes; {ACCEPTED}")
        return stream

    def _decoder(self) -> Any:
        soundfile = _soundfile()
        try:
            check_complete(self._stream, self.name)
            self._stream.seek(0)
            file = soundfile.SoundFile(self._stream)
        except (soundfile.SoundFileError, RuntimeError, TypeError, OSError) as e:
            self._stream.seek(0)
            what = guess_format(self._stream.read(4096))
            reason = str(getattr(e, "error_string", e)).strip().rstrip(".")
            raise AudioError(
                f"{self.name} is {what or 'no audio that can be decoded'} ({reason}); {ACCEPTED}"
            ) from None
        try:
            self._check(file)
        except BaseException:
            file.close()
            raise
        return file

    def _check(self, file: Any) -> None:
        low, high = _RATES
        if not low <= file.samplerate <= high:
            raise AudioError(f"{self.name} has {file.samplerate} samples a second; expected {low} to {high}")
        if not 1 <= file.channels <= _MAX_CHANNELS:
            raise AudioError(f"{self.name} has {file.channels} channels; at most {_MAX_CHANNELS} are mixed")
        if file.frames <= 0:
            raise AudioError(f"{self.name} holds no audio: it has 0 samples")
        if (seconds := file.frames / file.samplerate) > self._limits.max_seconds:
            raise self._too_long(f"says that it lasts {seconds:.0f} s")

    def _too_long(self, what: str) -> AudioError:
        return AudioError(f"{self.name} {what}; at most {self._limits.max_seconds:g} s are taken")

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """See ``OpenedAudio``."""
        resampler = Resampler(self._rate, SAMPLE_RATE)
        taken = 0
        while True:
            block = self._read(_PIECE_SECONDS * self._rate)
            taken += len(block)
            if taken > self._limits.max_seconds * self._rate + self._rate:
                raise self._too_long(f"lasts more than the {self.seconds:.0f} s that it says")
            if not len(block):
                break
            if len(piece := resampler.feed(block)):
                yield piece
        if taken / self._rate < self.seconds - max(_MISSING_SECONDS, 0.01 * self.seconds):
            raise AudioError(
                f"{self.name} is cut off: it says that it lasts {self.seconds:.2f} s, and {taken / self._rate:.2f} s "
                "can be decoded"
            )
        if not taken:
            raise AudioError(f"{self.name} holds no audio: it has 0 samples")
        if len(piece := resampler.finish()):
            yield piece

    def _read(self, frames: int) -> NDArray[np.float32]:
        """The next samples, channels mixed; none at the end."""
        try:
            block: NDArray[np.float32] = self._file.read(frames, dtype="float32", always_2d=True)
        except (RuntimeError, OSError) as e:
            reason = str(getattr(e, "error_string", e)).strip().rstrip(".")
            raise AudioError(f"{self.name} is damaged after {self._file.tell() / self._rate:.2f} s: {reason}") from None
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError(f"{self.name} has samples that are not finite numbers")
        return mono


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
        resampler, size = Resampler(self._rate, SAMPLE_RATE), _PIECE_SECONDS * self._rate
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


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as e:  # OSError: the library that it wraps is missing
        raise ConfigError(
            f"reading recordings needs the package soundfile, which fails to import ({e}): pip install 'octavo[audio]'"
        ) from None
    return soundfile
