"""Offline inference: prompts in, outputs back in the same order."""

from __future__ import annotations

import functools
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.sources import resolve_config
from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError, OctavoError, WorkerError
from octavo.core.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    Pooled,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
)
from octavo.core.request import (
    EncoderInput,
    Prompt,
    RequestOptions,
    check_one_each,
    check_request_keywords,
    options_for_each,
)
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.core.stats import Metric, metrics_of
from octavo.engine.front_end import FrontEnd, StatLogger
from octavo.engine.image_prompts import chat_prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.model_files import find_files
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.transcription import asks_engine, with_arrival
from octavo.process.interrupts import HeldInterrupts
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, open_audio
from octavo.speech.log_mel import AudioWindows
from octavo.speech.segments import Transcription
from octavo.speech.transcription import Ask, Heard, Listen, Loop, TranscriptionParams

# The bar that a call of ``LLM`` shows.

#: Whether there is a bar, or what makes one of tqdm's arguments.
Bar = bool | Callable[..., Any]


def make_bar(bar: Bar, **options: Any) -> Any:
    """A bar of tqdm with these arguments, hidden if ``bar`` says so, or what ``bar`` makes of them."""
    from tqdm import tqdm

    make: Callable[..., Any] = bar if callable(bar) else functools.partial(tqdm, disable=not bar)
    return make(dynamic_ncols=True, **options)


class Progress:
    """Owns a bar of prompts done, with the tokens a second so far."""

    def __init__(self, bar: Bar, total: int | None, done: int) -> None:
        """``total``: prompts, if their number is known; ``done``: those that were refused at once."""
        self._bar: Any = make_bar(bar, total=total, initial=done, desc="Prompts")
        self._start = time.perf_counter()
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def add(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """A prompt is done."""
        self._tokens_in += len(output.prompt_token_ids)
        seconds = time.perf_counter() - self._start
        speeds = f"in {self._tokens_in / seconds:.0f} tok/s"
        if isinstance(output, RequestOutput):
            self._tokens_out += sum(len(o.token_ids) for o in output.outputs)
            speeds += f", out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update()


# Lists of prompts: whether something is one, and the output of a prompt that is refused.


def is_single(name: str, value: object, first: type, forms: str) -> bool:
    """Whether this is one prompt or conversation, and not a list of them; ``first``: the type of what one begins with.

    Raises:
        InvalidRequestError: it is neither; ``forms`` are what it may be.
    """
    if isinstance(value, (str, dict)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], first)
    raise InvalidRequestError(f"{name} must be {forms}, not {value!r}")


def refused(request_id: str, prompt: Any, params: object, error: OctavoError) -> RequestOutput | Pooled:
    """The output of a request with these parameters that was refused."""
    now = time.monotonic()
    metrics = RequestMetrics(arrival_time=now, finished_time=now)
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
    if isinstance(params, PoolingParams):
        return PoolingRequestOutput(request_id, PoolingOutput(np.zeros(0, np.float32), str(error)), text, ids, metrics)
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=ids,
        outputs=[CompletionOutput(0, finish_reason="error", error=str(error))],
        finished=True,
        metrics=metrics,
    )


# Vectors and scores offline: the methods of ``LLM`` that do not generate.

#: One for all prompts, or one for each.
PoolingParamsOfEach = PoolingParams | Sequence[PoolingParams] | None
Rendered = list[tuple[Prompt, OctavoError | None]]


