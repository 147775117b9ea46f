"""The engine for a program with an event loop: its core runs in another process, requests are async iterators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.engine_outputs import EngineCoreOutputs
from octavo.core.errors import EngineDeadError, EngineStateError, InvalidRequestError, OctavoError
from octavo.core.messages import Abort, Add, Ready, Start, StepDone, Stop, check_sendable
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import SchedulerStats, StepStats
from octavo.engine.core_client import CoreClient, CoreProcess
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.request_stream import RequestStream
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.loader.resolve import resolve_model

#: Texts of this many characters take some 10 ms to tokenize, and are tokenized in a thread.
LONG_TEXT = 8192
#: Sequences of a step processed before the event loop runs other tasks; each takes some 20 microseconds.
MAX_SEQUENCES_AT_ONCE = 64
#: Seconds without a step, while requests are open, after which the core is taken to hang. A step that fills the token
#: budget (2,048 tokens) of a model of 7 billion parameters takes two minutes on a few processor cores.
STEP_TIMEOUT = 300.0
#: The same until a step has ended: on a GPU it compiles kernels, which takes minutes where none are cached.
FIRST_STEP_TIMEOUT = 900.0

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class _QueuedTokens:
    """Prompt tokens of the requests of which nothing has been computed yet, by group."""

    lengths: dict[int, int] = field(default_factory=dict)
    tokens: int = 0

    def add(self, group_id: int, length: int) -> None:
        self.lengths[group_id] = length
        self.tokens += length

    def remove(self, group_id: int) -> None:
        self.tokens -= self.lengths.pop(group_id, 0)


class AsyncLLM:
    """A model that serves many requests at once; its engine core is another process, so nothing here slows a step.

    >>> llm = await AsyncLLM.start(make_config(model="smollm2-135m"))
    >>> async for output in llm.generate("a", "The capital of France is", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)
    >>> await llm.shutdown()

    All methods are for the event loop that it was started on.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, client: CoreClient, ready: Ready) -> None:
        """Use ``start``."""
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = ready.model_config
        #: Longest sequence in tokens, prompt and output together.
        self.max_model_len = ready.max_model_len
        #: Called after each step with its statistics; its exceptions are logged.
        self.on_step: Callable[[StepStats], None] | None = None
        #: Set when the core has died, not when it was shut down.
        self.died = asyncio.Event()
        #: While the engine sleeps, requests are refused.
        self.is_sleeping = False
        self.inputs = InputProcessor(
            tokenizer,
            vocab_size=ready.model_config.vocab_size,
            eos_token_ids=ready.model_config.eos_token_ids,
            max_model_len=ready.max_model_len,
            seed=config.seed,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, RequestStream] = {}
        self._queued = _QueuedTokens()
        self._error: EngineDeadError | None = None
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        #: Steps reported by the core.
        self._num_steps = 0
        self._watchdog: asyncio.Task[None] | None = None
        self._client = client
        client.on_step, client.on_death = self._receive, self._die

    @classmethod
    async def start(
        cls, config: EngineConfig, process: CoreProcess | None = None, *, step_timeout: float = STEP_TIMEOUT
    ) -> AsyncLLM:
        """Starts the core's process, or takes one that was started ahead, and waits until its model is loaded.

        A program whose own imports take time starts the ``CoreProcess`` before them. A core that does no step for
        ``step_timeout`` seconds while requests are open is ended, as if it had died (see ``FIRST_STEP_TIMEOUT``).

        Raises:
            OctavoError: of the type that ``LLM`` would raise: the model is unknown, unreadable, unsupported, too large.
            EngineDeadError: the process ended while it loaded.
        """
        process = process or CoreProcess()
        try:
            llm = await cls._start(config, process)
        except BaseException:
            process.kill()
            raise
        llm._watchdog = asyncio.create_task(llm._watch(step_timeout))
        return llm

    @classmethod
    async def _start(cls, config: EngineConfig, process: CoreProcess) -> AsyncLLM:
        client = CoreClient(process)
        try:
            folder = await asyncio.to_thread(
                resolve_model,
                config.model,
                dtype=config.dtype,
                revision=config.revision,
                weights=config.load_format != "dummy",
            )
            client.send(Start(config.model_dump(), str(folder), logger.getEffectiveLevel()))
            tokenizer = await asyncio.to_thread(find_tokenizer, config, folder)
            ready = await client.ready
            if client.error is not None:
                raise client.error
        except BaseException:
            client.kill()
            raise
        return cls(config, tokenizer, client, ready)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streaming: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterates over the outputs of one request, each with everything so far; ``submit`` gives increments instead.

        The request is aborted when the iteration is left before its end or its task is cancelled.
        """
        stream = await self.submit(
            request_id, prompt, params, priority=priority, cache_salt=cache_salt, streaming=streaming
        )
        whole: RequestOutput | None = None
        with contextlib.closing(stream):
            async for output in stream:
                whole = output if whole is None else whole + output
                yield whole

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streaming: bool = True,
    ) -> RequestStream:
        """Checks and queues a request. If ``streaming``, outputs are increments; else there is one, with everything.

        A lower ``priority`` goes first, under the policies that look at it; different salts share no cached prefix.

        Raises:
            InvalidRequestError: the request cannot be served.
            EngineDeadError: the engine has died or is being shut down.
            EngineStateError: the engine is sleeping.
        """
        params = params if params is not None else SamplingParams()
        text, prompt = await self._tokenize(prompt)
        if request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        self.check_alive()
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps: wake_up(), or POST /wake_up, must come before a request")
        request = self.inputs.process(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        check_sendable(request.group)
        request.prompt = text if text is not None else request.prompt
        message = self._client.encode(Add(request.group))
        stream = RequestStream(self._outputs.open(request, streaming=streaming), self._abandon)
        self._streams[request_id] = stream
        self._queued.add(request.group.group_id, len(request.prompt_token_ids))
        self._nothing_open.clear()
        self._client.send(message)
        return stream

    async def _tokenize(self, prompt: Prompt) -> tuple[str | None, Prompt]:
        """(text, token ids) of a long text, tokenized in a thread; (None, prompt) for any other prompt."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and len(prompt) == 1 else prompt
        if not isinstance(text, str) or len(text) < LONG_TEXT:
            return None, prompt
        # Unlike ``encode``, this lets other threads run.
        ids = await asyncio.to_thread(self.tokenizer.encode_batch, [text])
        return text, ids[0]

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream gives its last output. Nothing happens if it is not open."""
        request = self._outputs.abort(request_id)
        if request is not None:
            self._client.send(Abort(request.group_id))
            self._notify(request)

    def _abandon(self, request: RequestState) -> None:
        """Aborts a request whose stream was closed."""
        stream = self._streams.get(request.request_id)
        if stream is not None and stream.request is request:  # else it has ended, and its id may be in use again
            self._client.send(Abort(request.group_id))
            self._outputs.discard(request)
            self._forget(request)

    def _forget(self, request: RequestState) -> RequestStream:
        self._queued.remove(request.group_id)
        stream = self._streams.pop(request.request_id)
        if not self._streams:
            self._nothing_open.set()
        return stream

    # --- messages from the core -------------------------------------------------------------------------------------

    async def _receive(self, step: StepDone) -> None:
        """Passes the outputs of a step to the streams, and tells the core which sequences a stop string has ended."""
        self._num_steps += 1
        for admission in step.outputs.admissions:
            self._queued.remove(admission.group_id)
        for part in _parts(step.outputs):
            ready, stopped = self._outputs.process(part)
            for group_id, index in stopped:
                self._client.send(Stop(group_id, index))
            for request in ready:
                self._notify(request)
            await asyncio.sleep(0)
        if self.on_step is not None:
            try:
                self.on_step(step.stats)
            except Exception:
                logger.exception("on_step failed")

    def _notify(self, request: RequestState) -> None:
        stream = self._forget(request) if request.finished else self._streams[request.request_id]
        stream.notify()

    async def _watch(self, step_timeout: float) -> None:
        """Ends a core that does no step for too long while requests are open.

        Checks ten times in that period and counts its own checks, so that a pause of this process does not count.
        """
        seen, quiet = -1, 0.0
        while True:
            await asyncio.sleep(step_timeout / 10)
            if not self._streams or seen != self._num_steps:
                seen, quiet = self._num_steps if self._streams else -1, 0.0
                continue
            quiet += step_timeout / 10
            patience = step_timeout if self._num_steps else max(step_timeout, FIRST_STEP_TIMEOUT)
            if quiet > patience:
                self._client.give_up(EngineDeadError(f"the engine's process hangs: no step for {patience:g} s"))
                return

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

    async def stats(self) -> SchedulerStats:
        """The state of queues and blocks between two steps, and totals."""
        return await self._client.call("stats", SchedulerStats)

    async def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        await self._client.call("reset_prefix_cache", type(None))

    async def sleep(self, level: int = 1) -> None:
        """Frees the engine's memory until ``wake_up``; see ``LLM.sleep`` for the levels.

        Raises:
            EngineStateError: requests are unfinished.
            OctavoError: the weights cannot move.
        """
        self.check_alive()
        if self._streams:
            raise EngineStateError(f"{len(self._streams)} requests are unfinished: let them end or abort them first")
        self.is_sleeping = True  # from now on requests are refused
        try:
            await self._client.call("sleep", type(None), level)
        except OctavoError:
            self.is_sleeping = False
            raise

    async def wake_up(self) -> None:
        """Restores weights and KV cache; nothing happens if the engine is not sleeping."""
        await self._client.call("wake_up", type(None))
        self.is_sleeping = False

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Refuses new requests, gives open ones ``timeout`` seconds to finish, aborts the rest and ends the core."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._nothing_open.wait()
        for request_id in list(self._streams):
            await self.abort(request_id)
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._client.close()


def _parts(outputs: EngineCoreOutputs) -> Iterator[EngineCoreOutputs]:
    """The outputs in the same order, in parts small enough not to block the event loop."""
    sequences = outputs.sequences
    if len(sequences) <= MAX_SEQUENCES_AT_ONCE:
        yield outputs
        return
    yield EngineCoreOutputs(admissions=outputs.admissions)
    for start in range(0, len(sequences), MAX_SEQUENCES_AT_ONCE):
        yield EngineCoreOutputs(sequences=sequences[start : start + MAX_SEQUENCES_AT_ONCE])
    yield EngineCoreOutputs(groups=outputs.groups)
