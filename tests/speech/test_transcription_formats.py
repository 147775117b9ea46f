"""Texts, subtitles and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octavo.speech.log_mel import AudioWindows
from octavo.speech.segments import LANGUAGES, Segment, Transcription, Word, language_code
from octavo.speech.transcription import FORMATS, clock, verbose_object

WORDS = [Word(" Hello", 0.0, 0.5, 0.9), Word(" there.", 0.5, 1.25, 0.8)]
MADE = Transcription(
    "Hello there. A --> B",
    "en",
    62.4,
    [
        Segment(0, 0.0, 1.25, " Hello there.", [1, 2], 0, 0.0, -0.25, 1.1, None, WORDS),
        Segment(1, 61.02, 62.4, " A --> B", [3], 0, 0.0, -0.25, 1.1, 0.5),
    ],
)


def test_text() -> None:
    assert FORMATS["text"](MADE) == "Hello there. A --> B\n"


def test_srt() -> None:
    assert FORMATS["srt"](MADE) == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n00:01:01,020 --> 00:01:02,400\nA -> B\n"
    )


def test_vtt() -> None:
    assert FORMATS["vtt"](MADE) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello there.\n\n00:01:01.020 --> 00:01:02.400\nA -> B\n"
    )


def test_json() -> None:
    assert json.loads(FORMATS["json"](MADE)) == {
        "text": "Hello there. A --> B",
        "usage": {"type": "duration", "seconds": 62},
    }


def test_verbose_json_is_what_the_openai_client_reads() -> None:
    from openai.types.audio import TranscriptionVerbose

    answer = TranscriptionVerbose.model_validate(verbose_object(MADE, ["segment", "word"]))
    assert answer.language == "english"
    assert answer.segments is not None
    assert answer.segments[1].no_speech_prob == 0.5
    assert answer.words is not None
    assert [(word.word, word.start, word.end) for word in answer.words] == [("Hello", 0.0, 0.5), ("there.", 0.5, 1.25)]
    assert "words" not in verbose_object(MADE)
    assert "segments" not in verbose_object(MADE, ["word"])


def test_nothing_said() -> None:
    silent = Transcription("", "en", 3.0)
    assert FORMATS["srt"](silent) == ""
    assert FORMATS["vtt"](silent) == "WEBVTT\n"
    assert FORMATS["text"](silent) == "\n"


def test_clock() -> None:
    assert clock(0.0004, ".") == "00:00:00.000"
    assert clock(59.9996, ",") == "00:01:00,000"
    assert clock(10 * 3600 + 0.02, ".") == "10:00:00.020"


def test_languages_by_code_and_name() -> None:
    assert len(LANGUAGES) == 100
    for given in ("en", "EN", "english", " English ", "en-US", "en_GB"):
        assert language_code(given) == "en"
    assert language_code("castilian") == "es"


@pytest.mark.parametrize("size", [1, 7_777, 100_000, 10_000_000])
def test_windows_are_the_recording_from_where_they_begin(size: int) -> None:
    audio = np.arange(1_600_000, dtype=np.float32)
    windows = AudioWindows(audio[i : i + size] for i in range(0, len(audio) if size > 1 else 1, size))
    audio = audio if size > 1 else audio[:1]
    for start in (0, 0, 16_000, 300_000, 300_001, 1_200_000, 1_599_999, 1_600_000):
        assert np.array_equal(windows.window(start), audio[start : start + 480_000])
    with pytest.raises(ValueError, match="given up"):
        windows.window(5)


def test_windows_hold_no_more_than_one_and_a_piece() -> None:
    windows = AudioWindows(np.zeros(160_000, np.float32) for _ in range(720))  # two hours
    start, most = 0, 0
    while len(window := windows.window(start)):
        most, start = max(most, len(windows._held)), start + min(len(window), 400_000)
    assert start == 720 * 160_000
    assert most <= 480_000 + 160_000
