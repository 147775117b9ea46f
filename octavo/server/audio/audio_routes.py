"""The routes ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.api_errors import ApiError
from octavo.server.audio.audio_fields import AudioRequest, TranscriptionRequest, TranslationRequest
from octavo.server.audio.audio_form import Upload, read_form
from octavo.server.audio.audio_run import AudioRun, answer, audio_tokens, wants_words
from octavo.server.cancellation import with_cancellation
from octavo.server.service import service_of
from octavo.server.streaming import EventStream
from octavo.speech.segments import Segment, Transcription
from octavo.speech.transcription_params import Task

#: Types of content by ``response_format``; others are JSON.
_CONTENT = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


async def create_transcription(request: Request) -> Response:
    """What is said in a recording, in the language that is spoken."""
    return await _respond(request, TranscriptionRequest, "transcribe")


async def create_translation(request: Request) -> Response:
    """What is said in a recording, in English."""
    return await _respond(request, TranslationRequest, "translate")


async def _respond(request: Request, kind: type[AudioRequest], task: Task) -> Response:
    service = service_of(request)
    deadline = service.deadline()
    service.require("transcribe")
    body, upload = await read_form(request, kind, service)
    named = await service.model(body.model)
    if named.adapter is not None:
        raise ApiError(400, f"model: {named.name!r} is an adapter, of which this route takes none", param="model")
    if wants_words(body) and body.response_format != "verbose_json":
        message = "timestamp_granularities: times of words need response_format verbose_json"
        raise ApiError(400, message, param="timestamp_granularities", code="invalid_value")
    run = AudioRun(request, service, body, task)
    if body.stream:
        return EventStream(_events(run, upload), deadline)
    made: Transcription = await with_cancellation(request.receive, run.whole(upload), deadline)
    content = answer(made, body)
    if isinstance(content, str):
        return Response(content, media_type=_CONTENT[body.response_format])
    return Response(_json(content), media_type="application/json")


async def _events(run: AudioRun, upload: Upload) -> AsyncGenerator[bytes, None]:
    """An event for the text of each segment, and one with all of it."""
    is_first = True
    async with contextlib.aclosing(run.parts(upload)) as parts:
        async for part in parts:
            if isinstance(part, Segment):
                text, is_first = part.text.lstrip() if is_first else part.text, False
                yield _event({"type": "transcript.text.delta", "delta": text})
            else:
                yield _event({"type": "transcript.text.done", "text": part.text, "usage": _usage(part)})


def _usage(made: Transcription) -> dict[str, Any]:
    audio = audio_tokens(made)
    return {
        "type": "tokens",
        "input_tokens": made.prompt_tokens + audio,
        "output_tokens": made.completion_tokens,
        "total_tokens": made.prompt_tokens + audio + made.completion_tokens,
        "input_token_details": {"audio_tokens": audio, "text_tokens": made.prompt_tokens},
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def add_audio_routes(add: Callable[..., None]) -> None:
    """Registers the routes; ``add`` is given method, path, endpoint, the response's model, tag and form."""
    add("POST", "/v1/audio/transcriptions", create_transcription, None, "OpenAI", form=_form(TranscriptionRequest))
    add("POST", "/v1/audio/translations", create_translation, None, "OpenAI", form=_form(TranslationRequest))


def _form(kind: type[AudioRequest]) -> dict[str, Any]:
    """The JSON schema of the form."""
    schema = kind.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "The recording: wav, flac, ogg or mp3."}
    return {**schema, "properties": {"file": file, **schema["properties"]}, "required": ["file"]}
