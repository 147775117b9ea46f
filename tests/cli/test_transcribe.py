"""``octavo transcribe``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SPEECH = Path(__file__).resolve().parent.parent / "data" / "speech.ogg"


def test_files_are_written_and_one_fails_alone(
    octavo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "notes.mp3"
    bad.write_text("no recording at all, but some text\n" * 20)
    made = tmp_path / "subtitles" / "new"
    flags = ("--format", "srt", "--output-dir", made, "--dtype", "float32", "--json", tmp_path / "figures")
    assert octavo("transcribe", SPEECH, bad, *flags) == 1
    subtitles = (made / "speech.srt").read_text()
    assert subtitles.startswith("1\n00:00:00,000 --> 00:00:0")
    assert "lazy dog" in subtitles
    assert not (made / "notes.srt").exists()
    assert f"octavo: error: {bad} is a text file" in capsys.readouterr().err
    figures = json.loads((tmp_path / "figures").read_text())
    assert (figures["recordings"], figures["failed"]) == (2, 1)
    assert 7 < figures["audio_seconds"] < 9


@pytest.mark.slow
def test_times_of_words(octavo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("transcribe", SPEECH, "--format", "verbose_json", "--word-timestamps", "--temperature", 0) == 0
    made = json.loads(capsys.readouterr().out)
    assert " ".join(word["word"] for word in made["words"]) == made["text"]
    assert all(0 <= word["start"] <= word["end"] <= made["duration"] for word in made["words"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no recording given"),
        (("a.wav", "b.wav", "--format", "srt"), "--format srt of 2 recordings needs --output-dir"),
        (("a.wav", "x/a.mp3", "--output-dir", "."), "two recordings would be written to"),
        ((SPEECH, "--output-dir", SPEECH / "below"), "speech.ogg/below cannot be made"),
        (("a.wav", "--task", "sing"), "task must be 'transcribe' or 'translate', not 'sing'"),
        (("a.wav", "--word-timestamps"), "--word-timestamps needs --format verbose_json: text has no times of words"),
        (("a.wav", "--temperature", "5"), "temperature must be in [0, 2], not 5.0"),
        (("a.wav", "--language", "english", "--format", "pdf"), "invalid choice: 'pdf'"),
    ],
)
def test_wrong_calls(
    octavo: Callable[..., int], capsys: pytest.CaptureFixture[str], words: tuple[object, ...], message: str
) -> None:
    assert octavo("transcribe", *words) == 2
    assert message in capsys.readouterr().err


def test_without_what_decodes_no_model_is_looked_for(
    octavo: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setattr("octavo.engine.model_files.find_files", lambda config: pytest.fail("a model is looked for"))
    assert octavo("transcribe", SPEECH) == 2
    error = capsys.readouterr().err
    assert f"{sys.executable} -m pip install" in error
    assert "soundfile" in error


def test_a_model_for_texts_is_refused_before_it_is_loaded(
    octavo: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo("transcribe", SPEECH, "--model", "smollm2-135m") == 2
    assert "cannot transcribe: it reads text" in capsys.readouterr().err


def test_files_that_are_missing_are_reported_before_a_model_is_looked_for(
    octavo: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "subtitles"
    assert octavo("transcribe", "a.wav", "b.wav", "--model", "no/where", "--output-dir", folder) == 1
    said = capsys.readouterr().err
    assert "a.wav cannot be read" in said and "b.wav cannot be read" in said and "no/where" not in said
    assert not folder.exists()


def test_the_package_that_reads_recordings_is_asked_for_before_a_model(
    octavo: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert octavo("transcribe", SPEECH, "--model", "no/where") == 2
    assert "octavo[audio]" in capsys.readouterr().err


def test_help_has_examples(octavo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("transcribe", "--help") == 0
    assert "octavo transcribe talk.mp3 --format srt > talk.srt" in capsys.readouterr().out
