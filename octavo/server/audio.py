"""Recordings: the routes for transcriptions and translations, whose bodies are forms."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.server_options import FORM_BYTES
from octavo.core.errors import AudioError, ConfigError, WorkerError
from octavo.core.outputs import RequestOutput
from octavo.process.children import WorkThread
from octavo.server.engine_call import EngineCall, new_response_id, request_options
from octavo.server.fields import Name, QueuedFields, Seed
from octavo.server.http.bodies import read_model
from octavo.server.http.errors import ApiError, invalid
from octavo.server.http.streaming import EventStream, with_cancellation
from octavo.server.logging import log_fields
from octavo.server.metrics import RequestObserver
from octavo.server.state import ServerState, state_of
from octavo.speech.audio_files import AudioLimits
from octavo.speech.audio_reader import AudioReader, SandboxRecording
from octavo.speech.segments import Segment, Transcription
from octavo.speech.transcription import Task, TranscriptionParams, as_srt, as_text, as_vtt, json_object, verbose_object

logger = logging.getLogger("octavo.server")

# Fields of requests, which are the parts of a form.

#: Fields whose values are texts; the values of others are read as JSON where they are JSON.
_TEXTS = frozenset({"model", "language", "prompt", "hotwords", "response_format", "user", "cache_salt", "to_language"})
#: Fields that may be repeated, as ``name[]``.
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
Context = Annotated[str, Field(max_length=10_000)]


class AudioRequest(QueuedFields):
    """Fields of both routes; ``file``, the recording, is not one of them."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: Context | None = Field(None, description="Text before the recording: its style, and spellings of names.")
    language: Name | None = Field(None, description="Code or name of the spoken language; default: detected.")
    response_format: ResponseFormat = Field("json", description="Format of the response; a stream always has events.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 (default): greedy, with a fallback to 0.2, 0.4, ... 1."
    )
    stream: bool | None = Field(None, description="Send the text of each segment as soon as it is certain.")
    hotwords: Context | None = Field(None, description="Words that may occur in the recording.")
    condition_on_previous_text: bool | None = Field(None, description="Continue the text of a window (default: true).")
    compression_ratio_threshold: float | None = Field(
        None, description="A text that zlib compresses by more than this factor is sampled again (default: 2.4)."
    )
    logprob_threshold: float | None = Field(
        None, description="A text with a lower mean logprob is sampled again (default: -1)."
    )
    no_speech_threshold: float | None = Field(
        None, description="A window with a higher probability of silence has no text (default: 0.6)."
    )
    seed: Seed | None = Field(None, description="Makes sampling reproducible.")


class TranscriptionRequest(AudioRequest):
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, description="Timestamps of verbose_json (default: segments); sent as timestamp_granularities[]."
    )


class TranslationRequest(AudioRequest):
    """A recording to translate into English."""


