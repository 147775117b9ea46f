"""The requests of an engine with an event loop: its core runs in another process, and each output is a stream."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import Awaitable, Generator, Sequence
from functools import partial
from typing import Any, Self

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.config_sources import resolve_config
from octavo.core.engine_outputs import EngineCoreOutputs, GroupOutput
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, InvalidRequestError, OctavoError
from octavo.core.messages import NO_REPLY, Abort, Call, StepDone, Stop, Unpin
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import RequestOutput
from octavo.core.pooling_params import PoolingParams
from octavo.core.prompts import Prompt
from octavo.core.request import SequenceStatus
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions, options_from_keywords
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.core.startup_profile import ProcessProfile, phase
from octavo.engine.adapter_registry import AdapterRegistry
from octavo.engine.core_start import CoreProcess
from octavo.engine.front_end import FrontEnd, Params
from octavo.engine.input_processor import InputProcessor
from octavo.engine.migration import Migration
from octavo.engine.model_files import check_classes, find_model
from octavo.engine.open_streams import OpenStreams
from octavo.engine.placement import CORE_ENDED
from octavo.engine.replicas import Replicas
from octavo.engine.request_state import RequestState
from octavo.engine.request_stream import RequestStream
from octavo.engine.shared_prefixes import SharedPrefix
from octavo.engine.stat_loggers import StatLogger, log_stats, make_stat_loggers
from octavo.engine.tokenizer import Tokenizer
from octavo.loader.checkpoint_digest import description_digest

#: Sequences of a step processed before the event loop runs other tasks; each takes some 20 microseconds.
MAX_SEQUENCES_AT_ONCE = 64

logger = logging.getLogger("octavo")


class AsyncEngine:
    """The part of ``AsyncLLM`` that loads the model and serves requests."""

    #: These exist once the model is loaded. ``front_end`` owns the next three.
    front_end: FrontEnd
    tokenizer: Tokenizer
    inputs: InputProcessor
    #: The adapters that requests may name.
    adapters: AdapterRegistry
    model_config: ModelConfig
    #: Longest sequence in tokens, prompt and output together.
    max_model_len: int
    #: The starts of the other processes.
    startup_profiles: list[ProcessProfile]
    _replicas: Replicas
    _migration: Migration

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
        #: Set when no core is left, and none is started again; not when the engine was shut down.
        self.died = asyncio.Event()
        #: While the engine sleeps, requests are refused.
        self.is_sleeping = False
        #: Not set while generation is paused: requests wait for it.
        self._accepts = asyncio.Event()
        self._accepts.set()
        self._end: Awaitable[None] | None = None
        self._loading = asyncio.Lock()
        self._loaded = False
        self._open = OpenStreams()
        self._error: EngineDeadError | None = None
        #: While it is shut down, requests that had begun before may still finish.
        self._lets_finish = False

    @classmethod
    async def start(
        cls, config: EngineConfig, process: CoreProcess | None = None, *, stat_loggers: Sequence[StatLogger] = ()
    ) -> Self:
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
                await self._load(process)
            except BaseException:
                await process.end_and_wait()
                raise
            self._replicas.watch(self.config.step_timeout)
            try:
                prefixes = self.front_end.prefixes
                for text, name in self.front_end.files.prefixes:
                    await self._compute_prefix(prefixes.add(text, name))
            except BaseException as e:
                self._error = EngineDeadError(f"the engine could not be made ready: {e}")
                await self._replicas.close()
                raise
            self._loaded = True

    async def _load(self, process: CoreProcess) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        more = [CoreProcess() for _ in range(config.data_parallel_size - 1)]
        self._replicas = replicas = Replicas([process, *more], config)
        # Without defaults: the core knows what was asked for.
        start = partial(replicas.begin, config.model_dump(exclude_unset=True), logger.getEffectiveLevel())
        try:
            with phase("model files and tokenizer"):
                model = await asyncio.to_thread(find_model, config, partial(loop.call_soon_threadsafe, start))
            replicas.starter.description = await asyncio.to_thread(description_digest, model.folder)
            if config.enable_lora:  # what checks adapters, so that the first one holds up no request
                await asyncio.to_thread(importlib.import_module, "octavo.loader.adapters.adapter_files")
            with phase("waiting for the engine core"):
                ready = await replicas.ready()
        except BaseException:
            await replicas.kill()
            raise
        self.front_end = front_end = FrontEnd(model.with_config(ready.model_config), ready.max_model_len, sends=True)
        self.tokenizer, self.inputs, self.adapters = front_end.tokenizer, front_end.inputs, front_end.adapters
        self.model_config, self.max_model_len = ready.model_config, ready.max_model_len
        self.startup_profiles = ready.profiles
        self.adapters.on_unpin = lambda key: replicas.send_all(Call(NO_REPLY, "unpin_adapter", [key]))
        replicas.on_step, replicas.on_start = self._receive, self._make_like_others
        self._migration = Migration(replicas)
        replicas.on_death, replicas.requests.on_failed = self._die, self._fail

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        streaming: bool = True,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        **keywords: Any,
    ) -> RequestStream:
        """Checks and queues a request. If ``streaming``, outputs are of ``kind``; else there is one, with everything.

        ``output_kind`` of the parameters may say otherwise. ``keywords``: fields of ``options``.

        Raises:
            InvalidRequestError: the request cannot be served.
            ClientLimitError: the client has used up the seconds that it may have for compiling (``Sandbox``).
            AdapterError: its adapter cannot be used.
            EngineDeadError: the engine has died or is being shut down.
            EngineStateError: the engine is sleeping.
            OctavoError: as for ``ready``, of the first request.
        """
        options = options_from_keywords("submit", keywords, options)
        kind = kind if streaming else RequestOutputKind.FINAL_ONLY
        if isinstance(prompt, (SamplingParams, BeamSearchParams, PoolingParams)):
            raise InvalidRequestError("a request is given as request_id, prompt, parameters, in this order")
        if not self._loaded:
            await self.ready()
        while True:
            await self._accepts.wait()
            self.check_alive()
            with self._open.preparing():
                prompt, options, adapter = await self.front_end.prepare(prompt, params, options)
                if not self._accepts.is_set():
                    continue
                # Nothing is awaited below: the adapter stays loaded until the request counts as its user.
                self._check_accepts("a request", has_begun=True)
                return self._send(self.front_end.add(request_id, prompt, params, options, adapter, kind))

    def _check_accepts(self, what: str, *, has_begun: bool = False) -> None:
        if not (has_begun and self._lets_finish):
            self.check_alive()
        if self.is_sleeping:
            raise EngineStateError(f"the engine sleeps: wake_up(), or POST /wake_up, must come before {what}")

    def _send(self, request: RequestState, replica: int | None = None) -> RequestStream:
        """Gives a request to ``replica``, or to the one that the router chooses."""
        try:
            self._replicas.requests.add(request, replica)
        except OctavoError:
            self.front_end.outputs.discard(request)
            raise
        return self._open.add(request, self._abandon)

    async def _compute_prefix(self, prefix: SharedPrefix) -> None:
        prefixes, computed = self.front_end.prefixes, None
        try:
            for replica in self._replicas.living:  # each has a KV cache of its own
                output = await self._compute_prefix_on(replica, prefix)
                if output.outputs[0].error != CORE_ENDED:  # its next core will compute all prefixes
                    computed = output
        except BaseException:  # such as a cancellation
            prefixes.discard(prefix)
            self._replicas.send_all(Unpin(prefix.name))
            raise
        if computed is not None:
            prefixes.check(prefix, computed)

    async def _compute_prefix_on(self, replica: int, prefix: SharedPrefix) -> RequestOutput:
        request = self.front_end.outputs.open(self.front_end.prefixes.request(prefix), RequestOutputKind.FINAL_ONLY)
        with contextlib.closing(self._send(request, replica)) as stream:
            return await anext(stream)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream gives its last output. Nothing happens if it is not open."""
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        request = self.front_end.outputs.abort(request_id) if self._loaded else None
        if request is not None:
            self._replicas.requests.send(request.group_id, Abort(request.group_id))
            self._notify(request)

    def _abandon(self, request: RequestState) -> None:
        """Aborts a request whose stream was closed."""
        if self._open.has(request):
            self._replicas.requests.send(request.group_id, Abort(request.group_id))
            self.front_end.outputs.discard(request)
            self._forget(request)

    def _forget(self, request: RequestState) -> RequestStream:
        self._replicas.requests.forget(request.group_id)
        return self._open.remove(request)

    # --- messages from the core -------------------------------------------------------------------------------------

    async def _receive(self, step: StepDone) -> None:
        """Passes the outputs of a step to the streams, and tells the core which sequences a stop string has ended."""
        for admission in step.outputs.admissions:
            self._open.queued.remove(admission.group_id)
        for part in step.outputs.parts(MAX_SEQUENCES_AT_ONCE):
            ready, stopped = self.front_end.outputs.process(part)
            for group_id, index in stopped:
                self._replicas.requests.send(group_id, Stop(group_id, index))
            for request in ready:
                self._notify(request)
            await asyncio.sleep(0)
        log_stats(self.stat_loggers, step.stats)

    def _notify(self, request: RequestState) -> None:
        stream = self._forget(request) if request.finished else self._open.of(request)
        stream.notify()

    def _fail(self, request: RequestState, reason: str) -> None:
        """A request cannot go on, as no core can compute it."""
        end = GroupOutput(request.group_id, SequenceStatus.FINISHED_ERROR.value, reason)
        self.front_end.outputs.process(EngineCoreOutputs(groups=[end]))
        self._notify(request)

    async def _make_like_others(self, number: int) -> None:
        """Brings a core that was started in the place of another to the state of the engine."""
        if self.is_sleeping:
            await self._replicas.call_one(number, "sleep", 1)
            return
        if self._replicas.paused:
            await self._replicas.call_one(number, "pause", True)
        for adapter in self.adapters:
            if adapter.pinned:
                await self._replicas.call_one(number, "pin_adapter", adapter.ref)
        for prefix in self.front_end.prefixes:
            await self._compute_prefix_on(number, prefix)

    def _die(self, error: OctavoError) -> None:
        """No core is left, and none is started again: every open request fails."""
        self._error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._lets_finish = False
        self._accepts.set()
        logger.critical("%s", self._error)
        for stream in self._open:
            self.front_end.outputs.discard(stream.request)
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
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Open requests of which nothing has been computed yet."""
        return len(self._open.queued.lengths)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._open.queued.tokens

    def shutdown(self, timeout: float = 0.0) -> Awaitable[None]:
        """Refuses new requests, gives those that have begun ``timeout`` seconds, aborts the rest and ends the core.

        It begins at once, also if it is not awaited: that waits for its end. Where no event loop runs any more, the
        core is killed.
        """
        if self._error is None:
            self._lets_finish, self._error = True, EngineDeadError("the engine has been shut down")
        self._accepts.set()
        try:
            task = self._end = asyncio.get_running_loop().create_task(self._shut_down(timeout))
        except RuntimeError:
            self._end_now()
            return _Ended()
        task.add_done_callback(lambda task: self._end_now() if task.cancelled() else None)  # as the loop ends
        return task

    def _end_now(self) -> None:
        if self._loaded:
            self._replicas.end()

    def _abort_all(self) -> None:
        for stream in self._open:
            self._abort(stream.request.request_id)

    async def _shut_down(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._open.nothing()
        self._lets_finish = False
        self._abort_all()
        async with self._loading:  # a core that is loading is not left behind
            if self._loaded:
                await self._replicas.close()


class _Ended:
    """Awaited, it gives None at once; unlike a coroutine it need not be awaited."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
