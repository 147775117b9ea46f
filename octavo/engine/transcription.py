"""What the loop of a transcription asks, as requests of an engine, and their outputs as its answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

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
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, OpenedAudio, open_audio
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
    from octavo.engine.async_llm import RequestStream
    from octavo.engine.front_end import FrontEnd


#: A logprob below it is that of a token that cannot be; its exponential is 0.
_LEAST_LOGPROB = -700.0


@dataclass(frozen=True)
class SpeechRequest:
    """What to submit: prompt, parameters, options."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions


class SpeechCodec:
    """Texts and tokens, without special ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See ``Codec``."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        """See ``Codec``."""
        return self._tokenizer.decode(tokens) if tokens else ""


class SpeechRequests:
    """Of one model, whose special tokens it owns."""

    def __init__(self, files: ModelFiles) -> None:
        """Reads the model's files.

        Raises:
            InvalidRequestError: the model does not read sound.
            ConfigError: its files do not say what its tokens mean.
        """
        check_hears(files.model_config, files.options.model)
        self._config = files.model_config
        self.known: SpeechTokens = read_speech_tokens(files.folder)
        self.codec = SpeechCodec(files.tokenizer)

    def loop(self, params: TranscriptionParams, *, scores: bool = False) -> Loop:
        """See ``transcribe``.

        Raises:
            InvalidRequestError: times of words are wanted, and the model's files name heads that it has not.
        """
        if params.word_timestamps:
            self._alignment_heads()
        return transcribe(params, self.known, self.codec, scores=scores)

    def hear(self, audio: NDArray[np.float32]) -> EncoderInput:
        """A window, float32 [n] at 16 kHz, as what all requests about it share."""
        facts = self._config.encoder_facts
        assert facts is not None
        return EncoderInput.of_audio(audio, facts.audio_tokens)

    def request(self, ask: Ask, heard: EncoderInput, options: RequestOptions) -> SpeechRequest:
        """The request that answers a question about a window."""
        start = [self.known.start]
        if isinstance(ask, Decode):
            params = SamplingParams(
                temperature=ask.temperature, max_tokens=ask.max_tokens, seed=ask.seed, logprobs=0, detokenize=False
            )
            options = msgspec.structs.replace(options, timestamps=self.known.rules(has_times=ask.has_times))
            return SpeechRequest(_prompt(ask.prompt, heard), params, options)
        if isinstance(ask, Language):
            params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=ask.tokens, detokenize=False)
        elif isinstance(ask, Silence):
            listed = [self.known.no_speech]
            params = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=listed, detokenize=False)
        else:
            assert isinstance(ask, Align)
            params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
            options = msgspec.structs.replace(options, alignment_heads=self._alignment_heads())
            start = [*ask.prompt, *ask.tokens]
        return SpeechRequest(_prompt(start, heard), params, options)

    def _alignment_heads(self) -> list[tuple[int, int]]:
        """Those that the model's files name; else all of the upper half of the layers, as in OpenAI's program.

        Raises:
            InvalidRequestError: the model has not all of them.
        """
        layers, heads = self._config.num_layers, self._config.num_heads
        for layer, head in self.known.alignment_heads:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise InvalidRequestError(
                    f"word_timestamps must be False: alignment_heads of the model's files has [{layer}, {head}], and "
                    f"the model {layers} layers of {heads} heads"
                )
        upper = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
        return list(self.known.alignment_heads) or upper

    def answer(self, ask: Ask, output: RequestOutput) -> Any:
        """What a finished request says.

        Raises:
            WorkerError: it has failed.
        """
        made = output.outputs[0]
        if made.finish_reason not in ("stop", "length"):
            raise WorkerError(made.error or f"the request ended: {made.finish_reason}")
        if isinstance(ask, Decode):
            tokens = list(made.token_ids)
            if tokens[-1:] == [self.known.end]:
                tokens.pop()
            return Answer(tokens, made.cumulative_logprob or 0.0)
        if isinstance(ask, Language):
            return made.token_ids[0]
        if isinstance(ask, Align):
            return _alignment(ask, output)
        assert isinstance(ask, Silence)
        assert made.logprobs is not None
        return math.exp(max(_LEAST_LOGPROB, made.logprobs[0][self.known.no_speech].logprob))


def _alignment(ask: Align, output: RequestOutput) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """See ``Align``: of each token what is known where it is predicted, which is at the token before it."""
    assert output.attention_weights is not None
    assert output.prompt_logprobs is not None
    first, prompt = len(ask.prompt), output.prompt_token_ids
    weights = np.frombuffer(output.attention_weights, np.float32).reshape(-1, len(prompt), output.num_encoder_tokens)
    logprobs = [
        known[token].logprob if known is not None else _LEAST_LOGPROB
        for token, known in zip(prompt[first:], output.prompt_logprobs[first:], strict=True)
    ]
    return weights[:, first - 1 : -1], np.exp(np.maximum(logprobs, _LEAST_LOGPROB)).astype(np.float32)


def check_hears(config: ModelConfig, name: str) -> None:
    """Refuses a model that does not read sound.

    Raises:
        InvalidRequestError: naming it.
    """
    if config.encoder_facts is None or not config.encoder_facts.takes_audio:
        raise InvalidRequestError(
            f"the model {name!r} ({config.architecture}) cannot transcribe: it reads text; whisper-tiny.en, which is "
            "built in, reads sound"
        )


def with_arrival(options: RequestOptions, now: float) -> RequestOptions:
    """The options with the moment from which all windows of a recording count, if they name none."""
    return options if options.arrival_time is not None else msgspec.structs.replace(options, arrival_time=now)


def _prompt(tokens: list[int], heard: EncoderInput) -> Mapping[str, Any]:
    return {"prompt_token_ids": tokens, "encoder_input": heard, "num_forced": 0}


def asks_engine(ask: Ask) -> bool:
    """Whether a question is the engine's to answer."""
    return not isinstance(ask, Listen | Segment)


