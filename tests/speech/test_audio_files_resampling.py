"""Conversion of sampling rates."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.speech.audio_files import Resampler

RATES = [8_000, 11_025, 12_345, 22_050, 44_100, 48_000, 96_000]


def resampled(signal: NDArray[np.float32], rate: int, piece: int = 10_000) -> NDArray[np.float32]:
    resampler = Resampler(rate, 16_000)
    pieces = [resampler.feed(signal[i : i + piece]) for i in range(0, len(signal), piece)]
    return np.concatenate([*pieces, resampler.finish()])


def tone(hertz: float, rate: int, seconds: float) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize("rate", RATES)
def test_what_is_in_the_band_of_both_rates_passes_unchanged(rate: int) -> None:
    for hertz in (100.0, 1000.0, 0.85 * min(rate, 16_000) / 2):
        out = resampled(tone(hertz, rate, 1.5), rate)
        assert len(out) == -(-round(1.5 * rate) * 16_000 // rate)
        inner = slice(2000, -2000)
        assert np.abs(out[inner] - tone(hertz, 16_000, 2.0)[: len(out)][inner]).max() < 2e-4


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > 18_000])
def test_what_the_new_rate_cannot_hold_is_removed(rate: int) -> None:
    out = resampled(tone(0.95 * rate / 2, rate, 1.0), rate)
    assert np.abs(out[2000:-2000]).max() < 1e-4
    assert np.abs(resampled(tone(8_100.0, rate, 1.0), rate)[2000:-2000]).max() < 1e-4


@pytest.mark.parametrize("rate", RATES)
def test_pieces_do_not_matter(rate: int) -> None:
    signal = np.random.default_rng(1).standard_normal(3 * rate + 17).astype(np.float32)
    whole = resampled(signal, rate, len(signal))
    assert len(whole) == -(-len(signal) * 16_000 // rate)
    for piece in (997, 50_000):
        assert np.array_equal(resampled(signal, rate, piece), whole)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_the_signal_agrees_with_a_polyphase_filter(rate: int) -> None:
    from math import gcd

    from scipy.signal import resample_poly

    rng = np.random.default_rng(2)
    # Noise below 3 kHz: both filters pass it.
    spectrum = np.fft.rfft(rng.standard_normal(2 * rate))
    spectrum[6000:] = 0
    signal = np.fft.irfft(spectrum).astype(np.float32)
    divisor = gcd(rate, 16_000)
    expected = resample_poly(signal.astype(np.float64), 16_000 // divisor, rate // divisor, window=("kaiser", 12.0))
    out = resampled(signal, rate)
    assert np.abs(out[3000:-3000] - expected[3000:-3000]).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("samples", [0, 1, 5])
def test_signals_of_few_samples(samples: int) -> None:
    out = resampled(np.ones(samples, np.float32), 48_000)
    assert len(out) == -(-samples // 3)
    assert np.isfinite(out).all()