class PoolingCalls(ABC):
    """The methods; what runs requests is the engine's.

    A prompt that cannot be served raises ``InvalidRequestError`` if it is alone. In a list it fails alone: the
    ``error`` of its output says why. Vectors and scores are the same bits alone, in any list, in any order.
    """

    front_end: FrontEnd

    @abstractmethod
    def _run(
        self, prompts: Rendered, params: Any, use_tqdm: Bar, options: list[RequestOptions], single: bool
    ) -> list[Any]:
        """The outputs of prompts, some of which are errors already, in their order."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParamsOfEach = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: PoolingTask | None = None,
        **keywords: Any,
    ) -> list[Pooled]:
        """What the model makes of prompts, as ``PoolingOutput``: ``data`` is float32.

        >>> llm.encode("Some text", pooling_task="token_embed")[0].outputs.data.shape

        Args:
            prompts: one, or a list of them; texts, token ids, or dictionaries of these.
            pooling_params: one for all prompts, or one for each.
            use_tqdm: shows a progress bar, or what makes one.
            pooling_task: what to compute, where the parameters do not name it; default: vectors or class scores.
            keywords: see ``LLM``.

        Raises:
            InvalidRequestError: a single prompt cannot be served, or the model lacks the task.
        """
        check_request_keywords("encode", keywords)
        return self._pool("encode", prompts, pooling_params, pooling_task, use_tqdm, keywords)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        prompt_name: str | None = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector of each prompt, as ``EmbeddingOutput``.

        >>> llm = LLM("all-minilm-l6-v2")
        >>> llm.embed("A sentence")[0].outputs.embedding

        ``prompt_name``: which of the texts that the model's files name is put before each prompt, such as "query".

        Raises:
            InvalidRequestError: see ``encode``.
        """
        check_request_keywords("embed", keywords)
        outputs = self._pool("embed", prompts, pooling_params, "embed", use_tqdm, keywords, prompt_name)
        return [o.with_result(EmbeddingOutput(o.outputs.data.tolist(), o.outputs.error)) for o in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The class scores of each prompt, as ``ClassificationOutput``; the names are ``model_config.labels``.

        Raises:
            InvalidRequestError: see ``encode``.
        """
        check_request_keywords("classify", keywords)
        outputs = self._pool("classify", prompts, pooling_params, "classify", use_tqdm, keywords)
        return [o.with_result(ClassificationOutput(o.outputs.data.tolist(), o.outputs.error)) for o in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParamsOfEach = None,
        **keywords: Any,
    ) -> list[Pooled]:
        """The scores of each token of prompts, of a reward model: ``encode`` with ``token_classify``.

        Raises:
            InvalidRequestError: see ``encode``.
        """
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="token_classify", **keywords)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        **keywords: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well texts fit, as ``ScoringOutput``: of one text with each of several, or of pairs.

        A cross-encoder or a language model as a judge (``task="score"``) reads both texts of a pair; vectors of other
        models are compared, that of a text in several pairs being computed once. ``prompt_token_ids`` of an output are
        those of both texts.

        Raises:
            InvalidRequestError: the numbers of texts differ, a text cannot be served, or the model cannot score.
        """
        check_request_keywords("score", keywords)
        single = isinstance(data_1, str) and isinstance(data_2, str)
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise InvalidRequestError(f"{len(first)} texts cannot be scored with {len(second)}: give one, or as many")
        self.front_end.pooling.require("score")
        params = self.front_end.pooling.score_params(pooling_params)
        prompts: Rendered = []
        options: list[RequestOptions] = []
        places: dict[object, int] = {}
        of_pair: list[list[int]] = []
        each = options_for_each("score", keywords, len(first))
        for query, document, pair_options in zip(first, second, each, strict=True):
            of_pair.append([])
            for prompt, error in self._pair(query, document, params):
                place = places.setdefault((_identity(prompt), id(pair_options)), len(prompts))
                if place == len(prompts):
                    prompts.append((prompt, error))
                    options.append(pair_options)
                of_pair[-1].append(place)
        outputs = self._run(prompts, [params] * len(prompts), use_tqdm, options, single=False)
        return [self._scored([outputs[place] for place in pair], single) for pair in of_pair]

    def _pair(self, query: str, document: str, params: PoolingParams) -> Rendered:
        """What is computed of a pair."""
        try:
            prompts = self.front_end.pooling.pair_prompts(query, document, params.truncate_prompt_tokens)
        except InvalidRequestError as e:
            return [([], e)]
        return [(prompt, None) for prompt in prompts]

    def _scored(self, outputs: list[Pooled], single: bool) -> PoolingRequestOutput[ScoringOutput]:
        """The output of a pair, made of those of its prompts."""
        last = outputs[-1]  # the one that is of this pair alone
        try:
            scored = ScoringOutput(self.front_end.pooling.score(outputs))
        except InvalidRequestError as e:
            if single:
                raise
            scored = ScoringOutput(float("nan"), str(e))
        ids = [token for output in outputs for token in output.prompt_token_ids]
        text = " ".join(output.prompt or "" for output in outputs)
        return PoolingRequestOutput(last.request_id, scored, text, ids, last.metrics)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, use_tqdm: Bar = True, **keywords: Any
    ) -> list[tuple[int, float]]:
        """Index and score of each document, the best first; those of equal scores in their order.

        >>> llm.rerank("rivers of Europe", ["The Rhine", "A loaf of bread"], top_n=1)

        Raises:
            InvalidRequestError: a text cannot be served, or the model cannot score.
        """
        if not len(documents):
            return []
        outputs = self.score(query, documents, use_tqdm=use_tqdm, **keywords)
        scores = []
        for index, output in enumerate(outputs):
            if output.outputs.error is not None:
                raise InvalidRequestError(f"document {index}: {output.outputs.error}")
            scores.append((index, output.outputs.score))
        return sorted(scores, key=lambda pair: -pair[1])[:top_n]

    def _pool(
        self,
        method: str,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParamsOfEach,
        task: PoolingTask | None,
        use_tqdm: Bar,
        keywords: dict[str, Any],
        prompt_name: str | None = None,
    ) -> list[Pooled]:
        pooling = self.front_end.pooling
        if task is not None:
            pooling.require(task)
        single = is_single("prompts", prompts, int, "text, token ids, a dictionary or a list of these")
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        each = [params or PoolingParams()] * len(many) if isinstance(params, PoolingParams | None) else list(params)
        check_one_each("pooling_params", each, len(many))
        if task is not None:
            each = [_for_task(one, task) for one in each]
        rendered: Rendered = []
        for prompt in many:
            try:
                rendered.append((pooling.embedding_prompt(prompt, prompt_name) if method == "embed" else prompt, None))
            except InvalidRequestError as e:
                rendered.append((prompt, e))
        return self._run(rendered, each, use_tqdm, options_for_each(method, keywords, len(many)), single)


