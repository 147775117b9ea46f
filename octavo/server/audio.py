"""The routes for recordings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.config.server_options import FORM_BYTES
from octavo.core.errors import AudioError, ConfigError, WorkerError
from octavo.core.request import RequestOptions
from octavo.server.fields import Int, Labels, Name, Seed, hint, refused
from octavo.server.http.bodies import read_model
from octavo.server.http.errors import ApiError
from octavo.server.http.middleware import client_of
from octavo.server.http.streaming import EventStream, with_cancellation
from octavo.server.logging import log_fields
from octavo.server.state import ServerState, state_of
from octavo.speech.audio_files import AudioLimits
from octavo.speech.audio_reader import AudioReader, SandboxRecording
from octavo.speech.segments import Segment, Transcription
from octavo.speech.transcription import Task, TranscriptionParams, as_srt, as_text, as_vtt, json_object, verbose_object

# Fields of requests about recordings, which come as the parts of a form.

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


# Reads a form with a recording, as OpenAI's clients send it.

R = TypeVar("R", bound=AudioRequest)

#: Most texts in a form; all of them have at most FORM_BYTES. Bytes of the head of a part.
_MAX_FIELDS = 100
_MAX_HEAD_BYTES = 16 << 10
_FILE = "file"
#: Bytes that are searched at once: some milliseconds, after which other threads have a turn.
_SLICE = 1 << 20
#: Longest boundary (RFC 2046, 5.1.1), and most spaces after one that are taken.
_MAX_BOUNDARY = 70
_MAX_PADDING = 16

#: A single thread, as for other large bodies.
_splitter = ThreadPoolExecutor(1, thread_name_prefix="octavo-forms")


@dataclass(frozen=True)
class Upload:
    """A recording as it was sent."""

    #: What errors call it.
    name: str
    data: bytes


@dataclass(frozen=True)
class Part:
    """One part of a form."""

    name: str
    #: None: the part is a text; else it is a file, whose name may be empty.
    filename: str | None
    data: bytes


def split_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form (multipart/form-data: RFC 7578), in their order.

    Raises:
        ApiError: 400, it is no form, or has too much in it.
    """
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

    What only begins as a boundary does is part of the content.
    """
    delimiter = b"--" + re.escape(boundary) + rb"(?:(--)|[ \t]{0,%d}\r\n)" % _MAX_PADDING
    # The line break before a boundary belongs to it; only the first one may be without.
    found, pattern = re.compile(delimiter).match(body), re.compile(rb"\r\n" + delimiter)
    overlap = len(boundary) + _MAX_PADDING + 8
    start, position = -1, 0
    while found or position < len(body):
        found = found or pattern.search(body, position, position + _SLICE + overlap)
        if found is None:
            position += _SLICE
            continue
        if start >= 0:
            yield start, max(start, found.start())
        if found.group(1):
            return
        start = found.end()
        position = start - 2  # of a part without content the line break is the next boundary's, too
        found = None
    raise _invalid("it ends before its last boundary")


def _names(head: bytes) -> tuple[str, str | None]:
    """Name and file name in the head of a part."""
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
    """The fields and the recording of a form.

    Raises:
        ApiError: 400, it is no form, has no recording or several, or a field is wrong.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        message = "the body must be a form (multipart/form-data) with the recording as its part 'file'"
        raise ApiError(400, message, code="invalid_form")
    values, file = await _in_thread(request, content_type)
    if file is None or file.filename is None:
        what = "is missing" if file is None else "is a text"
        raise ApiError(400, f"file: it {what}; send the recording as a file", param=_FILE, code="missing_file")
    name = f"the file {file.filename[:100]!r}" if file.filename else "the file"
    return read_model(kind, values, service), Upload(name, file.data)


async def _in_thread(request: Request, content_type: str) -> tuple[dict[str, Any], Part | None]:
    """The values of the texts and the recording of a body, of which nothing else is kept."""
    bodies = [piece async for piece in request.stream() if piece]

    def split() -> tuple[dict[str, Any], Part | None]:
        parts = split_form(b"".join(bodies), content_type)
        file = next((part for part in reversed(parts) if part.name == _FILE), None)
        texts = ((part.name, _text(part.data)) for part in parts if part.filename is None and part.name != _FILE)
        try:
            return read_values(texts), file
        except ValueError as e:
            raise ApiError(400, str(e), code="invalid_form") from None

    return await asyncio.get_running_loop().run_in_executor(_splitter, split)


# One recording of one HTTP request: decoded within limits, transcribed by the engine, counted.

logger = logging.getLogger("octavo.server")

#: Positions of an encoder's output for a second: what the usage counts as tokens of audio.
_AUDIO_TOKENS_PER_SECOND = 50


def make_params(body: AudioRequest, task: Task) -> TranscriptionParams:
    """The parameters that a request asks for.

    Raises:
        InvalidRequestError: one is wrong.
    """
    given = {
        "language": getattr(body, "language", None),
        "prompt": body.prompt,
        "hotwords": body.hotwords,
        # 0 means as everywhere in this API: the likeliest, and others where that looks wrong.
        "temperature": body.temperature or None,
        "condition_on_previous_text": body.condition_on_previous_text,
        "compression_ratio_threshold": body.compression_ratio_threshold,
        "logprob_threshold": body.logprob_threshold,
        "no_speech_threshold": body.no_speech_threshold,
        "seed": body.seed,
    }
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return TranscriptionParams(task=task, word_timestamps=wants_words(body), **known)


