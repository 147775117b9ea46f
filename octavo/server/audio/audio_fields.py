"""Fields of requests about recordings, which come as the parts of a form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.field_marks import hint, refused
from octavo.server.foreign_fields import Labels
from octavo.server.protocol_base import Int, Name, Seed

_SAMPLER = "the temperature is what there is"
#: Fields whose values are texts; those of others are read as JSON where they are such.
_TEXTS = frozenset({"model", "language", "prompt", "hotwords", "response_format", "user", "cache_salt", "to_language"})
#: Fields that may come several times: as ``name[]``.
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
Context = Annotated[str, Field(max_length=10_000)]


class AudioRequest(Labels):
    """Fields of both routes; ``file``, the recording, is read beside them."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: Context | None = Field(
        None, description="Text before the recording, which sets its style and how names are written."
    )
    response_format: ResponseFormat = Field(
        "json", description="Form of the answer; a stream has events whatever it says."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0, the default: the likeliest answer, drawn at 0.2, 0.4, ... 1 where it looks wrong."
    )
    stream: bool | None = Field(None, description="Send the text of each part as soon as it is certain.")
    hotwords: Context | None = Field(None, description="Words that may occur in the recording.")
    condition_on_previous_text: bool | None = Field(
        None, description="Go on from the text before each 30 seconds (default: true)."
    )
    compression_ratio_threshold: float | None = Field(
        None, description="An answer is drawn again if zlib makes it smaller than by this factor (default: 2.4)."
    )
    logprob_threshold: float | None = Field(
        None, description="An answer is drawn again if its tokens' mean logprob is lower (default: -1)."
    )
    no_speech_threshold: float | None = Field(
        None, description="A window that is silent with a higher probability has no text (default: 0.6)."
    )
    seed: Seed | None = Field(None, description="Of what is drawn at temperatures above 0.")
    user: Name | None = Field(
        None, description="Whose request it is, for scheduling policies that look at it; the result is the same."
    )
    priority: Int | float | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    ttft_target: float | None = Field(
        None, description="Seconds to the first token that the deadline policy aims at; refused under others."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached recording."
    )
    include: Any = refused("logprobs are not sent; verbose_json has the mean of each segment", [])
    chunking_strategy: Any = hint("a window begins where what was said before it ends")
    known_speaker_names: Any = refused("speakers are not told apart", [])
    known_speaker_references: Any = refused("speakers are not told apart", [])
    vad_filter: Any = refused("silence is found by the model's own probability (no_speech_threshold)", False)
    use_beam_search: Any = refused("answers are drawn one at a time", False)
    n: Any = refused("there is one answer", 1)
    max_completion_tokens: Any = refused("the model's context bounds the answer to each 30 seconds")
    top_p: Any = refused(_SAMPLER, 1)
    top_k: Any = refused(_SAMPLER, 0, -1)
    min_p: Any = refused(_SAMPLER, 0)
    repetition_penalty: Any = refused(_SAMPLER, 1)
    frequency_penalty: Any = refused(_SAMPLER, 0)
    presence_penalty: Any = refused(_SAMPLER, 0)
    stream_include_usage: Any = hint("the last event has it")
    stream_continuous_usage_stats: Any = hint("the last event has it")
    vllm_xargs: Any = refused("there is nothing that takes arguments here", {})


class TranscriptionRequest(AudioRequest):
    """Of ``/v1/audio/transcriptions``."""

    language: Name | None = Field(
        None, description="Code or name of the language that is spoken; default: it is detected."
    )
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, description="What verbose_json has times of (default: segments); comes as timestamp_granularities[]."
    )
    to_language: Any = refused("/v1/audio/translations translates into English")


class TranslationRequest(AudioRequest):
    """Of ``/v1/audio/translations``: into English."""

    language: Name | None = Field(
        None, description="Code or name of the language that is spoken; default: it is detected."
    )
    to_language: Any = refused("translations are English", "en", "english")


def read_values(parts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values of a form's texts as they would be in JSON.

    Raises:
        ValueError: a field comes twice; the message names it.
    """
    values: dict[str, Any] = {}
    for name, text in parts:
        plain = name.removesuffix("[]")
        if plain in _LISTS:
            values.setdefault(plain, []).append(text)
        elif name in values:
            raise ValueError(f"the field {name[:100]!r} comes twice")
        else:
            values[name] = text if name in _TEXTS else _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