def _identity(prompt: Prompt) -> object:
    """What tells a text from others; token ids, which are of one pair alone, are told apart as they are."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping) or "prompt_token_ids" in prompt:
        return id(prompt)
    return tuple(prompt.items())


def _for_task(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    """The parameters for a task.

    Raises:
        InvalidRequestError: they name another one.
    """
    if params.task not in (None, task):
        raise InvalidRequestError(f"the parameters are for task {params.task!r}, not for {task!r}")
    return msgspec.structs.replace(params, task=task)


# Transcriptions offline: the method of ``LLM``.

#: Recordings that are open at once, for each sequence that can run: the next ones are read while these are computed.
_OPEN_PER_SEQUENCE = 2


@dataclass
class _Run:
    """A recording on its way."""

    number: int
    options: RequestOptions
    loop: Loop
    windows: AudioWindows
    seconds: float
    files: ExitStack = field(default_factory=ExitStack)
    #: Seconds that are done, and what the last answered question was.
    done: float = 0.0
    ask: Ask | None = None
    heard: EncoderInput | None = None
    pending: NDArray[np.float32] | None = None


class TranscriptionCalls(ABC):
    """What ``LLM`` does with recordings; the steps are the engine's."""

    front_end: FrontEnd
    #: Numbers in the names of its requests.
    _windows = itertools.count()

    @abstractmethod
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Any = None,
        options: RequestOptions = ...,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> None:
        """See ``LLMEngine``."""

    @abstractmethod
    def step(self) -> list[Any]:
        """See ``LLMEngine``."""

    @abstractmethod
    def abort_request(self, request_id: str) -> Any:
        """See ``LLMEngine``."""

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        params: TranscriptionParams | Sequence[TranscriptionParams] | None = None,
        *,
        use_tqdm: Bar = True,
        limits: AudioLimits = DEFAULT_LIMITS,
        on_end: Callable[[int, Transcription], object] | None = None,
        **keywords: Any,
    ) -> list[Transcription]:
        """What is said in recordings, one or many, of any length.

        >>> llm = LLM("whisper-tiny.en")
        >>> llm.transcribe("talk.mp3")[0].text

        Windows of a recording follow one another; those of many are computed together. Each has the priority and the
        arrival of the whole. A recording that cannot be read raises if it is alone; in a list it fails alone, and
        ``error`` says why.

        Args:
            audio: paths, bytes of files, opened files, or samples (float32 at 16 kHz, or with their rate); a list of
                them, or one.
            params: one for all, or one for each.
            use_tqdm: shows a progress bar of seconds of audio, or what makes one in place of ``tqdm.tqdm``.
            limits: what each may have at most.
            on_end: called with the number of a recording of a list, and what became of it, as soon as it has ended.
            keywords: see ``LLM``.

        Raises:
            InvalidRequestError: the model does not read sound or cannot do what the parameters ask; or, of a single
                recording, as ``Recording``.
        """
        check_request_keywords("transcribe", keywords)
        is_single = not isinstance(audio, list)
        many = [cast(Audio, audio)] if is_single else list(cast("Sequence[Audio]", audio))
        one = params or TranscriptionParams()
        each: list[Any] = [*one] if isinstance(one, list | tuple) else [one] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"params must be one, or one for each of {len(many)} recordings, not {len(each)}")
        now = time.monotonic()
        options = [with_arrival(options, now) for options in options_for_each("transcribe", keywords, len(many))]
        return _Batch(self, many, each, options, limits, None if is_single else on_end or _nothing).run(use_tqdm)


