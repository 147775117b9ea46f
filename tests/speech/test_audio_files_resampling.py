"""Conversion of sampling rates."""

from __future__ import annotations

import sys
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.core.errors import ConfigError
from octavo.speech.audio_files import Resampler, open_audio

RATES = [1_000, 8_000, 11_025, 12_345, 22_050, 44_100, 48_000, 96_000, 99_991, 192_000]


def resampled(signal: NDArray[np.float32], rate: int, cuts: list[int] | None = None) -> NDArray[np.float32]:
    """The signal at 16 kHz, fed in pieces that end at the cuts."""
    resampler = Resampler(rate)
    pieces = [resampler.feed(signal[i:j]) for i, j in pairwise([0, *sorted(cuts or []), len(signal)])]
    return np.concatenate([*pieces, resampler.finish()])


def tone(hertz: float, rate: int, seconds: float) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize("rate", RATES)
def test_a_tone_below_both_bands_keeps_amplitude_frequency_and_phase(rate: int) -> None:
    for hertz in (100.0, 1000.0, 0.85 * min(rate, 16_000) / 2):
        if hertz < rate / 2:
            out = resampled(tone(hertz, rate, 1.5), rate)
            assert abs(len(out) - 24_000) <= 1
            inner = slice(2000, -2000)
            assert np.abs(out[inner] - tone(hertz, 16_000, 2.0)[: len(out)][inner]).max() < 1e-3


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > 18_000])
def test_what_the_new_rate_cannot_hold_is_removed(rate: int) -> None:
    for hertz in (8_100.0, 0.95 * rate / 2):
        assert np.abs(resampled(tone(hertz, rate, 1.0), rate)[2000:-2000]).max() < 1e-6


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(RATES), st.integers(0, 50_000), st.data())
def test_pieces_do_not_matter(rate: int, size: int, data: st.DataObject) -> None:
    signal = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=12))
    assert np.array_equal(resampled(signal, rate, cuts), resampled(signal, rate))


@pytest.mark.parametrize("rate", RATES)
def test_many_equal_pieces_do_not_matter(rate: int) -> None:
    signal = np.random.default_rng(1).standard_normal(3 * rate + 17).astype(np.float32)
    whole = resampled(signal, rate)
    for piece in (97, 50_000):
        assert np.array_equal(resampled(signal, rate, list(range(piece, len(signal), piece))), whole)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_the_signal_agrees_with_a_polyphase_filter(rate: int) -> None:
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
    assert len(out) == round(samples / 3)
    assert np.isfinite(out).all()


def test_only_other_rates_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    samples = tone(440.0, 16_000, 1.0)
    assert np.array_equal(np.concatenate(list(open_audio(samples).pieces())), samples)
    with pytest.raises(ConfigError, match=r"octavo\[audio\]: .* install .*soxr"):
        open_audio((samples, 8_000))
