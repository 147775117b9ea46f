"""The engine for a program with an event loop: requests as streams, pauses, and the replicas."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from octavo.config.engine_config import EngineConfig
from octavo.config.sources import resolve_config
from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, InvalidRequestError, OctavoError
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import Pooled, PoolingParams, RequestOutput
from octavo.core.request import (
    DEFAULT_OPTIONS,
    Prompt,
    RequestOptions,
    options_from_keywords,
)
from octavo.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.core.stats import EngineView
from octavo.engine.core_client import CoreClient, ProcessStarter, watch
from octavo.engine.core_start import CoreProcess
from octavo.engine.front_end import FrontEnd, log_stats, make_stat_loggers, name_adapters, name_requests
from octavo.engine.messages import StepDone
from octavo.engine.model_files import check_classes, find_model
from octavo.engine.operations import EngineOperations, P, T
from octavo.engine.output_processor import RequestState
from octavo.engine.replicas import ProcessReplicas, ReplicaState, RestartLimit
from octavo.engine.tokenizer import Tokenizer
from octavo.loader.resolve import description_digest
from octavo.process.startup import ProcessProfile, phase

if TYPE_CHECKING:
    from octavo.engine.front_end import Params, SharedPrefix, StatLogger
    from octavo.process.fork_server import ForkServer
    from octavo.speech.audio_files import Audio, AudioLimits, OpenedAudio
    from octavo.speech.audio_reader import SandboxRecording
    from octavo.speech.segments import Segment, Transcription
    from octavo.speech.transcription import TranscriptionParams

logger = logging.getLogger("octavo")
#: What happens to open requests in ``AsyncLLM.pause_generation``.
PauseMode = Literal["abort", "wait", "keep"]
#: Sequences of a step processed before the event loop runs other tasks; each takes some 20 microseconds.
MAX_SEQUENCES_AT_ONCE = 64


class AsyncLLM(EngineOperations):
    """A model that serves many requests at once; its engine cores are other processes, so no step waits for this one.

    >>> llm = AsyncLLM("smollm2-135m", max_num_seqs=64)
    >>> async for output in llm.generate("a", "The capital of France is", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)
    >>> await llm.shutdown()

    Made like an ``LLM``. The first awaited call, a request or ``ready()``, loads the model; ``async with`` does so and
    shuts it down. ``front_end`` and the attributes after it exist from then on. A bad request raises
    ``InvalidRequestError``; the others continue. All methods are for one event loop.
    """

    model_config: ModelConfig
    #: Longest sequence in tokens, prompt and output together.
    max_model_len: int
    startup_profiles: list[ProcessProfile]
    _replicas: ProcessReplicas
    _starter: ProcessStarter

    def __init__(
        self, model: str | os.PathLike[str] | EngineConfig, *, stat_loggers: Sequence[StatLogger] = (), **options: Any
    ) -> None:
        """Checks the options, those of ``LLM``, or an ``EngineConfig`` with all of them; loads nothing yet.

        Raises:
            ConfigError: an option is unknown or wrong, or names a missing class.
        """
        if not isinstance(model, EngineConfig):
            self.config = resolve_config({"model": os.fspath(model), **options})
        elif options:
            raise ConfigError(f"the options {', '.join(options)} must be given in the EngineConfig, or without one")
        else:
            self.config = model
        check_classes(self.config)
        super().__init__([*make_stat_loggers(self.config), *stat_loggers])
        #: Set when all cores are lost for good, but not by ``shutdown``.
        self.died = asyncio.Event()
        #: Cleared while generation is paused.
        self._accepts = asyncio.Event()
        self._accepts.set()
        self._ending: Awaitable[None] | None = None
        self._loading = asyncio.Lock()
        self._loaded = False
        #: Streams of open requests by group; prompt tokens of those that have not begun; requests that are prepared.
        self._streams: dict[int, RequestStream] = {}
        self._queued = QueuedTokens()
        self._num_preparing = 0
        #: Set when one of these ends.
        self._one_ended = asyncio.Event()
        self._error: EngineDeadError | None = None
        #: Whether open requests may finish during the shutdown.
        self._lets_finish = False
        self._forks: ForkServer | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        process: CoreProcess | None = None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        forks: ForkServer | None = None,
    ) -> Self:
        """Returns an engine that is ready; see ``ready``. ``forks``: a server for the processes of cores."""
        try:
            llm = cls(config, stat_loggers=stat_loggers)
            llm._forks = forks
        except BaseException:
            if process is not None:
                await process.end_and_wait()
            raise
        await llm.ready(process)
        return llm

    async def ready(self, process: CoreProcess | None = None) -> None:
        """Starts the core's process, or takes one that was started before, and waits until its model is loaded.

        Requests call it if needed. A program with slow imports starts the ``CoreProcess`` before them. A core that does
        no step for ``step_timeout`` seconds while requests are open is killed, as if it had died.

        Raises:
            OctavoError: as ``LLM``: the model is unknown, unreadable, unsupported or too large.
            EngineDeadError: the process ended while it loaded, or the engine was shut down.
        """
        async with self._loading:
            self.check_alive()
            if self._loaded:
                return
            process = process or CoreProcess(self._forks)
            try:
                await self._load(process)
            except BaseException:
                await process.end_and_wait()
                raise
            self._replicas.start_task(watch(self._replicas, self.config.step_timeout))
            self._starter.fill_reserve()
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
        limit, others = RestartLimit(config.engine_restarts), range(config.data_parallel_size - 1)
        self._starter = starter = ProcessStarter(config.standby_engines, limit, self._forks)
        cores = [CoreClient(each) for each in (process, *(CoreProcess(self._forks) for _ in others))]
        start = partial(starter.begin, cores, config.model_dump(exclude_unset=True), logger.getEffectiveLevel())
        try:
            with phase("model files and tokenizer"):
                model = await asyncio.to_thread(find_model, config, partial(loop.call_soon_threadsafe, start))
            starter.description = await asyncio.to_thread(description_digest, model.folder)
            if config.enable_lora:  # imported now, so that the first adapter delays no request
                await asyncio.to_thread(importlib.import_module, "octavo.loader.adapters")
            with phase("waiting for the engine core"):
                ready = await asyncio.gather(*(core.ready for core in cores))
            if error := next((core.error for core in cores if core.error is not None), None):
                raise error
        except BaseException:
            await asyncio.gather(*(core.kill() for core in cores))
            raise
        starter.start_seconds = time.monotonic() - starter.created
        replicas = ProcessReplicas(cores, starter, config)
        self.model_config, self.max_model_len = ready[0].model_config, min(each.max_model_len for each in ready)
        self.startup_profiles = [profile for each in ready for profile in each.profiles]
        files = model.with_config(self.model_config)
        self._use(FrontEnd(files, self.max_model_len, crosses_process=True), replicas)
        self.adapters.on_unpin = self._unpin
        replicas.on_step, replicas.on_start, replicas.on_death = self._receive, self._restore, self._die
        replicas.requests.on_failed = self._fail

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # --- requests -----------------------------------------------------------------------------------------------------

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

        ``output_kind`` of the parameters overrides ``kind``. ``keywords``: fields of ``options``.

        Raises:
            InvalidRequestError: the request cannot be served.
            ClientLimitError: the client has used up its seconds for compiling (``Sandbox``).
            AdapterError: its adapter cannot be used.
            EngineDeadError: the engine has died or is being shut down.
            EngineStateError: the engine is sleeping.
            OctavoError: for the first request, as ``ready``.
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
            with self._preparing():
                prompt, options, adapter = await self.front_end.prepare(prompt, params, options)
                if not self._accepts.is_set():
                    continue
                # Nothing is awaited below: the adapter stays loaded until the request counts as its user.
                self._check_accepts("a request", has_begun=True)
                return self._send(self.front_end.add(request_id, prompt, params, options, adapter, kind))

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        streaming: bool = True,
        **keywords: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterates over the outputs of one request, each with everything so far; ``submit`` gives increments instead.

        ``output_kind`` DELTA of the parameters gives increments too, FINAL_ONLY one output, as ``streaming=False``
        does. The request is aborted if the iteration is left early or its task is cancelled. ``keywords``: the fields
        of ``RequestOptions``, and those of other engines, see ``LLM``. Raises as ``submit``.
        """
        options = options_from_keywords("generate", keywords)
        kind = RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY
        with contextlib.closing(await self.submit(request_id, prompt, sampling_params, options, kind=kind)) as stream:
            async for output in stream:
                yield output

    async def pool(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        **keywords: Any,
    ) -> Pooled:
        """Computes the vector or scores of a prompt (``PoolingOutput``); raises as ``submit``. Cancelling aborts it."""
        stream = await self.submit(request_id, prompt, params, options, streaming=False, **keywords)
        with contextlib.closing(stream):
            output: Any = await anext(stream)
        return output

    async def transcribe(
        self,
        request_id: str,
        audio: Audio | OpenedAudio | SandboxRecording,
        params: TranscriptionParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        limits: AudioLimits | None = None,
        scores: bool = False,
        **keywords: Any,
    ) -> AsyncGenerator[Segment | Transcription, None]:
        """Iterates over the segments of a recording as they become certain, and at last yields the whole.

        Its windows are requests with its priority and arrival time; they end if the iteration is left. ``audio``,
        ``params`` and ``limits`` as in ``LLM.transcribe``. Files are decoded in threads of this process, which have
        ended when the iteration is left or cancelled; files of strangers must come from ``AudioReader.open``, which
        decodes them in the sandbox. ``scores``: segments always have ``no_speech_prob``.

        Raises:
            InvalidRequestError: the model takes no audio or cannot do what is asked, or as ``Recording``.
            WorkerError: the engine failed at a window.
            EngineDeadError, EngineStateError: as ``submit``.
        """
        await self.ready()
        options = options_from_keywords("transcribe", keywords, options)
        from octavo.engine.transcription import StreamHost, transcribe_recording
        from octavo.speech.audio_files import DEFAULT_LIMITS
        from octavo.speech.transcription import TranscriptionParams

        params, limits = params or TranscriptionParams(), limits or DEFAULT_LIMITS
        host, speech = StreamHost(self, request_id), self.front_end.speech
        stream = transcribe_recording(speech, host, audio, params, options, limits, scores=scores)
        async with contextlib.aclosing(stream) as segments:
            async for segment in segments:
                yield segment

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request or several; their streams give their last outputs. No effect on those that are not open."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            if self._loaded and (request := self._end(one)) is not None:
                self._notify(request)

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        await self.ready()
        return self.tokenizer

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **keywords)

    async def _tokenize(self, prompt: Prompt) -> Prompt:
        return await self.front_end.tokenize(prompt)

    def _check_accepts(self, what: str, *, has_begun: bool = False) -> None:
        if not (has_begun and self._lets_finish):
            self.check_alive()
        if self.is_sleeping:
            raise EngineStateError(f"the engine sleeps: wake_up(), or POST /wake_up, must come before {what}")

    def _send(self, request: RequestState, replica: int | None = None) -> RequestStream:
        self._add(request, replica)
        stream = self._streams[request.group_id] = RequestStream(request, self._abandon)
        self._queued.add(request.group_id, len(request.prompt_token_ids))
        return stream

    def _remove(self, request: RequestState) -> RequestStream:
        self._queued.remove(request.group_id)
        self._one_ended.set()
        return self._streams.pop(request.group_id)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Counts a request that has no stream yet: it is tokenized, its images and grammar are processed."""
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._one_ended.set()

    async def _wait_idle(self, *, prepared: bool) -> None:
        """Waits until no stream is open; ``prepared``: and no request is being prepared."""
        while self._streams or (prepared and self._num_preparing):
            self._one_ended.clear()
            await self._one_ended.wait()

    def _abandon(self, request: RequestState) -> None:
        """Aborts a request whose stream was closed."""
        if request.group_id in self._streams:
            self._end(request.request_id)
            self._remove(request)

    # --- outputs of the cores -----------------------------------------------------------------------------------------

    async def _receive(self, step: StepDone) -> None:
        """Passes the outputs of a step to the streams, and tells the core which sequences a stop string has ended."""
        for admission in step.outputs.admissions:
            self._queued.remove(admission.group_id)
        for part in step.outputs.parts(MAX_SEQUENCES_AT_ONCE):
            self._process(part)
            await asyncio.sleep(0)
        log_stats(self.stat_loggers, step.stats)

    def _notify(self, request: RequestState) -> None:
        stream = self._remove(request) if request.finished else self._streams[request.group_id]
        stream.notify()

    def _die(self, error: OctavoError) -> None:
        """Fails every open request: all cores are lost for good."""
        self._error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._lets_finish = False
        self._accepts.set()
        logger.critical("%s", self._error)
        for stream in [*self._streams.values()]:
            self.front_end.outputs.discard(stream.request)
            self._replicas.requests.forget(stream.request.group_id)
            self._remove(stream.request).fail(self._error)
        self.died.set()

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float = 0.0) -> Awaitable[None]:
        """Refuses new requests, gives open ones ``timeout`` seconds, aborts the rest and ends the cores.

        Takes effect at once, even if it is not awaited. Where no event loop runs any more, the cores are killed.
        """
        if self._error is None:
            self._lets_finish, self._error = True, EngineDeadError("the engine has been shut down")
        self._accepts.set()
        try:
            task = self._ending = asyncio.get_running_loop().create_task(self._shut_down(timeout))
        except RuntimeError:
            self._end_now()
            return _Ended()
        task.add_done_callback(lambda task: self._end_now() if task.cancelled() else None)  # as the loop ends
        return task

    def _end_now(self) -> None:
        if self._loaded:
            self._replicas.end()

    def _abort_all(self) -> None:
        for stream in [*self._streams.values()]:
            self._end(stream.request.request_id)
            self._notify(stream.request)

    async def _shut_down(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wait_idle(prepared=True)
        self._lets_finish = False
        self._abort_all()
        async with self._loading:  # a core that is loading is not left behind
            if self._loaded:
                await self._replicas.close()

    # --- state --------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises ``EngineDeadError`` if the engine has died or is being shut down."""
        if self._error is not None:
            raise self._error

    @property
    def is_available(self) -> bool:
        """Whether a core serves requests now; if one is being restarted, requests wait for it."""
        return self._error is None and self._loaded and self._replicas.is_available

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Open requests that have not begun."""
        return len(self._queued.lengths)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._queued.tokens

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a core that is being started may be ready."""
        return max(1, math.ceil(self._starter.start_seconds))

    def replica_states(self) -> list[ReplicaState]:
        """The engine's replicas as they are now."""
        return [replica.state() for replica in self._replicas.all] if self._loaded else []

    @property
    def num_standby(self) -> int:
        """Engine cores in reserve that are ready."""
        return self._starter.num_reserve if self._loaded else 0

    @property
    def num_resumed(self) -> int:
        """Requests that continued at another core, or at a restarted one."""
        return self._replicas.requests.num_resumed if self._loaded else 0

    @property
    def num_moved(self) -> int:
        """Requests that moved to another core to decode, with ``replica_roles``."""
        return self._replicas.requests.num_moved if self._loaded else 0

    async def engine_views(self, *, fresh: bool = False) -> list[EngineView]:
        """The blocks, queues and new steps (``fresh``: all recorded ones) of each living replica. For one watcher."""
        await self.ready()
        views = await self._replicas.views(fresh)
        for view in views:
            name_requests(view, self.front_end.outputs.id_of_group)
            name_adapters(view, self.adapters.names_of)
        return views

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def remove_lora(self, lora_id: int, *, wait: bool = False) -> bool:
        """Removes the adapter of this ``lora_int_id``; False if there is none.

        ``AdapterConflictError`` if requests use it; with ``wait`` it takes no new ones and is removed after the last,
        even if this call is cancelled before.
        """
        await self.ready()
        adapter = self.adapters.numbered(lora_id)
        if adapter is None or not wait:
            return await super().remove_lora(lora_id)
        gone = asyncio.Event()
        self.adapters.retire(adapter.name, gone.set)
        await gone.wait()
        return True

    def adapter_requests(self) -> Iterator[tuple[str, str]]:
        """Yields, for each open request with an adapter, the adapter's name and "running" or "waiting"."""
        waiting = self._queued.lengths
        return ((name, "waiting" if i in waiting else "running") for i, name in self.adapters.open_requests())

    # --- replicas and workers -----------------------------------------------------------------------------------------

    async def drain_replica(self, number: int) -> int:
        """Stops new requests for a replica and moves its open ones (``ProcessReplicas.drain``); returns how many."""
        await self.ready()
        return await self._replicas.drain(number)

    async def undrain_replica(self, number: int) -> None:
        """Lets a drained replica take requests again; ``ConfigError`` if there is no such replica."""
        await self.ready()
        self._replicas.undrain(number)

    async def restart_replicas(self) -> None:
        """Restarts the cores one after the other (``ProcessReplicas.restart``). No stream breaks.

        Raises:
            EngineStateError: a restart is in progress, or the engine sleeps.
            ConfigError: the model's configuration or tokenizer has changed.
            OctavoError: a core could not be started.
        """
        await self.ready()
        self._check_accepts("restart_replicas()")
        await self._replicas.restart()

    # --- pauses -------------------------------------------------------------------------------------------------------

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops between two steps until ``resume_generation``, for which new requests wait: to change the weights.

        Args:
            mode: open requests are aborted ("abort"), end before this returns ("wait"), or continue later ("keep").
            clear_cache: resets the prefix cache, except with "keep", whose requests continue in it;
                ``reset_prefix_cache(reset_running_requests=True)`` resets both.

        Raises:
            ConfigError: there is no such mode.
        """
        if mode not in get_args(PauseMode):
            raise ConfigError(f"mode must be {', '.join(get_args(PauseMode))}, not {mode!r}")
        await self.ready()
        self._accepts.clear()
        if mode == "keep" and self.num_open:
            self._replicas.paused = True
            await self._replicas.call("pause", type(None), True)
        if mode == "keep":
            return
        if mode == "abort":
            self._abort_all()
        await self._wait_idle(prepared=False)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Continues after ``pause_generation``; no effect if it is not paused."""
        await self.ready()
        await self._replicas.call("pause", type(None), False)
        self._replicas.paused = False
        self._accepts.set()

    async def is_paused(self) -> bool:
        """Whether new requests wait for ``resume_generation``."""
        return not self._accepts.is_set()

    def shared_prefixes(self) -> list[SharedPrefix]:
        """The shared prefixes, in the order in which they were added."""
        return super().shared_prefixes() if self._loaded else []

    async def _compute_prefix_on(self, replica: int, prefix: SharedPrefix) -> RequestOutput:
        request = self.front_end.outputs.open(self.front_end.prefixes.request(prefix), RequestOutputKind.FINAL_ONLY)
        with contextlib.closing(self._send(request, replica)) as stream:
            return await anext(stream)