# A transcription for a program with an event loop.


class Submits(Protocol):
    """What an engine does here."""

    front_end: FrontEnd

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = ...,
        *,
        streaming: bool = ...,
    ) -> RequestStream:
        """See ``AsyncEngine``."""
        ...


class AsyncTranscription:
    """One recording. Inputs are named in threads, and files decoded there or in the sandbox."""

    def __init__(
        self,
        engine: Submits,
        request_id: str,
        params: TranscriptionParams | None,
        options: RequestOptions,
        scores: bool,
    ) -> None:
        """The engine is ready.

        Raises:
            InvalidRequestError: the model does not read sound.
        """
        self._engine, self._request_id = engine, request_id
        self._speech = engine.front_end.speech
        self._loop = self._speech.loop(params or TranscriptionParams(), scores=scores)
        self._options = with_arrival(options, time.monotonic())
        self._count = 0

    async def hear(
        self, audio: Audio | OpenedAudio | SandboxRecording, limits: AudioLimits | None
    ) -> AsyncGenerator[Segment | Transcription]:
        """See ``AsyncLLM.transcribe``."""
        reply: Any = None
        ask = self._loop.send(None)  # what the model cannot do is refused before anything is read
        if isinstance(audio, SandboxRecording | OpenedAudio):
            opened = audio
        else:
            opened = await finish_in_thread(open_audio, audio, limits or DEFAULT_LIMITS)
        windows = AudioWindows()
        heard: EncoderInput | None = None
        try:
            source = opened.pieces() if isinstance(opened, SandboxRecording) else _pieces_in_threads(opened)
            async with contextlib.aclosing(source) as pieces:
                while True:
                    if isinstance(ask, Listen):
                        reply, heard = await self._listen(pieces, windows, ask.start)
                    elif isinstance(ask, Segment):
                        yield ask
                        reply = None
                    else:
                        assert heard is not None
                        reply = await self._ask(ask, heard)
                    try:
                        ask = self._loop.send(reply)
                    except StopIteration as end:
                        yield end.value
                        return
        finally:
            if opened is not audio:
                cast("OpenedAudio", opened).close()

    async def _listen(
        self, pieces: AsyncGenerator[NDArray[np.float32]], windows: AudioWindows, start: int
    ) -> tuple[Heard, EncoderInput | None]:
        while windows.missing(start) and (piece := await anext(pieces, None)) is not None:
            windows.add(start, piece)
        window = windows.window(start)
        return await asyncio.to_thread(lambda: (Heard.of(window), self._speech.hear(window) if len(window) else None))

    async def _ask(self, ask: Ask, heard: EncoderInput) -> Any:
        request = self._speech.request(ask, heard, self._options)
        name = f"{self._request_id}-{self._count}"
        self._count += 1
        stream = await self._engine.submit(name, request.prompt, request.params, request.options, streaming=False)
        with contextlib.closing(stream):
            return self._speech.answer(ask, await anext(stream))


async def _pieces_in_threads(opened: OpenedAudio) -> AsyncGenerator[NDArray[np.float32]]:
    """The pieces of a recording that this process decodes; no thread reads on when this is closed or cancelled."""
    pieces = opened.pieces()
    while (piece := await finish_in_thread(next, pieces, None)) is not None:
        yield piece
