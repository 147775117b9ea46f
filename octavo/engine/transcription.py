"""Transcription: the questions of its loop (``octavo.speech.transcription``) as requests of an engine."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError, WorkerError
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import RequestOutput
from octavo.core.request import EncoderInput, Prompt, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.model_files import ModelFiles
from octavo.engine.tokenizer import Tokenizer
from octavo.process.children import finish_in_thread
from octavo.speech.audio_files import Audio, AudioLimits, OpenedAudio, open_audio
from octavo.speech.audio_reader import SandboxRecording
from octavo.speech.log_mel import AudioWindows
from octavo.speech.segments import Segment, SpeechTokens, Transcription, read_speech_tokens
from octavo.speech.transcription import (
    Align,
    Answer,
    Ask,
    Decode,
    Heard,
    Language,
    Listen,
    Loop,
    Silence,
    TranscriptionParams,
    transcribe,
)

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM

P = ParamSpec("P")
T = TypeVar("T")
#: Logprobs below it are those of excluded tokens; its exponential is 0.
_LEAST_LOGPROB = -700.0


@dataclass(frozen=True)
class SpeechRequest:
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions


class SpeechCodec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


class SpeechRequests:
    """Makes the requests of transcriptions for one model."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises ``InvalidRequestError`` if the model does not take audio, ``ConfigError`` if its files lack tokens."""
        check_hears(files.model_config, files.options.model)
        self._config = files.model_config
        self.tokens: SpeechTokens = read_speech_tokens(files.folder)
        self.codec = SpeechCodec(files.tokenizer)

    def loop(self, params: TranscriptionParams, *, scores: bool = False) -> Loop:
        if params.word_timestamps:
            self._alignment_heads()
        return transcribe(params, self.tokens, self.codec, scores=scores)

    def hear(self, audio: NDArray[np.float32]) -> EncoderInput:
        """Makes the encoder input of a window, float32 [n] at 16 kHz, which all of its requests share."""
        facts = self._config.encoder_facts
        assert facts is not None
        return EncoderInput.of_audio(audio, facts.audio_tokens)

    def request(self, ask: Ask, heard: EncoderInput, options: RequestOptions) -> SpeechRequest:
        start = [self.tokens.start]
        if isinstance(ask, Decode):
            params = SamplingParams(
                temperature=ask.temperature, max_tokens=ask.max_tokens, seed=ask.seed, logprobs=0, detokenize=False
            )
            options = msgspec.structs.replace(options, timestamps=self.tokens.rules(has_times=ask.has_times))
            start = ask.prompt
        elif isinstance(ask, Language):
            params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=ask.tokens, detokenize=False)
        elif isinstance(ask, Silence):
            listed = [self.tokens.no_speech]
            params = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=listed, detokenize=False)
        else:
            assert isinstance(ask, Align)
            params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
            options = msgspec.structs.replace(options, alignment_heads=self._alignment_heads())
            start = [*ask.prompt, *ask.tokens]
        return SpeechRequest({"prompt_token_ids": start, "encoder_input": heard, "num_forced": 0}, params, options)

    def _alignment_heads(self) -> list[tuple[int, int]]:
        """The heads that the model's files name; else those in the upper half of the layers, as in OpenAI's program."""
        layers, heads = self._config.num_layers, self._config.num_heads
        for layer, head in self.tokens.alignment_heads:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise InvalidRequestError(
                    f"must be False: alignment_heads of the model's files has [{layer}, {head}], and the model "
                    f"{layers} layers of {heads} heads",
                    path="word_timestamps",
                )
        upper = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
        return list(self.tokens.alignment_heads) or upper

    def answer(self, ask: Ask, output: RequestOutput) -> Any:
        """Reads the answer off a finished request; raises ``WorkerError`` if it failed."""
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise WorkerError(completion.error or f"the request ended: {completion.finish_reason}")
        if isinstance(ask, Decode):
            tokens = list(completion.token_ids)
            if tokens[-1:] == [self.tokens.end]:
                tokens.pop()
            return Answer(tokens, completion.cumulative_logprob or 0.0)
        if isinstance(ask, Language):
            return completion.token_ids[0]
        if isinstance(ask, Align):
            return _alignment(ask, output)
        assert isinstance(ask, Silence)
        assert completion.logprobs is not None
        return math.exp(max(_LEAST_LOGPROB, completion.logprobs[0][self.tokens.no_speech].logprob))


