"""Audio files, or samples in memory, as mono float32 at 16 kHz, in pieces. ``open_audio`` is the entry point."""

from __future__ import annotations

import io
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ConfigError
from octavo.core.plugins import how_to_install
from octavo.speech.log_mel import SAMPLE_RATE

# Checks of a file's first and last bytes that its decoder does not make.

#: Magic numbers of audio and of files mistaken for audio, and their names in errors.
_FORMATS = (
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska file"), (4, b"ftyp", "an MP4 or M4A file"),
    (0, b"RIFF", "a RIFF file without audio that can be decoded"),
    (0, b"OggS", "an Ogg file without audio that can be decoded"),
    (0, b"fLaC", "a damaged FLAC file"), (0, b"ID3", "a damaged mp3 file"),
    (0, b"\xff\xf1", "a file of AAC"), (0, b"\xff\xf9", "a file of AAC"), (0, b"#!AMR", "an AMR file"),
    (0, b"0&\xb2u", "a Windows Media file"), (0, b"%PDF", "a PDF file"), (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x89PNG", "a PNG image"), (0, b"\xff\xd8\xff", "a JPEG image"), (0, b"GGUF", "a GGUF file"),
)  # fmt: skip
#: Sizes in the headers of streaming programs, which do not know the size.
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x80000000)
_NEARLY_MAX = 0xFFFFFF00
#: Maximum chunks of a WAV file before its samples.
_MAX_CHUNKS = 1000
_OGG_TAIL = 1 << 17


def guess_format(start: bytes) -> str:
    for offset, magic, name in _FORMATS:
        if start[offset : offset + len(magic)] == magic:
            return name
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as e:
        text = start[: e.start].decode("utf-8") if e.start > len(start) - 4 else ""
    is_text = bool(text.strip()) and all(line.isprintable() for line in text.replace("\t", " ").splitlines())
    return "a text file" if is_text else ""


def check_complete(stream: BinaryIO, name: str) -> None:
    """Raises AudioError for truncated WAV and Ogg files, which their decoder accepts silently."""
    stream.seek(0)
    start = stream.read(12)
    if start[:4] in (b"RIFF", b"RF64") and start[8:12] == b"WAVE":
        _check_wav(stream, name, is_wide=start[:4] == b"RF64")
    elif start[:4] == b"OggS":
        _check_ogg(stream, name)


def _check_wav(stream: BinaryIO, name: str, *, is_wide: bool) -> None:
    end, position = stream.seek(0, io.SEEK_END), 12
    for _ in range(_MAX_CHUNKS):
        stream.seek(position)
        header = stream.read(8)
        if len(header) < 8:
            raise AudioError(f"{name} is cut off: a WAV file without samples, of {end} bytes")
        kind, size = header[:4], struct.unpack("<I", header[4:])[0]
        if kind == b"data":
            has = end - position - 8
            if not is_wide and size not in _UNKNOWN_SIZES and size < _NEARLY_MAX and size > has:
                raise AudioError(f"{name} is cut off: it says that it has {size} bytes of samples, and has {has}")
            return
        position += 8 + size + size % 2


def _check_ogg(stream: BinaryIO, name: str) -> None:
    end = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, end - _OGG_TAIL))
    tail = stream.read(_OGG_TAIL)
    at = tail.rfind(b"OggS\0")
    if at < 0:
        raise AudioError(f"{name} is damaged: the end of this Ogg file has no page")
    page = tail[at:]
    segments = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) < 27 or len(segments) < page[26] or len(page) < 27 + page[26] + sum(segments):
        raise AudioError(f"{name} is cut off within the last page of an Ogg file")


# Sampling rate conversion.


