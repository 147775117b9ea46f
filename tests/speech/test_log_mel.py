"""Log-mel features against transformers' extractor."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.speech.log_mel import SAMPLE_RATE, WINDOW_SAMPLES, log_mel


def _speech_like(samples: int, seed: int = 0) -> NDArray[np.float32]:
    """Bursts of harmonics with noise, and silence between."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / SAMPLE_RATE
    pitch = 120 + 40 * np.sin(2 * np.pi * 0.7 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    voice = sum(np.sin(k * phase) / k for k in range(1, 30))
    envelope = np.maximum(0.0, np.sin(2 * np.pi * 1.3 * time))
    audio = 0.2 * envelope * voice + 0.001 * rng.standard_normal(samples)
    return audio.astype(np.float32)


@pytest.mark.parametrize("num_mels", [80, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "samples",
    [
        *(0, 1, 159, 7 * SAMPLE_RATE + 13, WINDOW_SAMPLES + 999),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (160, 400, WINDOW_SAMPLES - 100, WINDOW_SAMPLES)),
    ],
)
def test_features_are_those_of_transformers(num_mels: int, samples: int) -> None:
    from transformers import WhisperFeatureExtractor

    audio = _speech_like(samples)
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    padded = np.zeros(WINDOW_SAMPLES, np.float32)
    padded[: min(samples, WINDOW_SAMPLES)] = audio[:WINDOW_SAMPLES]
    # Its way of numpy, which transforms in float64; that of torch rounds to float32 before the logarithm.
    expected = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    features = log_mel(audio, num_mels)
    assert features.shape == (num_mels, 3000)
    assert features.dtype == np.float32
    assert np.abs(features - expected).max() < 1e-5


def test_loud_and_quiet_noise_agree_too() -> None:
    from transformers import WhisperFeatureExtractor

    rng = np.random.default_rng(5)
    extractor = WhisperFeatureExtractor()
    for scale in (1.0, 1e-3, 1e-6):
        audio = (scale * rng.standard_normal(WINDOW_SAMPLES)).clip(-1, 1).astype(np.float32)
        expected = extractor._np_extract_fbank_features(audio[None], "cpu")[0]
        assert np.abs(log_mel(audio) - expected).max() < 1e-5


def test_the_features_of_a_recording_are_its_own() -> None:
    """Bit for bit, wherever they are computed: they name what the prefix cache holds of a window."""
    audio = _speech_like(5 * SAMPLE_RATE)
    first = log_mel(audio)
    assert np.array_equal(first, log_mel(np.concatenate([audio, audio])[: len(audio)]))