class _Ended:
    """Returns None when awaited; unlike a coroutine it need not be."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class RequestStream:
    """Iterates over the output of one request in increments; the last one is finished.

    Unread increments are merged, so a slow reader gets fewer of them and misses nothing. The request runs to its end
    unless ``close`` is called. Iteration raises ``EngineDeadError`` if the engine dies first.
    """

    def __init__(self, request: RequestState, on_close: Callable[[RequestState], None]) -> None:
        self.request = request
        self._on_close = on_close
        self._unread = self._ended = False
        self._error: OctavoError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._unread = False
        output = self.request.take()
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Aborts the request if it has not ended; never waits."""
        self._ended = True
        self._unread = False
        self._on_close(self.request)

    def notify(self) -> None:
        """Called when the request has new output."""
        self._unread = True
        self._changed.set()

    def fail(self, error: OctavoError) -> None:
        """Iteration raises ``error`` once unread output has been taken."""
        self._error = error
        self._changed.set()


@dataclass(slots=True)
class QueuedTokens:
    """Prompt tokens of the requests that have not begun, by group or another key."""

    lengths: dict[Hashable, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, group_id: Hashable, length: int) -> None:
        """Adds a request with ``length`` prompt tokens."""
        self.lengths[group_id] = length
        self.tokens += length

    def remove(self, group_id: Hashable) -> None:
        """Removes a request, if it is there."""
        self.tokens -= self.lengths.pop(group_id, 0)
