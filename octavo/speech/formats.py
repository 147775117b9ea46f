"""Transcriptions as text, subtitles and JSON, as the OpenAI API has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from octavo.speech.languages import LANGUAGES
from octavo.speech.segments import Segment, Transcription, Word


def as_text(made: Transcription) -> str:
    """The text, and a line's end."""
    return made.text + "\n"


def as_srt(made: Transcription) -> str:
    """SubRip subtitles: a number, times with a comma, text."""
    blocks = [
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{_line(segment)}\n"
        for number, segment in enumerate(made.segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(made: Transcription) -> str:
    """WebVTT subtitles."""
    blocks = [
        f"{clock(segment.start, '.')} --> {clock(segment.end, '.')}\n{_line(segment)}\n" for segment in made.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _line(segment: Segment) -> str:
    """The text of a cue: an arrow in it would be taken for that of its times."""
    return segment.text.strip().replace("-->", "->")


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and thousandths, as in 01:02:03.456."""
    thousandths = max(0, round(seconds * 1000))
    rest, thousandths = divmod(thousandths, 1000)
    minutes, rest = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}{point}{thousandths:03}"


def usage(made: Transcription) -> dict[str, Any]:
    """What was computed, by the seconds of the recording, as the API bills it for this kind of model."""
    return {"type": "duration", "seconds": round(made.duration)}


def json_object(made: Transcription) -> dict[str, Any]:
    """The answer of ``response_format`` "json"."""
    return {"text": made.text, "usage": usage(made)}


def verbose_object(made: Transcription, granularities: Iterable[str] = ("segment",)) -> dict[str, Any]:
    """The answer of ``response_format`` "verbose_json"; ``granularities``: "segment", "word" or both."""
    parts = set(granularities)
    answer: dict[str, Any] = {
        "task": made.task,
        "language": LANGUAGES.get(made.language, made.language),
        "duration": round(made.duration, 2),
        "text": made.text,
    }
    if "word" in parts:
        answer["words"] = [_word(word) for segment in made.segments for word in segment.words or ()]
    if "segment" in parts:
        answer["segments"] = [segment_object(segment) for segment in made.segments]
    return answer | {"usage": usage(made)}


def segment_object(segment: Segment) -> dict[str, Any]:
    """A segment as JSON."""
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob or 0.0,
    }


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.word.strip(), "start": word.start, "end": word.end}


def _as_json(made: Transcription) -> str:
    return json.dumps(json_object(made), ensure_ascii=False) + "\n"


def _as_verbose_json(made: Transcription) -> str:
    has_words = any(segment.words is not None for segment in made.segments)
    parts = ("segment", "word") if has_words else ("segment",)
    return json.dumps(verbose_object(made, parts), ensure_ascii=False, indent=2) + "\n"


#: By the name of ``response_format``.
FORMATS: dict[str, Callable[[Transcription], str]] = {
    "json": _as_json,
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "verbose_json": _as_verbose_json,
}