def wants_words(body: AudioRequest) -> bool:
    """Whether a request asks for the times of words."""
    return isinstance(body, TranscriptionRequest) and "word" in (body.timestamp_granularities or ())


class AudioRun:
    """The recording of a request, decoded in the sandbox; its windows are requests of the engine."""

    def __init__(self, request: Request, service: ServerState, body: AudioRequest, task: Task) -> None:
        """Raises:
        InvalidRequestError: a parameter is wrong, or the model cannot do what it asks.
        """
        self._request, self._service, self.body = request, service, body
        self._params = make_params(body, task)
        next(service.llm.front_end.speech.loop(self._params))
        self._id = f"audio-{uuid.uuid4().hex}"
        self._begun = time.monotonic()
        self._options = RequestOptions(
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            user=body.user or "",
            ttft_target=body.ttft_target,
            client=client_of(request),
        )

    async def parts(self, upload: Upload) -> AsyncGenerator[Segment | Transcription, None]:
        """The segments of the recording, and then all of it; what runs in the engine ends with the iteration.

        Raises:
            ApiError: the recording cannot be read, the queue is full, or the engine failed.
        """
        service, reason = self._service, "abort"
        service.queue.enter({self._id: 1})
        try:
            opened = await self._open(upload)
        finally:
            service.queue.leave(self._id)
        # What streams has no place for it.
        scores = self.body.response_format == "verbose_json" and not self.body.stream
        try:
            made = service.llm.transcribe(self._id, opened, self._params, self._options, scores=scores)
            async with contextlib.aclosing(made):
                async for part in made:
                    if isinstance(part, Transcription):
                        reason = "stop"
                        self._count(part)
                    yield part
        except AudioError as e:
            reason = "error"
            raise invalid_audio(e) from None
        except WorkerError as e:
            reason = "error"
            logger.error("request %s failed: %s", self._id, e)
            message = "the engine failed on the recording"
            raise ApiError(500, message, kind="server_error", param="file", code="engine_error") from None
        finally:
            service.metrics.finished(reason).inc()

    async def _open(self, upload: Upload) -> SandboxRecording:
        options = self._service.options
        reader = AudioReader(
            self._service.llm.inputs.sandbox, AudioLimits(options.max_audio_bytes, options.max_audio_seconds)
        )
        try:
            return await reader.open(upload.data, client=self._options.client, name=upload.name)
        except AudioError as e:
            raise invalid_audio(e) from None
        except ConfigError as e:  # its text names folders of this machine
            logger.error("%s", e)
            message = "this server reads no recordings: the extra octavo[audio] is not installed"
            # Not a 501, which would say it better: clients try again what has a status from 500 on.
            raise ApiError(400, message, param="file", code="audio_not_installed") from None

    def _count(self, made: Transcription) -> None:
        metrics = self._service.metrics
        metrics.prompt_tokens.inc(made.prompt_tokens + audio_tokens(made))
        metrics.generation_tokens.inc(made.completion_tokens)
        metrics.duration.observe(time.monotonic() - self._begun)
        log_fields(self._request.scope).update(
            audio_seconds=round(made.duration, 2), completion_tokens=made.completion_tokens
        )

    async def whole(self, upload: Upload) -> Transcription:
        """All of the recording; raises as ``parts``."""
        async with contextlib.aclosing(self.parts(upload)) as parts:
            async for part in parts:
                if isinstance(part, Transcription):
                    return part
        raise AssertionError("a transcription ends with the whole")


def invalid_audio(error: AudioError) -> ApiError:
    """The response to a recording that cannot be read."""
    return ApiError(400, str(error), param="file", code="invalid_audio")


def audio_tokens(made: Transcription) -> int:
    """What the usage counts for the recording itself."""
    return round(made.duration * _AUDIO_TOKENS_PER_SECOND)


def answer(made: Transcription, body: AudioRequest) -> str | dict[str, Any]:
    """What is sent: a text, or an object."""
    if body.response_format in _RUN_TEXTS:
        return _RUN_TEXTS[body.response_format](made)
    if body.response_format == "json":
        return json_object(made)
    given = body.timestamp_granularities if isinstance(body, TranscriptionRequest) else None
    return verbose_object(made, given or ("segment",))


_RUN_TEXTS = {"text": as_text, "srt": as_srt, "vtt": as_vtt}


# The routes ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

#: Types of content by ``response_format``; others are JSON.
_CONTENT = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


async def create_transcription(request: Request) -> Response:
    """What is said in a recording, in the language that is spoken."""
    return await _respond(request, TranscriptionRequest, "transcribe")


async def create_translation(request: Request) -> Response:
    """What is said in a recording, in English."""
    return await _respond(request, TranslationRequest, "translate")


async def _respond(request: Request, kind: type[AudioRequest], task: Task) -> Response:
    service = state_of(request)
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
