"""Offline inference: ``LLM`` takes lists of prompts and returns their outputs in the same order."""

from __future__ import annotations

import functools
import itertools
import os
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Self, cast

import msgspec
import numpy as np

from octavo.config.sources import resolve_config
from octavo.core.errors import AdapterError, ConfigError, InvalidRequestError, OctavoError
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
    Prompt,
    RequestOptions,
    check_one_each,
    check_request_keywords,
    options_for_each,
)
from octavo.core.sampling_params import BeamSearchParams, SamplingParams, guided_outputs_of
from octavo.core.stats import Metric, metrics_of
from octavo.engine.front_end import StatLogger
from octavo.engine.image_prompts import chat_prompt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.model_files import find_files
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.transcription import P, SpeechRequest, T, transcribe_recording, with_arrival
from octavo.process.interrupts import HeldInterrupts
from octavo.speech.audio_files import DEFAULT_LIMITS, Audio, AudioLimits, open_audio
from octavo.speech.segments import Transcription
from octavo.speech.transcription import TranscriptionParams

#: Seconds between status lines with ``disable_log_stats=False``.
STATUS_INTERVAL = 10.0
#: One chat message: {"role": ..., "content": ...}.
Message = dict[str, Any]
#: Messages, or one message, or the text of a user's message.
Conversation = Sequence[Message] | Message | str
Params = SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None
#: ``prompt_token_ids``: of one prompt, or of each.
TokenIds = Sequence[int] | Sequence[Sequence[int]] | None
PoolingParamsOfEach = PoolingParams | Sequence[PoolingParams] | None
#: Whether to show a progress bar, or a function that makes one from tqdm's arguments.
Bar = bool | Callable[..., Any]
#: Prompts, each with its error if it was refused already.
CheckedPrompts = list[tuple[Prompt, OctavoError | None]]