class Resampler:
    """Converts a mono signal that comes in pieces to 16 kHz; any cut into pieces gives the same bits."""

    def __init__(self, rate: int) -> None:
        """Raises ConfigError if the rate is not 16 kHz and soxr is missing."""
        self._stream: Any = None
        if rate != SAMPLE_RATE:
            self._stream = import_soxr().ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")

    def feed(self, piece: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output that the signal so far determines and that is new. ``piece``: float32 [n]."""
        return piece if self._stream is None else self._resample(piece)

    def finish(self) -> NDArray[np.float32]:
        rest = np.empty(0, np.float32)
        return rest if self._stream is None else self._resample(rest, last=True)

    def _resample(self, piece: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        output: NDArray[np.float32] = self._stream.resample_chunk(piece, last=last)
        return output


# Files and samples.

AudioSource = str | os.PathLike[str] | bytes | BinaryIO
#: A file, or samples in memory: floats at 16 kHz, or with their rate.
Audio = AudioSource | NDArray[Any] | tuple[NDArray[Any], int]
ACCEPTED = "wav, flac, ogg (Vorbis or Opus) and mp3 are read"
#: The formats of ``ACCEPTED`` by libsndfile's names. It has about twenty more, rarely used and little tested.
_CONTAINERS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
#: Seconds, and samples of all channels, to decode and resample at once: they bound memory at any rate and channels.
_BLOCK_SECONDS = 10
_BLOCK_SAMPLES = 1 << 21
_MAX_CHANNELS = 64
_RATES = (1_000, 768_000)
#: Of all channels: 64 at 64 kHz, or 5 at 768 kHz. Decoding 64 at 768 kHz is slower than real time.
_MAX_SAMPLES_PER_SECOND = 1 << 22
#: Codecs miscount a few frames; a recording that lacks more seconds, or 1 %, is truncated.
_MISSING_SECONDS = 0.5
#: Decoding from the middle starts this many seconds earlier, to get the same samples.
_PREROLL_SECONDS = 1


@dataclass(frozen=True)
class AudioLimits:
    max_bytes: int = 1 << 30
    #: Seconds of audio, by the header and as decoded.
    max_seconds: float = 4 * 3600.0
    #: Samples of all channels: 4 hours of 6 channels at 48 kHz. Decoding time depends on them.
    max_samples: int = 1 << 32


DEFAULT_LIMITS = AudioLimits()


class OpenedAudio(ABC):
    """Mono audio at 16 kHz, in pieces; a context manager."""

    #: By the header; codecs may be wrong by a few milliseconds.
    seconds: float

    @abstractmethod
    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """The audio from the start, once: float32 [n] at 16 kHz; raises AudioError if it is damaged or too long."""

    @abstractmethod
    def close(self) -> None:
        """Frees resources; no more pieces can be taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class AudioFacts:
    rate: int
    channels: int
    frames: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class Decoder:
    """Decodes a file block by block and mixes its channels."""

    def __init__(self, stream: BinaryIO, limits: AudioLimits, name: str) -> None:
        """``stream`` stays the caller's; ``name``: for errors. Raises AudioError, and ConfigError without soundfile."""
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
        self.block = min(_BLOCK_SECONDS * self.facts.rate, _BLOCK_SAMPLES // max(1, self.facts.channels))
        #: Samples of each channel read so far.
        self.position = 0
        try:
            self._check(limits)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Must not be called while another thread reads."""
        self._file.close()

    def _check(self, limits: AudioLimits) -> None:
        name, facts, (low, high) = self._name, self.facts, _RATES
        if self._file.format not in _CONTAINERS:
            raise AudioError(f"{name} is {self._file.format_info}, no audio format that is read here; {ACCEPTED}")
        if not low <= facts.rate <= high:
            raise AudioError(f"{name} has {facts.rate} samples a second; expected {low} to {high}")
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

    def read(self, frames: int | None = None) -> NDArray[np.float32]:
        """The next block of mixed samples, float32 [n], shorter at the end; raises AudioError if it is damaged."""
        try:
            block: NDArray[np.float32] = self._file.read(frames or self.block, dtype="float32", always_2d=True)
        except (RuntimeError, OSError) as e:
            seconds = self.position / self.facts.rate
            raise AudioError(f"{self._name} is damaged after {seconds:.2f} s: {_reason(e)}") from None
        self.position += len(block)
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError(f"{self._name} has samples that are not finite numbers")
        return mono

    def skip_to(self, position: int) -> None:
        """Moves to a later sample, from where on reads give the same bits as without the jump."""
        # mp3 is read block by block: its decoder gives other samples after a jump, and the ends of reads matter, too.
        before = position - _PREROLL_SECONDS * self.facts.rate
        if before > self.position and self._file.format != "MP3" and self._file.seekable():
            self._file.seek(before)
            self.position = before
        while self.position < position and len(self.read(min(self.block, position - self.position))):
            pass


class Converter:
    """Resamples a file to 16 kHz, and checks its length against the header."""

    def __init__(self, facts: AudioFacts, limits: AudioLimits, name: str) -> None:
        """Raises ConfigError as ``Resampler``."""
        self._facts, self._limits, self._name = facts, limits, name
        self._resampler = Resampler(facts.rate)
        self._taken = 0

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The new output of these samples, float32 [n]; raises AudioError beyond the header's length and the limit."""
        facts = self._facts
        self._taken += len(samples)
        if self._taken > self._limits.max_seconds * facts.rate + facts.rate:
            raise _too_long(self._name, f"lasts more than the {facts.seconds:.0f} s that it says", self._limits)
        return self._resampler.feed(samples)

    def finish(self) -> NDArray[np.float32]:
        """The rest of the output; raises AudioError if there are fewer samples than the header says, or none."""
        seconds, says = self._taken / self._facts.rate, self._facts.seconds
        if seconds < says - max(_MISSING_SECONDS, 0.01 * says):
            raise AudioError(
                f"{self._name} is cut off: it says that it lasts {says:.2f} s, and {seconds:.2f} s can be decoded"
            )
        if not self._taken:
            raise AudioError(f"{self._name} holds no audio: it has 0 samples")
        return self._resampler.finish()


class Recording(OpenedAudio):
    """A program's own recording, decoded in this process; clients' are decoded in the sandbox (``audio_reader.py``)."""

    def __init__(self, source: AudioSource, limits: AudioLimits = DEFAULT_LIMITS, name: str | None = None) -> None:
        """``name``: for error messages, by default the path. Raises AudioError, ConfigError as ``Decoder``."""
        self.name = name or (os.fspath(source) if isinstance(source, str | os.PathLike) else "the recording")
        if isinstance(source, bytes):
            self._stream: BinaryIO = io.BytesIO(source)
        elif not isinstance(source, str | os.PathLike):
            self._stream = source
        else:
            try:
                self._stream = open(source, "rb")  # noqa: SIM115 - see ``close``
            except (OSError, ValueError) as e:
                raise AudioError(f"{self.name} cannot be read: {getattr(e, 'strerror', None) or e}") from None
        try:
            self._decoder = Decoder(self._stream, limits, self.name)
            self._converter = Converter(self._decoder.facts, limits, self.name)
        except BaseException:
            self._stream.close()
            raise
        self.seconds = self._decoder.facts.seconds

    def close(self) -> None:
        self._decoder.close()
        self._stream.close()

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        while len(samples := self._decoder.read()):
            if len(piece := self._converter.feed(samples)):
                yield piece
        if len(piece := self._converter.finish()):
            yield piece


class Samples(OpenedAudio):
    def __init__(self, samples: Any, rate: int = SAMPLE_RATE, limits: AudioLimits = DEFAULT_LIMITS) -> None:
        """``samples``: floats [n] or [n, channels] within [-1, 1]; raises AudioError for others, or beyond a limit.

        Raises ConfigError as ``Resampler``.
        """
        values = np.asarray(samples)
        if values.ndim not in (1, 2) or not np.issubdtype(values.dtype, np.floating):
            raise AudioError(f"samples must be floats of shape [n] or [n, channels], not {values.dtype} {values.shape}")
        if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not _RATES[0] <= rate <= _RATES[1]:
            raise AudioError(f"samples must have a rate from {_RATES[0]} to {_RATES[1]} a second, not {rate!r}")
        if not len(values):
            raise AudioError("the recording holds no audio: it has 0 samples")
        mono = values if values.ndim == 1 else values.mean(axis=1)
        self._mono, self._rate = np.ascontiguousarray(mono, np.float32), int(rate)
        if not np.isfinite(self._mono).all():
            raise AudioError("the recording has samples that are not finite numbers")
        self.seconds = len(mono) / self._rate
        if self.seconds > limits.max_seconds:
            raise AudioError(f"the recording lasts {self.seconds:.0f} s; at most {limits.max_seconds:g} s are taken")
        self._resampler = Resampler(self._rate)

    def close(self) -> None:
        pass

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        size = _BLOCK_SECONDS * self._rate
        for start in range(0, len(self._mono), size):
            if len(piece := self._resampler.feed(self._mono[start : start + size])):
                yield piece
        if len(piece := self._resampler.finish()):
            yield piece


def open_audio(audio: Audio, limits: AudioLimits = DEFAULT_LIMITS, name: str | None = None) -> OpenedAudio:
    """Opens a path, bytes, an open file, samples at 16 kHz, or (samples, rate); raises AudioError, ConfigError."""
    if isinstance(audio, tuple):
        if len(audio) != 2:
            raise AudioError(f"samples with their rate are a pair, not {len(audio)} values")
        return Samples(audio[0], audio[1], limits)
    if isinstance(audio, str | os.PathLike | bytes) or hasattr(audio, "read"):
        return Recording(cast(AudioSource, audio), limits, name)
    return Samples(audio, SAMPLE_RATE, limits)


def import_soundfile() -> Any:
    """The module ``soundfile``; raises ConfigError if it is missing or fails to load."""
    try:
        import soundfile
    except (ImportError, OSError) as e:  # OSError: the library that it wraps is missing
        raise ConfigError(
            f"reading recordings needs the package soundfile, which fails to import ({e}): {how_to_install('audio')}"
        ) from None
    return soundfile


def import_soxr() -> Any:
    """The module ``soxr``, which recordings at 16 kHz do not need; raises ConfigError if it fails to import."""
    try:
        import soxr
    except ImportError as e:
        raise ConfigError(
            f"reading recordings at rates other than 16 kHz needs the package soxr, which fails to import ({e}): "
            f"{how_to_install('audio')}"
        ) from None
    return soxr


def _too_long(name: str, what: str, limits: AudioLimits) -> AudioError:
    return AudioError(f"{name} {what}; at most {limits.max_seconds:g} s are taken")


def _reason(error: Exception) -> str:
    text = str(getattr(error, "error_string", error)).strip().rstrip(".")
    return "its header has no possible sampling rate" if "SF_INFO" in text else text
