"""Band-limited conversion of sampling rates, in pieces."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: The share of the lower rate's band that passes unchanged; from its end on nothing passes.
_PASS = 0.9
#: Of the Kaiser window: what should not pass is damped by some 90 dB (Kaiser 1974).
_BETA = 9.0
_DAMPING = 90.0
#: Least input samples of a Fourier transform.
_BLOCK = 1 << 14


class Resampler:
    """Converts a signal that comes in pieces from one rate to another.

    A windowed sinc at the input's rate, applied by Fourier transforms of overlapping blocks (overlap-save), whose
    spectra are cut or filled up to the output's rate. What is before the signal and after it counts as silence.
    Invariant: the output depends on the signal and not on its pieces.
    """

    def __init__(self, rate: int, new_rate: int) -> None:
        """From ``rate`` to ``new_rate``, samples a second."""
        self._is_same = rate == new_rate
        divisor = math.gcd(rate, new_rate)
        #: So many input samples are as long as so many output samples.
        self._per_in, self._per_out = rate // divisor, new_rate // divisor
        if self._is_same:
            return
        half = len(_sinc(rate, new_rate)) // 2
        #: Input samples on either side that a block needs of its neighbours, and input samples of a block without them.
        self._margin = -(-half // self._per_in) * self._per_in
        self._body = max(1, -(-max(_BLOCK, 2 * self._margin) // self._per_in)) * self._per_in
        self._response = _response(rate, new_rate, self._body + 2 * self._margin)
        self._waiting: list[NDArray[np.float32]] = [np.zeros(self._margin, np.float32)]
        self._num_waiting = self._margin
        self._fed = self._given = 0

    def feed(self, piece: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output that the signal so far determines and that was not given yet. ``piece``: float32 [n]."""
        if self._is_same:
            return piece
        self._fed += len(piece)
        return self._take(piece)

    def finish(self) -> NDArray[np.float32]:
        """The rest of the output, after the last piece."""
        if self._is_same:
            return np.empty(0, np.float32)
        total = -(-self._fed * self._per_out // self._per_in)
        rest = self._take(np.zeros(self._body + self._margin, np.float32))
        given = self._given - len(rest)
        return rest[: total - given]

    def _take(self, piece: NDArray[np.float32]) -> NDArray[np.float32]:
        self._waiting.append(piece)
        self._num_waiting += len(piece)
        size = self._body + 2 * self._margin
        if self._num_waiting < size:
            return np.empty(0, np.float32)
        signal = np.concatenate(self._waiting)
        blocks, start = [], 0
        while len(signal) - start >= size:
            blocks.append(self._block(signal[start : start + size]))
            start += self._body
        self._waiting, self._num_waiting = [signal[start:].copy()], len(signal) - start
        result = np.concatenate(blocks)
        self._given += len(result)
        return result

    def _block(self, signal: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output of a block without its margins."""
        size = len(signal) * self._per_out // self._per_in
        spectrum = np.fft.rfft(signal.astype(np.float64))
        spectrum = spectrum[: len(self._response)] * self._response
        margin = self._margin * self._per_out // self._per_in
        # irfft fills the spectrum up with zeros where the output has the higher rate.
        return np.fft.irfft(spectrum, size)[margin : size - margin].astype(np.float32)


@lru_cache(maxsize=8)
def _sinc(rate: int, new_rate: int) -> NDArray[np.float64]:
    """A low pass at the input's rate, of odd length."""
    band = min(rate, new_rate) / 2
    half = math.ceil((_DAMPING - 7.95) / 14.36 * rate / (band * (1 - _PASS)) / 2)
    cutoff = (1 + _PASS) / 2 * band
    time = np.arange(-half, half + 1) / rate
    return np.asarray(2 * cutoff / rate * np.sinc(2 * cutoff * time) * np.kaiser(2 * half + 1, _BETA))


@lru_cache(maxsize=8)
def _response(rate: int, new_rate: int, size: int) -> NDArray[np.complex128]:
    """The low pass for blocks of ``size`` input samples, as far as the output's spectrum reaches, and scaled for it."""
    filter_ = _sinc(rate, new_rate)
    half = len(filter_) // 2
    centred = np.zeros(size)
    centred[: half + 1] = filter_[half:]
    centred[-half:] = filter_[:half]
    new_size = size * new_rate // rate
    return np.fft.rfft(centred)[: new_size // 2 + 1] * (new_size / size)