def _nothing(number: int, made: Transcription) -> None:
    """Of lists whose caller waits for all."""


class _Batch:
    """The recordings of one call."""

    def __init__(
        self,
        engine: TranscriptionCalls,
        audio: Sequence[Audio],
        params: Sequence[TranscriptionParams],
        options: Sequence[RequestOptions],
        limits: AudioLimits,
        on_end: Callable[[int, Transcription], object] | None,
    ) -> None:
        """``on_end``: None of a recording that is alone."""
        self._engine, self._speech = engine, engine.front_end.speech
        self._audio, self._params, self._options = audio, params, options
        self._limits, self._on_end = limits, on_end
        self._made: list[Transcription | None] = [None] * len(audio)
        self._active: dict[str, _Run] = {}
        for each in params:  # before anything is read
            next(self._speech.loop(each))

    def run(self, use_tqdm: Bar) -> list[Transcription]:
        """All of them, in their order."""
        most = _OPEN_PER_SEQUENCE * self._engine.front_end.files.options.max_num_seqs
        waiting = iter(range(len(self._audio)))
        with HeldInterrupts() as interrupts, make_bar(use_tqdm, desc="Audio", unit="s", total=None) as bar:
            self._bar = bar
            try:
                while True:
                    self._fill(waiting, most)
                    if not self._active:
                        break
                    interrupts.deliver()
                    for output in self._engine.step():
                        if output.request_id in self._active:
                            self._receive(output)
            finally:  # an interrupt leaves nothing behind
                for request_id, run in self._active.items():
                    self._engine.abort_request(request_id)
                    run.files.close()
        return cast("list[Transcription]", self._made)

    def _fill(self, waiting: Iterator[int], most: int) -> None:
        while len(self._active) < most and (number := next(waiting, None)) is not None:
            try:
                run = self._open(number)
            except OctavoError as e:
                self._fail(number, e)
                continue
            self._advance(run, None)

    def _open(self, number: int) -> _Run:
        params, files = self._params[number], ExitStack()
        recording = files.enter_context(open_audio(self._audio[number], self._limits))
        run = _Run(
            number,
            self._options[number],
            self._speech.loop(params),
            AudioWindows(recording.pieces()),
            recording.seconds,
            files,
        )
        self._bar.total = round((self._bar.total or 0) + recording.seconds, 1)
        return run

    def _receive(self, output: RequestOutput) -> None:
        run = self._active.pop(output.request_id)
        assert run.ask is not None
        try:
            answer = self._speech.answer(run.ask, output)
        except WorkerError as e:
            self._end(run)
            self._fail(run.number, e)
            return
        self._advance(run, answer)

    def _advance(self, run: _Run, answer: Any) -> None:
        """Goes on until the engine is asked, or all is said."""
        try:
            while True:
                ask = run.loop.send(answer)
                if asks_engine(ask):
                    self._submit(run, ask)
                    return
                answer = self._listen(run, ask) if isinstance(ask, Listen) else None
        except StopIteration as end:
            self._end(run)
            self._keep(run.number, end.value)
        except OctavoError as e:
            self._end(run)
            self._fail(run.number, e)

    def _listen(self, run: _Run, ask: Listen) -> Heard:
        window = run.windows.window(ask.start)
        run.heard, run.pending = None, window
        seconds = min(run.seconds, ask.start / 16_000)
        self._bar.update(round(seconds - run.done, 1))
        run.done = seconds
        return Heard.of(window)

    def _submit(self, run: _Run, ask: Ask) -> None:
        if run.heard is None:
            assert run.pending is not None
            run.heard = self._speech.hear(run.pending)
        request, request_id = self._speech.request(ask, run.heard, run.options), f"audio-{next(self._engine._windows)}"
        self._engine.add_request(request_id, request.prompt, request.params, request.options, streaming=False)
        run.ask = ask
        self._active[request_id] = run

    def _end(self, run: _Run) -> None:
        run.files.close()
        self._bar.update(round(run.seconds - run.done, 1))

    def _fail(self, number: int, error: OctavoError) -> None:
        if self._on_end is None or isinstance(error, ConfigError):
            raise error
        self._keep(number, Transcription("", "", 0.0, error=str(error)))

    def _keep(self, number: int, made: Transcription) -> None:
        self._made[number] = made
        if self._on_end is not None:
            self._on_end(number, made)