class LLM(LLMEngine):
    """A model ready to generate, embed, classify, score or transcribe.

    >>> llm = LLM(model="smollm2-135m")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    A single prompt that cannot be served raises ``InvalidRequestError``. In a list of prompts (also of one) it fails
    alone: its output has ``finish_reason`` "error" (vectors and scores: ``outputs.error``) and the reason in ``error``;
    the others finish. Vectors and scores are the same bits alone, in any list, in any order.

    Ctrl-C takes effect between two steps, ends the requests of the call, and leaves the engine as it was. A second one
    within two seconds, while the first waits for a step, ends the process (code 130).

    All methods take the fields of ``RequestOptions`` as keywords, such as ``priority``, ``user``, ``lora_request`` and
    ``prediction``: one value for all prompts, or a list with one for each. Further keywords of vLLM's methods
    (``tokenization_kwargs=None``, ...) are accepted with the values that change nothing here, and otherwise refused
    with the reason; see docs/coming-from.md.
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
        ``disable_log_stats=False`` writes a status line every ``log_stats_interval`` seconds, by default 10; True
        writes none.

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
        """This engine itself, for requests that are added and read one by one."""
        return self

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the model's own defaults, as used by a call without ``sampling_params``.

        They come from the model's generation_config.json, GGUF file or, for a built-in model, from its authors (option
        ``generation_config``); fields that it does not set have the defaults of ``SamplingParams``.
        """
        return self.inputs.default_params()

    def get_metrics(self) -> list[Metric]:
        """Queues and blocks now (``Gauge``), and totals since the start (``Counter``), each with name and value."""
        return metrics_of(self.stats())

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        prompt_token_ids: TokenIds = None,
        guided_options_request: Any = None,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """Completes prompts (text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``), one or many.

        Args:
            prompts: one prompt, or a list of them.
            sampling_params: one for all prompts, or one for each, taken as they are; by default
                ``get_default_sampling_params()``.
            use_tqdm: shows a progress bar, or a function that makes one in place of ``tqdm.tqdm``.
            prompt_token_ids: vLLM's former way to give prompts as token ids, of one or of each; ``prompts``, if given
                too, are then only shown in outputs.
            guided_options_request: vLLM's former way to give ``structured_outputs``, such as
                ``{"guided_regex": "[0-9]+"}``; for all prompts.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single prompt cannot be served, a keyword is wrong, or the number of parameters is
                not that of the prompts.
            AdapterError: the adapter of a single prompt cannot be used.
        """
        check_request_keywords("generate", keywords)
        prompts = _with_token_ids(prompts, prompt_token_ids)
        if guided_options_request is not None:
            sampling_params = self._guided(sampling_params, guided_options_request)
        single = is_single("prompts", prompts, int, "text, token ids, a dictionary or a list of these")
        many = [cast(Prompt, prompts)] if single else list(cast("Sequence[Prompt]", prompts))
        options = options_for_each("generate", keywords, len(many))
        return self._run([(p, None) for p in many], sampling_params, use_tqdm, options, single)

    def _guided(self, params: Params, request: Any) -> Params:
        """Copies of the parameters, with the constraint of ``guided_options_request``."""
        if (constraint := guided_outputs_of(request)) is None:
            return params
        params = params or self.get_default_sampling_params()
        many = [params] if isinstance(params, (SamplingParams, BeamSearchParams)) else list(params)
        for i, one in enumerate(many):
            if isinstance(one, BeamSearchParams) or one.structured_outputs is not None:
                reason = "a beam search has no constraint" if isinstance(one, BeamSearchParams) else "there is one"
                raise InvalidRequestError(f"must be left out: {reason}", path="guided_options_request")
            many[i] = clone = one.clone()
            clone.structured_outputs = constraint
        return many if isinstance(params, Sequence) else many[0]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: Bar = True, **keywords: Any
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, best first, each with its ``score``.

        >>> llm.beam_search("The capital of France is", BeamSearchParams(beam_width=4, max_tokens=8))

        ``generate`` takes ``BeamSearchParams`` too, also mixed with ``SamplingParams``. ``sequences`` of an output has
        prompt and continuation together; for that, the text of a prompt given as token ids is filled in here.
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
        use_tqdm: Bar = True,
        *,
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

        Args:
            messages: a conversation: its messages, or one message, or a text, which is a user's message; or a list of
                conversations, in which a text is a conversation too. For images in them see ``chat_prompt``.
            sampling_params: as for ``generate``.
            use_tqdm: as for ``generate``.
            add_generation_prompt: ends the prompt with what opens the assistant's answer.
            continue_final_message: the answer continues the last message; needs ``add_generation_prompt=False``.
            tools: JSON schemas of callable tools.
            chat_template: a name among the model's templates, or a template's text.
            chat_template_kwargs: further variables of the template.
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
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise InvalidRequestError("must be a dictionary", path="chat_template_kwargs", got=chat_template_kwargs)
        for name in chat_template_kwargs or ():
            if name in options or name in ("messages", "template", "tokenize"):
                raise InvalidRequestError(
                    f"must not hold {name!r}, which is an argument of its own", path="chat_template_kwargs"
                )
        options |= chat_template_kwargs or {}
        prompts: CheckedPrompts = []
        for conversation in conversations:
            if isinstance(conversation, str):
                conversation = {"role": "user", "content": conversation}
            if isinstance(conversation, dict):
                conversation = [conversation]
            try:
                prompts.append((chat_prompt(self.inputs, conversation, **options), None))
            except InvalidRequestError as e:
                prompts.append(([], e))
        each = options_for_each("chat", keywords, len(prompts))
        return self._run(prompts, sampling_params, use_tqdm, each, single)

    def _run(
        self, prompts: CheckedPrompts, params: Any, use_tqdm: Bar, options: list[RequestOptions], single: bool
    ) -> list[Any]:
        """Runs all prompts to their ends; returns their outputs in order."""
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
                with Progress(use_tqdm, len(order), len(outputs)) as progress:
                    while self.has_unfinished_requests():
                        interrupts.deliver()
                        for output in self.step():
                            outputs[output.request_id] = output
                            progress.add(output)
            finally:  # an interrupt leaves nothing behind
                for request_id in order:
                    self.abort_request(request_id)
        return [outputs[request_id] for request_id in order]

    # --- vectors and scores -------------------------------------------------------------------------------------------

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        pooling_params: PoolingParamsOfEach = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: PoolingTask | None = None,
        prompt_token_ids: TokenIds = None,
        **keywords: Any,
    ) -> list[Pooled]:
        """The result of each prompt for a pooling task, as ``PoolingOutput``: ``data`` is float32.

        >>> llm.encode("Some text", pooling_task="token_embed")[0].outputs.data.shape

        Args:
            prompts: one, or a list of them; texts, token ids, or dictionaries of these.
            pooling_params: one for all prompts, or one for each.
            use_tqdm: as for ``generate``.
            pooling_task: the task, if the parameters do not name it; default: vectors or class scores.
            prompt_token_ids: as for ``generate``.
            keywords: see the class.

        Raises:
            InvalidRequestError: a single prompt cannot be served, or the model lacks the task.
        """
        check_request_keywords("encode", keywords)
        prompts = _with_token_ids(prompts, prompt_token_ids)
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
        """A vector of each prompt, as ``EmbeddingOutput``; arguments and errors as for ``encode``.

        >>> llm = LLM("all-minilm-l6-v2")
        >>> llm.embed("A sentence")[0].outputs.embedding

        ``prompt_name``: the text of the model's files, such as "query", to put before each prompt.
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
        """The class scores of each prompt, as ``ClassificationOutput``; the names are ``model_config.labels``."""
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
        """A reward model's score of each token: ``encode`` with ``token_classify``."""
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
        """The score of each pair of texts, as ``ScoringOutput``: of one text with each of several, or of pairs.

        A cross-encoder, or a language model that answers yes or no (``task="score"``), reads both texts of a pair. With
        other models the vectors of the texts are compared; a text in several pairs is computed once.
        ``prompt_token_ids`` of an output are those of both texts.

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
        pooling = self.front_end.pooling
        pooling.require("score")
        params = pooling.score_params(pooling_params)
        prompts: CheckedPrompts = []
        options: list[RequestOptions] = []
        indices: dict[object, int] = {}
        pairs: list[list[int]] = []
        each = options_for_each("score", keywords, len(first))
        for query, document, pair_options in zip(first, second, each, strict=True):
            pairs.append([])
            error: OctavoError | None = None
            try:
                pair = pooling.pair_prompts(query, document, params.truncate_prompt_tokens)
            except InvalidRequestError as e:
                pair, error = [[]], e
            for prompt in pair:
                index = indices.setdefault((_prompt_identity(prompt), id(pair_options)), len(prompts))
                if index == len(prompts):
                    prompts.append((prompt, error))
                    options.append(pair_options)
                pairs[-1].append(index)
        outputs = self._run(prompts, [params] * len(prompts), use_tqdm, options, single=False)
        return [self._score_of_pair([outputs[index] for index in pair], single) for pair in pairs]

    def _score_of_pair(self, outputs: list[Pooled], single: bool) -> PoolingRequestOutput[ScoringOutput]:
        last = outputs[-1]  # the only one that no other pair has
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
        """Index and score of each document, best first; equal scores keep their order.

        >>> llm.rerank("rivers of Europe", ["The Rhine", "A loaf of bread"], top_n=1)

        Raises as ``score``.
        """
        if not len(documents):
            return []
        scores = []
        for index, output in enumerate(self.score(query, documents, use_tqdm=use_tqdm, **keywords)):
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
        for i, one in enumerate(each if task is not None else ()):
            if one.task not in (None, task):
                raise InvalidRequestError(f"the parameters are for task {one.task!r}, not for {task!r}")
            each[i] = msgspec.structs.replace(one, task=task)
        checked: CheckedPrompts = []
        for prompt in many:
            try:
                checked.append((pooling.embedding_prompt(prompt, prompt_name) if method == "embed" else prompt, None))
            except InvalidRequestError as e:
                checked.append((prompt, e))
        return self._run(checked, each, use_tqdm, options_for_each(method, keywords, len(many)), single)

    # --- speech -------------------------------------------------------------------------------------------------------

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
        """The text spoken in recordings, one or many, of any length.

        >>> llm = LLM("whisper-tiny.en")
        >>> llm.transcribe("talk.mp3")[0].text

        The windows of a recording follow one another; those of several recordings are computed together. Each has the
        priority and the arrival time of its recording. A recording that cannot be read raises if it is alone; in a list
        it fails alone, with the reason in ``error``.

        Args:
            audio: paths, bytes of files, opened files, or samples (float32 at 16 kHz, or with their rate); a list of
                them, or one.
            params: one for all, or one for each.
            use_tqdm: as for ``generate``; the bar counts seconds of audio.
            limits: for each recording.
            on_end: called with the index of a recording of a list, and its transcription, as soon as it ends.
            keywords: see the class.

        Raises:
            InvalidRequestError: the model takes no audio or cannot do what the parameters ask; or, for a single
                recording, as ``Recording``.
        """
        check_request_keywords("transcribe", keywords)
        single = not isinstance(audio, list)
        many = [cast(Audio, audio)] if single else list(cast("Sequence[Audio]", audio))
        one = params or TranscriptionParams()
        each: list[Any] = [*one] if isinstance(one, list | tuple) else [one] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(
                f"must be one, or one for each of {len(many)} recordings, not {len(each)}", path="params"
            )
        options = options_for_each("transcribe", keywords, len(many))
        callback = None if single else on_end or (lambda index, transcription: None)
        return TranscriptionBatch(self, many, each, options, limits, callback).run(use_tqdm)


class TranscriptionBatch:
    """Transcribes recordings with an engine; several are open at once."""

    #: Open recordings per sequence that can run: the next ones are read while these are computed.
    OPEN_PER_SEQUENCE = 2
    _request_numbers = itertools.count()

    def __init__(
        self,
        engine: LLMEngine,
        audio: Sequence[Audio],
        params: Sequence[TranscriptionParams],
        options: Sequence[RequestOptions],
        limits: AudioLimits,
        on_end: Callable[[int, Transcription], object] | None,
    ) -> None:
        """``params`` and ``options``: one for each recording. ``on_end``: None for a single recording, which raises.

        Raises:
            InvalidRequestError: the model takes no audio or cannot do what the parameters ask.
        """
        self._engine, self._speech = engine, engine.front_end.speech
        now = time.monotonic()
        self._audio, self._params, self._options = audio, params, [with_arrival(each, now) for each in options]
        self._limits, self._on_end = limits, on_end
        self._transcriptions: list[Transcription | None] = [None] * len(audio)
        #: Recordings and their transcriptions in progress, by the request that each waits for.
        self._active: dict[str, tuple[int, Coroutine[str, RequestOutput | None, Transcription]]] = {}
        for each in params:  # refused before any file is read
            next(self._speech.loop(each))

    def run(self, use_tqdm: Bar) -> list[Transcription]:
        """Transcribes all recordings; returns them in their order."""
        most = self.OPEN_PER_SEQUENCE * self._engine.front_end.files.options.max_num_seqs
        waiting = iter(range(len(self._audio)))
        with HeldInterrupts() as interrupts, make_bar(use_tqdm, desc="Audio", unit="s", total=None) as bar:
            self._bar = bar
            try:
                while True:
                    while len(self._active) < most and (index := next(waiting, None)) is not None:
                        self._advance(index, self._transcribe(index), None)
                    if not self._active:
                        break
                    interrupts.deliver()
                    for output in self._engine.step():
                        if output.request_id in self._active:
                            self._advance(*self._active.pop(output.request_id), output)
            finally:  # an interrupt leaves nothing behind
                for request_id, (_, work) in self._active.items():
                    self._engine.abort_request(request_id)
                    work.close()
        return cast("list[Transcription]", self._transcriptions)

    def _advance(
        self, index: int, work: Coroutine[str, RequestOutput | None, Transcription], output: RequestOutput | None
    ) -> None:
        """Continues a transcription up to its next request, or to its end."""
        try:
            self._active[work.send(output)] = index, work
            return
        except StopIteration as end:
            transcription: Transcription = end.value
        except OctavoError as e:
            if self._on_end is None or isinstance(e, ConfigError):
                raise
            transcription = Transcription("", "", 0.0, error=str(e))
        self._transcriptions[index] = transcription
        if self._on_end is not None:
            self._on_end(index, transcription)

    async def _transcribe(self, index: int) -> Transcription:
        params, options = self._params[index], self._options[index]
        with open_audio(self._audio[index], self._limits) as opened:
            self._bar.total = round((self._bar.total or 0) + opened.seconds, 1)
            done = 0.0
            try:
                async for part in transcribe_recording(self._speech, self, opened, params, options, self._limits):
                    if isinstance(part, Transcription):
                        return part
                    seconds = min(opened.seconds, part.end)
                    self._bar.update(round(seconds - done, 1))
                    done = seconds
            finally:
                self._bar.update(round(opened.seconds - done, 1))
        raise AssertionError("a transcription ends with the whole")

    async def in_thread(self, call: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """``SpeechHost.in_thread``, in this thread."""
        return call(*args, **keywords)

    async def answer(self, request: SpeechRequest) -> RequestOutput:
        """``SpeechHost.answer``: the output comes with one of the engine's steps."""
        request_id = f"audio-{next(self._request_numbers)}"
        self._engine.add_request(request_id, request.prompt, request.params, request.options, streaming=False)
        return await _output_of(request_id)


