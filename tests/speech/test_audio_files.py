"""Recordings: formats, rates, channels, and what is no recording."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from octavo.core.errors import AudioError, ConfigError, InvalidRequestError
from octavo.speech.audio_files import AudioLimits, Decoder, Recording, import_soundfile

SECONDS = 2.0


def tone(rate: int, channels: int = 1, seconds: float = SECONDS) -> NDArray[np.float32]:
    mono = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate)
    return np.repeat(mono[:, None], channels, axis=1).astype(np.float32)


def encoded(samples: NDArray[np.float32], rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, samples.shape[1], subtype, format=kind) as file:
        for start in range(0, len(samples), 1 << 16):  # its Vorbis encoder takes stack for all that it is given at once
            file.write(samples[start : start + (1 << 16)])
    return out.getvalue()


def read(source: bytes | Path, **limits: float) -> NDArray[np.float32]:
    with Recording(source, AudioLimits(**limits)) as recording:  # type: ignore[arg-type]
        return np.concatenate(list(recording.pieces()))


@pytest.mark.parametrize(
    "kind", [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)]
)
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_formats_and_rates(kind: tuple[str, str | None], rate: int) -> None:
    audio = read(encoded(tone(rate, 2), rate, *kind))
    assert audio.dtype == np.float32
    assert abs(len(audio) / 16_000 - SECONDS) < 0.1
    # Codecs delay or blur what they keep: the tone is there, and little else.
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio)))) ** 2
    around = round(440 * len(audio) / 16_000)
    assert spectrum[around - 8 : around + 9].sum() > 0.99 * spectrum.sum()


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_channels_are_mixed(channels: int) -> None:
    samples = (tone(16_000, channels) * np.arange(1, channels + 1) / channels).astype(np.float32)
    audio = read(encoded(samples, 16_000, "WAV", "FLOAT"))
    assert np.allclose(audio, samples.mean(axis=1), atol=1e-6)


def test_a_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    path.write_bytes(encoded(tone(16_000), 16_000, "FLAC"))
    assert len(read(path)) == 32_000


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"nothing\.wav cannot be read: No such file"):
        Recording(tmp_path / "nothing.wav")


def test_long_recordings_come_in_pieces() -> None:
    with Recording(encoded(tone(8_000, seconds=65.0), 8_000, "FLAC")) as recording:
        lengths = [len(piece) for piece in recording.pieces()]
    assert sum(lengths) == 65 * 16_000
    assert max(lengths) < 20 * 16_000


NO_AUDIO = {
    "text": b"Once upon a time, there was a file of text.\n" * 20,
    "JSON": b'{"a": 1}',
    "MP4": b"\x00\x00\x00\x20ftypM4A \x00\x00\x00\x00" + bytes(100),
    "WebM": b"\x1aE\xdf\xa3" + bytes(100),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "zeros": bytes(1000),
    "noise": bytes(np.random.default_rng(3).integers(0, 256, 4000, np.uint8)),
}


@pytest.mark.parametrize("what", NO_AUDIO)
def test_what_is_no_audio_is_refused(what: str) -> None:
    with pytest.raises(AudioError, match=r"wav, flac, ogg .* and mp3 are read|can be decoded") as error:
        read(NO_AUDIO[what])
    if what not in ("zeros", "noise"):
        assert what.replace("JSON", "text") in str(error.value)


def test_an_empty_file() -> None:
    with pytest.raises(AudioError, match="is empty: 0 bytes"):
        Recording(b"")


@pytest.mark.parametrize("kind", ["WAV", "AIFF"])
def test_no_samples(kind: str) -> None:
    with pytest.raises(AudioError, match=r"0 samples|no audio"):
        read(encoded(tone(16_000)[:0], 16_000, kind))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("share", [0.0005, 0.3, 0.9])
def test_a_file_that_is_cut_off(kind: str, share: float) -> None:
    whole = encoded(tone(16_000, seconds=20.0) + 0.1 * noise(320_000), 16_000, kind)
    with pytest.raises(AudioError):
        read(whole[: int(len(whole) * share)])


def noise(samples: int) -> NDArray[np.float32]:
    return np.random.default_rng(4).standard_normal((samples, 1)).astype(np.float32)


def test_a_stream_of_unknown_length_is_read() -> None:
    """Programs that write WAV to a pipe leave its sizes open."""
    whole = bytearray(encoded(tone(16_000), 16_000))
    at = whole.index(b"data")
    whole[4:8] = whole[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    assert len(read(bytes(whole))) == 32_000


def test_a_file_that_claims_hours() -> None:
    whole = bytearray(encoded(tone(16_000), 16_000, "FLAC"))
    # STREAMINFO: the last 36 bits before the MD5 sum are the number of samples.
    claimed = 40 * 3600 * 16_000
    whole[22:26] = struct.pack(">I", claimed & 0xFFFFFFFF)
    with pytest.raises(AudioError, match=r"says that it lasts \d+ s; at most 14400 s are taken"):
        Recording(bytes(whole))
    with pytest.raises(AudioError, match=r"cut off|damaged"):
        read(bytes(whole), max_seconds=1e6)


def test_limits() -> None:
    data = encoded(tone(16_000), 16_000)
    with pytest.raises(AudioError, match="says that it lasts 2 s; at most 1 s are taken"):
        read(data, max_seconds=1)
    with pytest.raises(AudioError, match=rf"has {len(data)} bytes; at most 1000 are taken"):
        read(data, max_bytes=1000)


def test_samples_that_are_no_numbers() -> None:
    samples = tone(16_000)
    samples[100] = np.nan
    with pytest.raises(AudioError, match="not finite"):
        read(encoded(samples, 16_000, "WAV", "FLOAT"))


def test_too_many_channels() -> None:
    with pytest.raises(AudioError, match="has 65 channels; at most 64 are mixed"):
        read(encoded(tone(16_000, 65, 0.1), 16_000, "WAV", "PCM_16"))


def test_too_many_channels_for_the_rate() -> None:
    assert len(read(encoded(tone(48_000, 64, 0.1), 48_000))) == 1_600
    with pytest.raises(AudioError, match="64 channels of 192000 samples a second"):
        read(encoded(tone(192_000, 64, 0.1), 192_000))


def test_without_the_package_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=r"octavo\[audio\]: .* install 'soundfile"):
        Recording(encoded(tone(16_000), 16_000))


def test_recordings_at_other_rates_need_a_package_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    assert len(read(encoded(tone(16_000), 16_000))) == 32_000
    with pytest.raises(ConfigError, match=r"octavo\[audio\]: .* install .*soxr"):
        Recording(encoded(tone(48_000), 48_000))


def test_a_library_that_cannot_be_loaded_is_a_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "soundfile.py").write_text("raise OSError('sndfile library not found')")
    monkeypatch.delitem(sys.modules, "soundfile")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"sndfile library not found.*pip install .*soundfile"):
        import_soundfile()


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "W64", "VOC", "IRCAM", "PAF", "MAT5", "SVX"])
def test_other_containers_are_refused_by_name(kind: str) -> None:
    named = soundfile.available_formats()[kind]
    with pytest.raises(AudioError) as error:
        read(encoded(tone(16_000), 16_000, kind, "PCM_16"))
    assert named in str(error.value)
    assert "wav, flac, ogg (Vorbis or Opus) and mp3" in str(error.value)


@pytest.mark.parametrize("kind", ["WAVEX", "RF64"])
def test_kinds_of_wav_are_read(kind: str) -> None:
    assert len(read(encoded(tone(16_000), 16_000, kind))) == 32_000


@pytest.mark.parametrize(("channels", "rate"), [(8, 384_000), (1, 655_350), (1, 49_999), (1, 1_009)])
def test_memory_does_not_grow_with_channels_and_rate(channels: int, rate: int) -> None:
    """Ten seconds of the first are 123 MB."""
    data = io.BytesIO()
    with soundfile.SoundFile(data, "w", rate, channels, format="FLAC") as file:
        for _ in range(10):
            file.write(np.zeros((rate, channels), np.int16))
    with Recording(data.getvalue()) as recording:
        tracemalloc.start()
        num_samples = sum(len(piece) for piece in recording.pieces())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert abs(num_samples - 160_000) <= 1
    assert peak < 64 << 20


@pytest.mark.parametrize("rate", [999, 768_001])
def test_rates_beyond_the_limits_are_refused(rate: int) -> None:
    with pytest.raises(AudioError, match=f"has {rate} samples a second"):
        read(encoded(tone(rate, 1, 0.1), rate))


@pytest.mark.parametrize(("channels", "rate"), [(0, 16_000), (1, 0), (1, 0xFFFFFFFF), (1024, 48_000), (0xFFFF, 16_000)])
def test_headers_that_say_what_cannot_be_are_refused(channels: int, rate: int) -> None:
    whole = bytearray(encoded(tone(16_000), 16_000))
    struct.pack_into("<HI", whole, whole.index(b"fmt ") + 10, channels, rate)
    with pytest.raises(AudioError, match=r"(?i)channel|sampling rate|samples a second"):
        read(bytes(whole))


@pytest.mark.parametrize("rate", [1_000, 11_127, 44_056, 50_021, 88_200, 96_000, 192_000, 352_800, 383_999, 768_000])
def test_every_other_rate_is_read(rate: int) -> None:
    assert abs(len(read(encoded(tone(rate, 1, 0.5), rate))) - 8_000) < 20


def test_samples_of_all_channels_are_limited() -> None:
    data = encoded(tone(16_000, 6, 1.0), 16_000)
    assert len(read(data, max_samples=96_000)) == 16_000
    with pytest.raises(AudioError, match="96000 samples in 6 channels; at most 95999 are taken"):
        read(data, max_samples=95_999)


def test_a_decoder_goes_on_after_any_block_with_the_same_bits() -> None:
    samples = tone(16_000, 2, 30.0) + 0.1 * noise(480_000)
    for kind, subtype in (("WAV", "PCM_16"), ("WAV", "IMA_ADPCM"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)):
        data = encoded(samples, 16_000, kind, subtype)
        decoder = Decoder(io.BytesIO(data), AudioLimits(), "it")
        for place, block in [(decoder.position, decoder.read()) for _ in range(3)]:
            decoder = Decoder(io.BytesIO(data), AudioLimits(), "it")
            decoder.skip_to(place)
            assert decoder.position == place
            assert np.array_equal(decoder.read(), block), (kind, place)


def test_errors_are_those_of_a_bad_request() -> None:
    assert issubclass(AudioError, InvalidRequestError)