def _alignment(ask: Align, output: RequestOutput) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention and probability of each token, read where it is predicted: at the token before it."""
    assert output.attention_weights is not None
    assert output.prompt_logprobs is not None
    first, prompt = len(ask.prompt), output.prompt_token_ids
    weights = np.frombuffer(output.attention_weights, np.float32).reshape(-1, len(prompt), output.num_encoder_tokens)
    logprobs = [
        logprobs_of_position[token].logprob if logprobs_of_position is not None else _LEAST_LOGPROB
        for token, logprobs_of_position in zip(prompt[first:], output.prompt_logprobs[first:], strict=True)
    ]
    return weights[:, first - 1 : -1], np.exp(np.maximum(logprobs, _LEAST_LOGPROB)).astype(np.float32)


def check_hears(config: ModelConfig, name: str) -> None:
    if config.encoder_facts is None or not config.encoder_facts.takes_audio:
        raise InvalidRequestError(
            f"the model {name!r} ({config.architecture}) cannot transcribe: it reads text; whisper-tiny.en, which is "
            "built in, reads sound"
        )


def with_arrival(options: RequestOptions, now: float) -> RequestOptions:
    return options if options.arrival_time is not None else msgspec.structs.replace(options, arrival_time=now)


class SpeechHost(Protocol):
    """What answers the requests of a transcription: an engine with an event loop, or one that is stepped."""

    async def in_thread(self, call: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """Calls a function that takes long, and finishes it even if the caller is cancelled."""

    async def answer(self, request: SpeechRequest) -> RequestOutput:
        """Waits for the only output of a request."""


class StreamHost:
    """The ``SpeechHost`` of an ``AsyncLLM``."""

    def __init__(self, engine: AsyncLLM, request_id: str) -> None:
        self._engine, self._ids = engine, (f"{request_id}-{number}" for number in itertools.count())

    async def in_thread(self, call: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        return await finish_in_thread(call, *args, **keywords)

    async def answer(self, request: SpeechRequest) -> RequestOutput:
        prompt, params, options = request.prompt, request.params, request.options
        stream = await self._engine.submit(next(self._ids), prompt, params, options, streaming=False)
        with contextlib.closing(stream):
            return await anext(stream)


async def transcribe_recording(
    speech: SpeechRequests,
    host: SpeechHost,
    audio: Audio | OpenedAudio | SandboxRecording,
    params: TranscriptionParams,
    options: RequestOptions,
    limits: AudioLimits,
    *,
    scores: bool = False,
) -> AsyncGenerator[Segment | Transcription]:
    """Yields the segments of a recording as they become certain, and at last the whole.

    ``scores``: segments always have ``no_speech_prob``.
    """
    options = with_arrival(options, time.monotonic())
    loop = speech.loop(params, scores=scores)
    ask = loop.send(None)  # unsupported parameters are refused before the audio is opened
    opened = (
        audio if isinstance(audio, SandboxRecording | OpenedAudio) else await host.in_thread(open_audio, audio, limits)
    )
    windows, window = AudioWindows(), np.empty(0, np.float32)
    heard: EncoderInput | None = None
    reply: Any = None
    try:
        source = opened.pieces() if isinstance(opened, SandboxRecording) else _pieces_in_threads(host, opened)
        async with contextlib.aclosing(source) as pieces:
            while True:
                if isinstance(ask, Listen):
                    while windows.missing(ask.start) and (piece := await anext(pieces, None)) is not None:
                        windows.add(ask.start, piece)
                    heard, window = None, windows.window(ask.start)
                    reply = Heard.of(window)
                elif isinstance(ask, Segment):
                    yield ask
                    reply = None
                else:
                    if heard is None:
                        heard = await host.in_thread(speech.hear, window)
                    reply = speech.answer(ask, await host.answer(speech.request(ask, heard, options)))
                try:
                    ask = loop.send(reply)
                except StopIteration as end:
                    yield end.value
                    return
    finally:
        if opened is not audio:
            cast("OpenedAudio", opened).close()


async def _pieces_in_threads(host: SpeechHost, opened: OpenedAudio) -> AsyncGenerator[NDArray[np.float32]]:
    """The pieces of a recording that this process decodes; no thread reads on after this is closed or cancelled."""
    pieces = opened.pieces()
    while (piece := await host.in_thread(next, pieces, None)) is not None:
        yield piece