@types.coroutine
def _output_of(request_id: str) -> Generator[str, RequestOutput, RequestOutput]:
    return (yield request_id)


class Progress:
    """A bar of finished prompts, with tokens per second."""

    def __init__(self, bar: Bar, total: int | None, done: int) -> None:
        """``total``: number of prompts, if known; ``done``: those that were refused at once."""
        self._bar: Any = make_bar(bar, total=total, initial=done, desc="Prompts")
        self._start = time.perf_counter()
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def add(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Counts a finished prompt."""
        self._tokens_in += len(output.prompt_token_ids)
        seconds = time.perf_counter() - self._start
        speeds = f"in {self._tokens_in / seconds:.0f} tok/s"
        if isinstance(output, RequestOutput):
            self._tokens_out += sum(len(o.token_ids) for o in output.outputs)
            speeds += f", out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update()


def make_bar(bar: Bar, **options: Any) -> Any:
    """Makes a bar with tqdm's arguments; it is hidden if ``bar`` is False."""
    from tqdm import tqdm

    make: Callable[..., Any] = bar if callable(bar) else functools.partial(tqdm, disable=not bar)
    return make(dynamic_ncols=True, **options)


def _with_token_ids(prompts: Any, token_ids: TokenIds) -> Prompt | Sequence[Prompt]:
    """The prompts of a method that takes ``prompt_token_ids`` too."""
    if token_ids is None:
        if prompts is None:
            raise InvalidRequestError(
                "must be text, token ids, a dictionary or a list of these", path="prompts", got=None
            )
        return cast("Prompt", prompts)
    if isinstance(token_ids, np.ndarray):
        token_ids = token_ids.tolist()
    single = is_single("prompt_token_ids", token_ids, int, "token ids or a list of them")
    many: list[Any] = [token_ids] if single else list(token_ids)
    texts = [None] * len(many) if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
    check_one_each("prompts", texts, len(many))
    made: list[Any] = [{"prompt": text, "prompt_token_ids": list(ids)} for text, ids in zip(texts, many, strict=True)]
    return cast("Prompt", made[0]) if single else made


def is_single(name: str, value: object, first: type, forms: str) -> bool:
    """Whether ``value`` is one prompt or conversation, and not a list of them.

    ``first``: the type of a single one's first element; ``forms``: the accepted types, for the error.
    """
    if isinstance(value, (str, dict)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], first)
    raise InvalidRequestError(f"must be {forms}", path=name, got=value)


def refused(request_id: str, prompt: Any, params: object, error: OctavoError) -> RequestOutput | Pooled:
    """The output of a refused request."""
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


def _prompt_identity(prompt: Prompt) -> object:
    """Equal for equal texts; token ids belong to one pair, so their identity is that of the object."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Mapping) or "prompt_token_ids" in prompt:
        return id(prompt)
    return tuple(prompt.items())