def read_values(parts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values of a form's texts as JSON has them; raises ``ValueError`` if a field comes twice."""
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


# The form.

R = TypeVar("R", bound=AudioRequest)

#: Most texts in a form (all together have at most FORM_BYTES), and bytes of the head of a part.
_MAX_FIELDS = 100
_MAX_HEAD_BYTES = 16 << 10
_FILE = "file"
#: Bytes that are searched at once: a few milliseconds, after which other threads have a turn.
_SLICE = 1 << 20
#: Longest boundary (RFC 2046, 5.1.1), and most spaces after one.
_MAX_BOUNDARY = 70
_MAX_PADDING = 16

_splitter = WorkThread("forms")


@dataclass(frozen=True)
class Upload:
    #: For errors.
    name: str
    data: bytes


@dataclass(frozen=True)
class Part:
    name: str
    #: None: the part is a text; else it is a file, whose name may be empty.
    filename: str | None
    data: bytes


def split_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form (multipart/form-data: RFC 7578), in their order."""
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _invalid("its Content-Type names no boundary")
    parts, num_files, text_bytes = list[Part](), 0, 0
    for start, end in _spans(body, boundary):
        head_end = body.find(b"\r\n\r\n", start - 2, min(end, start + _MAX_HEAD_BYTES))
        if head_end < 0:
            raise _invalid("a part has no head, or a longer one than is read")
        name, filename = _names(body[start:head_end])
        num_files += filename is not None
        text_bytes += end - start if filename is None else 0
        if num_files > 1:
            raise _invalid("it has several files")
        if len(parts) - num_files >= _MAX_FIELDS:
            raise _invalid(f"it has more than {_MAX_FIELDS} texts")
        if text_bytes > FORM_BYTES:
            raise _invalid(f"its texts have more than {FORM_BYTES} bytes")
        parts.append(Part(name, filename, body[head_end + 4 : end]))
    return parts


def _spans(body: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of each part, with its head, between two boundaries.

    Lines that only begin like a boundary belong to the content.
    """
    delimiter = b"--" + re.escape(boundary) + rb"(?:(--)|[ \t]{0,%d}\r\n)" % _MAX_PADDING
    # The line break before a boundary belongs to it; only the first one may be without.
    match, pattern = re.compile(delimiter).match(body), re.compile(rb"\r\n" + delimiter)
    overlap = len(boundary) + _MAX_PADDING + 8
    start, position = -1, 0
    while match or position < len(body):
        match = match or pattern.search(body, position, position + _SLICE + overlap)
        if match is None:
            position += _SLICE
            continue
        if start >= 0:
            yield start, max(start, match.start())
        if match.group(1):
            return
        start = match.end()
        position = start - 2  # the line break before a part without content belongs to the next boundary, too
        match = None
    raise _invalid("it ends before its last boundary")


def _names(head: bytes) -> tuple[str, str | None]:
    from python_multipart.multipart import parse_options_header

    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition":
            _, options = parse_options_header(value.strip())
            if b"name" in options:
                filename = options.get(b"filename")
                return _text(options[b"name"]), None if filename is None else _text(filename)
    raise _invalid("a part has no name (Content-Disposition)")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")


async def read_form(request: Request, kind: type[R], service: ServerState) -> tuple[R, Upload]:
    """The fields and the recording of a form."""
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        message = "the body must be a form (multipart/form-data) with the recording as its part 'file'"
        raise ApiError(400, message, code="invalid_form")
    # Only texts and recording are kept of the body.
    values, file = await _splitter.run(_read_parts, [piece async for piece in request.stream() if piece], content_type)
    if file is None or file.filename is None:
        problem = "is missing" if file is None else "is a text"
        raise invalid(_FILE, f"file: it {problem}; send the recording as a file", "missing_file")
    name = f"the file {file.filename[:100]!r}" if file.filename else "the file"
    return read_model(kind, values, service), Upload(name, file.data)


def _read_parts(pieces: list[bytes], content_type: str) -> tuple[dict[str, Any], Part | None]:
    parts = split_form(b"".join(pieces), content_type)
    file = next((part for part in reversed(parts) if part.name == _FILE), None)
    texts = ((part.name, _text(part.data)) for part in parts if part.filename is None and part.name != _FILE)
    try:
        return read_values(texts), file
    except ValueError as e:
        raise ApiError(400, str(e), code="invalid_form") from None


# The recording in the engine.

#: Audio tokens of the usage: the encoder's output positions.
_AUDIO_TOKENS_PER_SECOND = 50


def make_params(body: AudioRequest, task: Task) -> TranscriptionParams:
    """The parameters of a request; raises ``InvalidRequestError``."""
    names = (
        "language", "prompt", "hotwords", "temperature", "condition_on_previous_text", "compression_ratio_threshold",
        "logprob_threshold", "no_speech_threshold", "seed",
    )  # fmt: skip
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if not body.temperature:  # 0 has its meaning of this API: greedy, with higher temperatures as a fallback
        fields.pop("temperature", None)
    return TranscriptionParams(task=task, word_timestamps="word" in granularities(body), **fields)


def granularities(body: AudioRequest) -> Sequence[str]:
    return (body.timestamp_granularities or ()) if isinstance(body, TranscriptionRequest) else ()


async def transcribe(
    call: EngineCall[RequestOutput], upload: Upload, params: TranscriptionParams, *, scores: bool
) -> AsyncGenerator[Segment | Transcription, None]:
    """The segments of the recording, and then the whole; the end of the iteration ends the work in the engine.

    The recording is decoded in the sandbox; its windows are requests of the engine.
    """
    service, begun = call.service, time.monotonic()
    with call.admitted({call.response_id: 1}):
        opened = await _open(service, upload, call.options.client)
    observer = RequestObserver(service.metrics)
    try:
        made = service.llm.transcribe(call.response_id, opened, params, call.options, scores=scores)
        async with contextlib.aclosing(made):
            async for part in made:
                if isinstance(part, Transcription):
                    observer.add_prompt(part.prompt_tokens + audio_tokens(part))
                    observer.add_tokens(part.completion_tokens)
                    observer.end("stop", time.monotonic() - begun)
                    log_fields(call.request.scope).update(
                        audio_seconds=round(part.duration, 2), completion_tokens=part.completion_tokens
                    )
                yield part
    except AudioError as e:
        observer.end("error")
        raise invalid_audio(e) from None
    except WorkerError as e:
        observer.end("error")
        raise call.engine_failed(call.response_id, e, "the recording", _FILE) from None
    finally:
        observer.close()


async def _open(service: ServerState, upload: Upload, client: str) -> SandboxRecording:
    limits = AudioLimits(service.options.max_audio_bytes, service.options.max_audio_seconds)
    try:
        return await AudioReader(service.llm.inputs.sandbox, limits).open(upload.data, client=client, name=upload.name)
    except AudioError as e:
        raise invalid_audio(e) from None
    except ConfigError as e:  # its message names folders of this machine
        logger.error("%s", e)
        message = "this server cannot read the recording: its extra octavo[audio] is not installed"
        # Not 501, which would be right: clients repeat requests with a status from 500 on.
        raise invalid(_FILE, message, "audio_not_installed") from None


def invalid_audio(error: AudioError) -> ApiError:
    return invalid(_FILE, str(error), "invalid_audio")


def audio_tokens(made: Transcription) -> int:
    return round(made.duration * _AUDIO_TOKENS_PER_SECOND)


# The routes.

#: ``response_format`` -> writer and media type; others are JSON.
_TEXT_FORMATS = {"text": (as_text, "text/plain"), "srt": (as_srt, "text/plain"), "vtt": (as_vtt, "text/vtt")}


async def create_transcription(request: Request) -> Response:
    """The text of a recording, in the language that is spoken."""
    return await _respond(request, TranscriptionRequest, "transcribe")


async def create_translation(request: Request) -> Response:
    """The text of a recording in English."""
    return await _respond(request, TranslationRequest, "translate")


async def _respond(request: Request, kind: type[AudioRequest], task: Task) -> Response:
    service = state_of(request)
    deadline = service.deadline()
    service.require("transcribe")
    body, upload = await read_form(request, kind, service)
    model = await service.model(body.model)
    if model.adapter is not None:
        raise ApiError(400, f"model: {model.name!r} is an adapter, which this route does not support", param="model")
    if "word" in granularities(body) and body.response_format != "verbose_json":
        name = "timestamp_granularities"
        raise invalid(name, f"{name}: times of words need response_format verbose_json")
    params = make_params(body, task)
    next(service.llm.front_end.speech.loop(params))  # checks them
    call = EngineCall[RequestOutput](
        service=service,
        request=request,
        model=model,
        response_id=new_response_id("audio"),
        options=request_options(request, body),
    )
    # A stream has no field for the scores.
    parts = transcribe(call, upload, params, scores=body.response_format == "verbose_json" and not body.stream)
    if body.stream:
        return EventStream(_events(parts), deadline)

    async def finish() -> Transcription:
        async with contextlib.aclosing(parts):
            *_, made = [part async for part in parts]
        assert isinstance(made, Transcription)
        return made

    made = await with_cancellation(request.receive, finish(), deadline)
    if body.response_format in _TEXT_FORMATS:
        write, media_type = _TEXT_FORMATS[body.response_format]
        return Response(write(made), media_type=media_type)
    if body.response_format == "json":
        content = json_object(made)
    else:
        content = verbose_object(made, granularities(body) or ("segment",))
    return Response(_json(content), media_type="application/json")


async def _events(parts: AsyncGenerator[Segment | Transcription, None]) -> AsyncGenerator[bytes, None]:
    is_first = True
    async with contextlib.aclosing(parts):
        async for part in parts:
            if isinstance(part, Segment):
                text, is_first = part.text.lstrip() if is_first else part.text, False
                yield _event({"type": "transcript.text.delta", "delta": text})
            else:
                audio = audio_tokens(part)
                usage = {
                    "type": "tokens",
                    "input_tokens": part.prompt_tokens + audio,
                    "output_tokens": part.completion_tokens,
                    "total_tokens": part.prompt_tokens + audio + part.completion_tokens,
                    "input_token_details": {"audio_tokens": audio, "text_tokens": part.prompt_tokens},
                }
                yield _event({"type": "transcript.text.done", "text": part.text, "usage": usage})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def form_schema(kind: type[AudioRequest]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "The recording: wav, flac, ogg or mp3."}
    return {**schema, "properties": {"file": file, **schema["properties"]}, "required": ["file"]}
