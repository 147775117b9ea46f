"""Log-mel features of Whisper (Radford et al. 2022, section 2.2), in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: Samples a second, everywhere in this room.
SAMPLE_RATE = 16_000
#: Samples of a Fourier transform, and from frame to frame.
N_FFT = 400
HOP = 160
#: Samples and frames of a window, the input of an encoder.
WINDOW_SECONDS = 30
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE
WINDOW_FRAMES = WINDOW_SAMPLES // HOP
#: Frames transformed at once, to stay in a cache.
_CHUNK = 256
#: Minimum power before the logarithm.
_SMALLEST = np.float32(1e-10)
#: Slaney's mel scale: linear up to 1 kHz, logarithmic above.
_HERTZ_PER_MEL = 200.0 / 3.0
_LOG_START = 1000.0
_LOG_STEP = np.log(6.4) / 27.0


def log_mel(audio: NDArray[np.float32], num_mels: int = 80) -> NDArray[np.float32]:
    """The features of one window, float32 [num_mels, 3000]; ``num_mels``: 80, or 128 for the third large model.

    ``audio``: float32 [samples] at 16 kHz within [-1, 1], cut or filled up with silence to 30 s.
    """
    padded = np.zeros(WINDOW_SAMPLES + N_FFT, np.float64)
    half, audio = N_FFT // 2, audio[:WINDOW_SAMPLES]
    padded[half : half + len(audio)] = audio
    # Frames are centred, so both ends are reflected.
    padded[:half] = padded[2 * half : half : -1]
    padded[-half:] = padded[-half - 2 : -2 * half - 2 : -1]
    frames = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP]
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(N_FFT) / N_FFT)  # periodic
    # Frames behind the end of a short recording are silent and not transformed.
    filled = min(WINDOW_FRAMES, (len(audio) + half) // HOP + 1)
    if len(audio) > WINDOW_SAMPLES - half:  # its end is reflected
        filled = WINDOW_FRAMES
    power = np.empty((N_FFT // 2 + 1, filled), np.float32)
    for first in range(0, filled, _CHUNK):
        chunk = slice(first, min(first + _CHUNK, filled))
        # float64: the quiet bands of a loud frame, which count by their logarithm, are below float32's rounding.
        spectrum = np.fft.rfft(frames[chunk] * hann)
        power[:, chunk] = (spectrum.real**2 + spectrum.imag**2).T
    mels = np.zeros((num_mels, filled), np.float32)
    product = np.empty(filled, np.float32)
    for index, mel, weight in _mel_entries(num_mels):
        np.multiply(power[index], weight, out=product)
        mels[mel] += product
    features = np.full((num_mels, WINDOW_FRAMES), _SMALLEST, np.float32)
    np.maximum(mels, _SMALLEST, out=features[:, :filled])
    # The natural logarithm is several times as fast as that of base 10.
    np.log(features, out=features)
    features *= np.float32(1.0 / np.log(10.0))
    np.maximum(features, features.max() - 8.0, out=features)
    features += 4.0
    features /= 4.0
    return features


@lru_cache(maxsize=4)
def _mel_entries(num_mels: int) -> tuple[tuple[int, int, np.float32], ...]:
    """Non-zero entries of the filters: bin, triangle, weight; a matrix product would do forty times the work."""
    filters = mel_filters(num_mels)
    return tuple((int(index), int(mel), filters[index, mel]) for index, mel in np.argwhere(filters))


@lru_cache(maxsize=4)
def mel_filters(num_mels: int) -> NDArray[np.float32]:
    """Triangles of equal area, equidistant from 0 to 8 kHz on Slaney's mel scale: float32 [bins, num_mels]."""
    edges = _hertz(np.linspace(_mels(0.0), _mels(SAMPLE_RATE / 2), num_mels + 2))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    rising = -slopes[:, :-2] / widths[:-1]
    falling = slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return np.ascontiguousarray(triangles, np.float32)


def _mels(hertz: float) -> float:
    if hertz < _LOG_START:
        return hertz / _HERTZ_PER_MEL
    return float(_LOG_START / _HERTZ_PER_MEL + np.log(hertz / _LOG_START) / _LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    first = _LOG_START / _HERTZ_PER_MEL
    return np.where(mels < first, mels * _HERTZ_PER_MEL, _LOG_START * np.exp(_LOG_STEP * (mels - first)))


# Windows of a recording.


class AudioWindows:
    """Windows of 30 s over pieces of audio, from an iterator or by ``add``; holds at most a window and a piece."""

    def __init__(self, pieces: Iterable[NDArray[np.float32]] = ()) -> None:
        self._pieces: Iterator[NDArray[np.float32]] = iter(pieces)
        self._held = np.empty(0, np.float32)
        #: First held sample of the recording.
        self._first = 0
        #: Start of the last window.
        self._begun = 0

    def missing(self, start: int) -> bool:
        """Whether the window from sample ``start`` on needs another piece."""
        return self._first + len(self._held) < start + WINDOW_SAMPLES

    def add(self, start: int, piece: NDArray[np.float32]) -> None:
        """Appends the next piece; drops the samples before ``start``."""
        self._drop(start)
        if behind := min(len(piece), max(0, start - self._first - len(self._held))):
            self._first += len(self._held) + behind
            self._held = piece[behind:]
        else:
            self._held = np.concatenate([self._held, piece])

    def window(self, start: int) -> NDArray[np.float32]:
        """The window from sample ``start`` on, which never goes back: float32 [n]; n = 0 after the end."""
        if start < self._begun:
            raise ValueError(f"window at {start}, but what is before {self._begun} was given up")
        self._begun = start
        while self.missing(start) and (piece := next(self._pieces, None)) is not None:
            self.add(start, piece)
        self._drop(start)
        return self._held[:WINDOW_SAMPLES]

    def _drop(self, start: int) -> None:
        count = min(len(self._held), max(0, start - self._first))
        self._held = self._held[count:]
        self._first += count
