"""One recording of one HTTP request: decoded within limits, transcribed by the engine, counted."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from octavo.core.errors import AudioError, ConfigError, WorkerError
from octavo.core.request_options import RequestOptions
from octavo.server.api_errors import ApiError
from octavo.server.audio.audio_fields import AudioRequest, TranscriptionRequest
from octavo.server.audio.audio_form import Upload
from octavo.server.logging import log_fields
from octavo.server.middleware import client_of
from octavo.server.service import Service
from octavo.speech.audio_files import AudioLimits
from octavo.speech.audio_reader import AudioReader, SandboxRecording
from octavo.speech.formats import as_srt, as_text, as_vtt, json_object, verbose_object
from octavo.speech.segments import Segment, Transcription
from octavo.speech.transcription_params import Task, TranscriptionParams

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

    def __init__(self, request: Request, service: Service, body: AudioRequest, task: Task) -> None:
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
    if body.response_format in _TEXTS:
        return _TEXTS[body.response_format](made)
    if body.response_format == "json":
        return json_object(made)
    given = body.timestamp_granularities if isinstance(body, TranscriptionRequest) else None
    return verbose_object(made, given or ("segment",))


_TEXTS = {"text": as_text, "srt": as_srt, "vtt": as_vtt}