#: Seconds between status lines with ``disable_log_stats=False``.
STATUS_INTERVAL = 10.0
#: One chat message: {"role": ..., "content": ...}.
Message = dict[str, Any]
#: Its messages, or a text or message alone.
Conversation = Sequence[Message] | Message | str
Params = SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None


class LLM(LLMEngine, PoolingCalls, TranscriptionCalls):
    """A model ready to generate, to make vectors and scores (``PoolingCalls``), or texts (``TranscriptionCalls``).

    >>> llm = LLM(model="smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    A single prompt that cannot be served raises ``InvalidRequestError``. In a list of prompts (also of one) it fails
    alone: its output has ``finish_reason`` "error" and the reason in ``error``; the others finish.

    Ctrl-C comes between two steps, ends the requests of the call, and leaves the engine as it was. A second one within
    two seconds, while the first waits for a step, ends the process (code 130).

    ``generate``, ``beam_search`` and ``chat`` take the fields of ``RequestOptions`` as keywords, such as ``priority``,
    ``user``, ``lora_request`` and ``prediction``: one value for all prompts, or a list with one for each.

    Further keywords of vLLM's methods (``tokenization_kwargs=None``, ...) are accepted at the values that mean what is
    done anyway, and otherwise refused with the reason; see docs/coming-from.md.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        disable_log_stats: bool | None = None,
        **options: Any,
    ) -> None:
        """Loads a model by name, folder, .gguf file or hub id; options are the fields of ``EngineConfig``.

        ``None`` as the value of an option means its default. ``stat_loggers`` get the statistics of each step.
        ``disable_log_stats=False`` writes a status line every ``log_stats_interval`` seconds, 10 if that is not given;
        True writes none.

        Raises:
            OctavoError: an option is wrong, or the model is unknown, unreadable, unsupported or too large.
        """
        if tokenizer is not None:
            options["tokenizer"] = str(tokenizer)
        if disable_log_stats:
            if options.get("log_stats_interval") is not None:
                raise ConfigError("log_stats_interval writes status lines, which disable_log_stats=True turns off")
            options["log_stats_interval"] = None
        elif disable_log_stats is not None:
            options.setdefault("log_stats_interval", STATUS_INTERVAL)
        super().__init__(find_files(resolve_config({"model": str(model), **options})), stat_loggers)
        self._ids = itertools.count()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, which this is: for requests that are added and read one by one."""
        return self

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the model's own defaults, which a call without ``sampling_params`` has.

        They are those of the model's generation_config.json, GGUF file or, of a built-in model, its authors (option
        ``generation_config``), and for fields that it does not set those of ``SamplingParams``.
        """
        return self.inputs.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``), one or many.

        A bad prompt alone raises; in a list it is an output whose ``outputs[0].error`` says why, and the others finish.

        Args:
            prompts: one prompt, or a list of them.
            sampling_params: one for all prompts, or one for each, taken as they are; by default
                ``get_default_sampling_params()``.
            use_tqdm: shows a progress bar, or what makes one in place of ``tqdm.tqdm``.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single prompt cannot be served, a keyword is wrong, or there are not as many
                parameters as prompts.
            AdapterError: the adapter of a single prompt cannot be used.
        """
        check_request_keywords("generate", keywords)
        single = is_single("prompts", prompts, int, "text, token ids, a dictionary or a list of these")
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        options = options_for_each("generate", keywords, len(many))
        return self._run([(p, None) for p in many], sampling_params, use_tqdm, options, single)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: Bar = True, **keywords: Any
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, best first, each with its ``score``.

        >>> llm.beam_search("The capital of France is", BeamSearchParams(beam_width=4, max_tokens=8))

        ``generate`` takes ``BeamSearchParams`` too, also mixed with ``SamplingParams``. ``sequences`` of an output has
        prompt and continuation together; for that, the text of a prompt given as token ids is filled in here.

        Raises:
            InvalidRequestError: as for ``generate``.
        """
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, **keywords)
        for output in outputs:
            if output.prompt is None:
                output.prompt = self.tokenizer.decode(output.prompt_token_ids)
        return outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template.

        >>> llm.chat("Name three rivers.")
        >>> llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three rivers."}])

        A bad conversation alone raises; in a list it is an output whose ``outputs[0].error`` says why.

        Args:
            messages: a conversation: its messages, or one message, or a text, which is a user's message; or a list of
                conversations, in which a text is a conversation too. For images in them see ``chat_prompt``.
            sampling_params: as for ``generate``; ``use_tqdm`` too.
            use_tqdm: see there.
            add_generation_prompt: ends the prompt with what opens the assistant's answer.
            continue_final_message: the answer continues the last message; needs ``add_generation_prompt=False``.
            tools: JSON schemas of callable tools.
            chat_template: a name among the model's templates, or a template's text.
            chat_template_kwargs: further names that the template may use.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single conversation cannot be served, or the model has no chat template and none was
                given.
            TokenizerError: the template is not valid.
        """
        check_request_keywords("chat", keywords)
        single = is_single("messages", messages, dict, "a text, messages or a list of conversations")
        conversations = [cast("Conversation", messages)] if single else list(cast("Sequence[Conversation]", messages))
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
        }
        variables = _template_variables(chat_template_kwargs, options)
        rendered: list[tuple[Prompt, OctavoError | None]] = []
        for conversation in conversations:
            try:
                rendered.append((chat_prompt(self.inputs, _as_messages(conversation), **options, **variables), None))
            except InvalidRequestError as e:
                rendered.append(([], e))
        each = options_for_each("chat", keywords, len(rendered))
        return self._run(rendered, sampling_params, use_tqdm, each, single)

    def get_metrics(self) -> list[Metric]:
        """Queues and blocks now (``Gauge``), and totals since the start (``Counter``), each with name and value."""
        return metrics_of(self.stats())

    def _run(
        self,
        prompts: list[tuple[Prompt, OctavoError | None]],
        params: Any,
        use_tqdm: Bar,
        options: list[RequestOptions],
        single: bool,
    ) -> list[Any]:
        params_of_each = params or self.get_default_sampling_params()
        if isinstance(params_of_each, (SamplingParams, BeamSearchParams)):
            params_of_each = [params_of_each] * len(prompts)
        check_one_each("sampling_params", params_of_each, len(prompts))
        outputs: dict[str, Any] = {}
        order = []
        with HeldInterrupts() as interrupts:
            try:
                for (prompt, error), params, request_options in zip(prompts, params_of_each, options, strict=True):
                    interrupts.deliver()
                    request_id = str(next(self._ids))
                    order.append(request_id)
                    try:
                        if error is not None:
                            raise error
                        self.add_request(request_id, prompt, params, request_options, streaming=False)
                    except (InvalidRequestError, AdapterError) as e:
                        if single:
                            raise
                        outputs[request_id] = refused(request_id, prompt, params, e)
                self._finish_all(outputs, len(order), use_tqdm, interrupts)
            finally:  # an interrupt leaves nothing behind
                for request_id in order:
                    self.abort_request(request_id)
        return [outputs[request_id] for request_id in order]

    def _finish_all(self, outputs: dict[str, Any], total: int, use_tqdm: Bar, interrupts: HeldInterrupts) -> None:
        """Steps until every request has ended, showing prompts done and tokens a second."""
        with Progress(use_tqdm, total, len(outputs)) as progress:
            while self.has_unfinished_requests():
                interrupts.deliver()
                for output in self.step():
                    outputs[output.request_id] = output
                    progress.add(output)


def _as_messages(conversation: Conversation) -> Sequence[Message]:
    """The messages of a conversation in any of its forms."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return [conversation] if isinstance(conversation, dict) else conversation


def _template_variables(variables: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """``chat_template_kwargs``, if no name among them is one of the arguments."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dictionary, not {variables!r}")
    for name in variables:
        if name in options or name in ("messages", "template", "tokenize"):
            raise InvalidRequestError(f"chat_template_kwargs must not hold {name!r}, which is an argument of its own")
    return variables
