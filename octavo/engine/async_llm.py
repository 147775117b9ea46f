"""The engine for a program with an event loop: its core runs in another process, requests are async iterators."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from octavo.core.adapters import LoRARequest, PromptAdapterRequest, one_adapter
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.config_sources import resolve_config
from octavo.core.engine_outputs import EngineCoreOutputs
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, InvalidRequestError, OctavoError
from octavo.core.foreign_options import check_keywords
from octavo.core.messages import StepDone, Stop, check_sendable
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import RequestOutput
from octavo.core.request import EngineCoreRequest
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.adapters import make_registry
from octavo.engine.async_admin import AsyncAdmin
from octavo.engine.chat_template import read_chat_template
from octavo.engine.core_client import CoreProcess
from octavo.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from octavo.engine.model_files import check_classes
from octavo.engine.output_processor import OutputProcessor, RequestState, check_increments
from octavo.engine.replicas import Replicas
from octavo.engine.request_stream import QueuedTokens, RequestStream
from octavo.engine.router import router_of
from octavo.engine.shared_prefixes import SharedPrefixes, read_files
from octavo.engine.stat_loggers import StatLogger, log_stats, make_stat_loggers
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.loader.resolve import resolve_model
from octavo.models.config import default_sampling

#: Texts of this many characters take some 10 ms to tokenize, and are tokenized in a thread.
LONG_TEXT = 8192
#: Sequences of a step processed before the event loop runs other tasks; each takes some 20 microseconds.
MAX_SEQUENCES_AT_ONCE = 64

logger = logging.getLogger("octavo")


class AsyncLLM(AsyncAdmin):
    """A model that serves many requests at once; its engine core is another process, so nothing here slows a step.

    >>> llm = AsyncLLM("smollm2-135m", max_num_seqs=64)
    >>> async for output in llm.generate("a", "The capital of France is", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)
    >>> await llm.shutdown()

    Made like an ``LLM``. The model is loaded by what is awaited first, a request or ``ready()``; ``async with`` does
    that and shuts it down. ``tokenizer``, ``inputs``, ``adapters``, ``model_config`` and ``max_model_len`` exist
    from then on. A bad request raises ``InvalidRequestError``; the others go on. All methods are for one event loop.
    """

    tokenizer: Tokenizer
    inputs: InputProcessor
    model_config: ModelConfig
    #: Longest sequence in tokens, prompt and output together.
    max_model_len: int
    _outputs: OutputProcessor

    def __init__(
        self, model: str | os.PathLike[str] | EngineConfig, *, stat_loggers: Sequence[StatLogger] = (), **options: Any
    ) -> None:
        """Checks the options, those of ``LLM``; nothing is loaded yet. An ``EngineConfig`` has them all.

        Raises:
            ConfigError: an option is unknown or wrong, or names a class that is not there.
        """
        if not isinstance(model, EngineConfig):
            self.config = resolve_config({"model": os.fspath(model), **options})
        elif options:
            raise ConfigError(f"the options {', '.join(options)} must be given in the EngineConfig, or without one")
        else:
            self.config = model
        check_classes(self.config)
        #: They get the statistics of each step, in the event loop.
        self.stat_loggers: list[StatLogger] = [*make_stat_loggers(self.config), *stat_loggers]
        #: Set when the core has died, not when it was shut down.
        self.died = asyncio.Event()
        #: While the engine sleeps, requests are refused.
        self.is_sleeping = False
        self._loading = asyncio.Lock()
        self._loaded = False
        self._streams: dict[str, RequestStream] = {}
        self._queued = QueuedTokens()
        self._unpinning: set[asyncio.Future[None]] = set()
        self._error: EngineDeadError | None = None
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()

    @classmethod
    async def start(
        cls, config: EngineConfig, process: CoreProcess | None = None, *, stat_loggers: Sequence[StatLogger] = ()
    ) -> AsyncLLM:
        """An engine that is ready; see ``ready``."""
        try:
            llm = cls(config, stat_loggers=stat_loggers)
        except BaseException:
            if process is not None:
                await process.end_and_wait()
            raise
        await llm.ready(process)
        return llm

    async def ready(self, process: CoreProcess | None = None) -> None:
        """Starts the core's process, or takes one that was started ahead, and waits until its model is loaded.

        Requests call it where nothing else has. A program whose own imports take time starts the ``CoreProcess`` before
        them. A core that does no step for ``step_timeout`` seconds while requests are open is ended, as if it had died.

        Raises:
            OctavoError: of the type that ``LLM`` would raise: the model is unknown, unreadable, unsupported, too large.
            EngineDeadError: the process ended while it loaded, or the engine was shut down.
        """
        async with self._loading:
            self.check_alive()
            if self._loaded:
                return
            process = process or CoreProcess()
            try:
                prefixes = read_files(self.config)  # wrong files are refused before the model is looked for
                read_chat_template(self.config.chat_template)
                await self._load(process)
            except BaseException:
                await process.end_and_wait()
                raise
            self._replicas.watch(self.config.step_timeout)
            try:
                for text, name in prefixes:
                    await self._compute_prefix(self._prefixes.add(text, name))
            except BaseException as e:
                self._error = EngineDeadError(f"the engine could not be made ready: {e}")
                await self._close()
                raise
            self._loaded = True

    async def _load(self, process: CoreProcess) -> None:
        config = self.config
        more = [CoreProcess() for _ in range(config.data_parallel_size - 1)]
        self._replicas = replicas = Replicas([process, *more], router_of(config))
        try:
            folder = await asyncio.to_thread(
                resolve_model,
                config.model,
                revision=config.revision,
                weights=config.load_format != "dummy",
            )
            defaults = default_sampling(config.generation_config, folder)
            # Without defaults: the core knows what was asked for.
            replicas.start(config.model_dump(exclude_unset=True), str(folder), logger.getEffectiveLevel())
            tokenizer = await asyncio.to_thread(find_tokenizer, config, folder)
            if config.enable_lora:  # what checks adapters, so that the first one holds up no request
                await asyncio.to_thread(importlib.import_module, "octavo.loader.adapters.check")
            ready = await replicas.ready()
        except BaseException:
            await replicas.kill()
            raise
        self.tokenizer, self._outputs = tokenizer, OutputProcessor(tokenizer)
        self.model_config, self.max_model_len = ready.model_config, ready.max_model_len
        self.inputs = InputProcessor(
            tokenizer,
            config,
            vocab_size=ready.model_config.vocab_size,
            eos_token_ids=ready.model_config.eos_token_ids,
            max_model_len=ready.max_model_len,
            default_sampling=defaults,
        )
        self._prefixes = SharedPrefixes(config, self.inputs)
        self.adapters = make_registry(config, ready.model_config)
        self.adapters.on_unpin = self._unpin_adapter
        self._adapter_locks = WeakValueDictionary()
        replicas.on_step, replicas.on_death, replicas.on_lost = self._receive, self._die, self._lose

    async def __aenter__(self) -> AsyncLLM:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        await self.ready()
        return self.tokenizer

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: float = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        user: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        prediction: str | Sequence[int] | None = None,
        streaming: bool = True,
        **keywords: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterates over the outputs of one request, each with everything so far; ``submit`` gives increments instead.

        So does ``output_kind`` DELTA of the parameters; FINAL_ONLY gives one output, as ``streaming=False`` does. The
        request is aborted when the iteration is left before its end or its task is cancelled. ``keywords`` are those of
        other engines, see ``LLM``.

        Raises:
            InvalidRequestError, AdapterError, EngineDeadError, EngineStateError: as for ``submit``.
        """
        check_keywords("generate", keywords)
        stream = await self._submit(
            request_id,
            prompt,
            sampling_params,
            streaming,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            user=user,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
            lora_request=one_adapter(lora_request, prompt_adapter_request),
            prediction=prediction,
        )
        delta = isinstance(sampling_params, SamplingParams) and sampling_params.output_kind is RequestOutputKind.DELTA
        whole: RequestOutput | None = None
        with contextlib.closing(stream):
            async for output in stream:
                whole = output if whole is None or delta else whole + output
                yield whole

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: float = 0,
        arrival_time: float | None = None,
        cache_salt: str = "",
        user: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        prediction: str | Sequence[int] | None = None,
        visible_tokens: frozenset[int] = frozenset(),
        client: str = "",
        streaming: bool = True,
    ) -> RequestStream:
        """Checks and queues a request. If ``streaming``, outputs are increments; else there is one, with everything.

        ``priority``: an integer or a finite float; the lower goes first. Refused, if not 0, under a policy that does
        not look at it. ``arrival_time``: a past moment in seconds of ``time.monotonic()``, by default now; policies,
        ageing, the scheduler's delay and the metrics count from it. Different salts share no cached prefix.
        ``user``, ``ttft_target``, ``tpot_target``, ``lora_request``, ``prompt_adapter_request``,
        ``prediction``: see ``LLMEngine.add_request``. ``visible_tokens``: special tokens that are part of the text
        although others are not. ``client``: who asks; clients take turns with what has to be compiled.

        Raises:
            InvalidRequestError: the request cannot be served.
            ClientLimitError: the client has used up the seconds that it may have for compiling (``Sandbox``).
            AdapterError: its adapter cannot be used.
            EngineDeadError: the engine has died or is being shut down.
            EngineStateError: the engine is sleeping.
            OctavoError: as for ``ready``, of the first request.
        """
        check_increments(params)
        return await self._submit(
            request_id,
            prompt,
            params,
            streaming,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            user=user,
            ttft_target=ttft_target,
            tpot_target=tpot_target,
            lora_request=one_adapter(lora_request, prompt_adapter_request),
            prediction=prediction,
            visible_tokens=visible_tokens,
            client=client,
        )

    async def _submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        streaming: bool,
        *,
        lora_request: LoRARequest | None,
        prediction: str | Sequence[int] | None,
        client: str = "",
        **keywords: Any,
    ) -> RequestStream:
        """``keywords`` as of ``InputProcessor.process``."""
        if isinstance(prompt, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError("a request is given as request_id, prompt, parameters, in this order")
        if not self._loaded:
            await self.ready()
        params = params if params is not None else self.inputs.default_params()
        prompt = await self._tokenize(prompt)
        if isinstance(prediction, str) and len(prediction) >= LONG_TEXT:
            [prediction] = await asyncio.to_thread(self.tokenizer.encode_batch, [prediction], False)
        await self._compile_grammar(params, client)
        adapter = None if lora_request is None else await self._find_adapter(lora_request)
        # From here on nothing is waited for: the adapter stays loaded until the request counts as its user.
        if request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        self.check_alive()
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up(), or POST /wake_up, must come before a request")
        request = self.inputs.process(request_id, prompt, params, prediction=prediction, adapter=adapter, **keywords)
        check_sendable(request.group)
        return self._send(request, streaming)

    def _send(self, request: ProcessedRequest, streaming: bool, replica: int | None = None) -> RequestStream:
        message = self._replicas.encode(request.group)
        stream = RequestStream(self._outputs.open(request, streaming=streaming), self._abandon)
        self._streams[request.request_id] = stream
        self._queued.add(request.group.group_id, len(request.prompt_token_ids))
        self._nothing_open.clear()
        if request.group.adapter is not None:
            self.adapters.begin(request.group.group_id, request.group.adapter)
        self._replicas.add(request.group, message, replica)
        return stream

    async def _tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt, to which token ids are added if it is a long text; that is done in a thread."""
        given = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        text = given.get("prompt")
        if not isinstance(text, str) or len(text) < LONG_TEXT or given.get("prompt_token_ids") is not None:
            return prompt
        # Unlike ``encode``, this lets other threads run.
        [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [text])
        return {**given, "prompt_token_ids": ids}

    async def _compile_grammar(self, params: SamplingParams | BeamSearchParams, client: str) -> None:
        """Compiles the grammar of structured output, if it is new, so that ``process`` finds it."""
        wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
        if wanted is not None:
            params.validate()  # fields may have been assigned
            await self.inputs.grammars.compile_for(client, wanted)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream gives its last output. Nothing happens if it is not open."""
        request = self._outputs.abort(request_id) if self._loaded else None
        if request is not None:
            self._replicas.abort(request.group_id)
            self._notify(request)

    def _abandon(self, request: RequestState) -> None:
        """Aborts a request whose stream was closed."""
        stream = self._streams.get(request.request_id)
        if stream is not None and stream.request is request:  # else it has ended, and its id may be in use again
            self._replicas.abort(request.group_id)
            self._outputs.discard(request)
            self._forget(request)

    def _forget(self, request: RequestState) -> RequestStream:
        self._queued.remove(request.group_id)
        self._replicas.forget(request.group_id)
        self.adapters.end(request.group_id)
        stream = self._streams.pop(request.request_id)
        if not self._streams:
            self._nothing_open.set()
        return stream

    # --- messages from the core -------------------------------------------------------------------------------------

    async def _receive(self, step: StepDone) -> None:
        """Passes the outputs of a step to the streams, and tells the core which sequences a stop string has ended."""
        for admission in step.outputs.admissions:
            self._queued.remove(admission.group_id)
        for part in _parts(step.outputs):
            ready, stopped = self._outputs.process(part)
            for group_id, index in stopped:
                self._replicas.send(group_id, Stop(group_id, index))
            for request in ready:
                self._notify(request)
            await asyncio.sleep(0)
        log_stats(self.stat_loggers, step.stats)

    def _notify(self, request: RequestState) -> None:
        stream = self._forget(request) if request.finished else self._streams[request.request_id]
        stream.notify()

    def _lose(self, requests: list[EngineCoreRequest], error: EngineDeadError) -> None:
        """A replica has died, but not the last: these of its requests fail, or start anew."""
        for group in requests:
            request = self._outputs.of_group(group.group_id)
            stream = self._streams[request.request_id]
            if self.config.data_parallel_retry and not stream.has_given:
                stream.request = self._outputs.reopen(request)
                self._queued.add(group.group_id, len(group.prompt_token_ids))
                self._replicas.add(group, self._replicas.encode(group))
            else:
                self._outputs.discard(request)
                self._forget(request).fail(error)

    def _die(self, error: OctavoError) -> None:
        """The core has died: every open request fails."""
        self._error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        logger.critical("%s", self._error)
        for stream in list(self._streams.values()):
            self._outputs.discard(stream.request)
            self._forget(stream.request).fail(self._error)
        self.died.set()

    # --- the engine -------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises if requests cannot be accepted.

        Raises:
            EngineDeadError: the core has died or is being shut down.
        """
        if self._error is not None:
            raise self._error

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Open requests of which nothing has been computed yet."""
        return len(self._queued.lengths)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._queued.tokens

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Refuses new requests, gives open ones ``timeout`` seconds to finish, aborts the rest and ends the core."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._nothing_open.wait()
        for request_id in list(self._streams):
            await self.abort(request_id)
        async with self._loading:  # a core that is loading is not left behind
            if self._loaded:
                await self._close()

    async def _close(self) -> None:
        await self._replicas.close()


def _parts(outputs: EngineCoreOutputs) -> Iterator[EngineCoreOutputs]:
    """The outputs in the same order, in parts small enough not to block the event loop."""
    sequences = outputs.sequences
    if len(sequences) <= MAX_SEQUENCES_AT_ONCE:
        yield outputs
        return
    yield EngineCoreOutputs(admissions=outputs.admissions, drafts=outputs.drafts)
    for start in range(0, len(sequences), MAX_SEQUENCES_AT_ONCE):
        yield EngineCoreOutputs(sequences=sequences[start : start + MAX_SEQUENCES_AT_ONCE])
    yield EngineCoreOutputs(groups=outputs.groups)
