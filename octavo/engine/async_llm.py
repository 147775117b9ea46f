"""The engine for a program with an event loop: its core runs in another process, requests are async iterators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, EngineStateError, InvalidRequestError, OctavoError
from octavo.core.messages import Abort, Add, Ready, Start, StepDone, Stop, check_sendable
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import SchedulerStats, StepStats
from octavo.core.updates import StepOutputs
from octavo.engine.core_client import CoreClient, CoreProcess
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.tokenizer import Tokenizer, find_tokenizer
from octavo.loader.resolve import resolve_model

#: Characters of a text that is tokenized in a thread (some 10 ms): the event loop does not wait so long.
LONG_TEXT = 8192
#: Sequences of a step taken in before the event loop has another turn; each takes some 20 microseconds.
MAX_SEQUENCES_AT_ONCE = 64
#: Seconds without a step, while requests are open, after which the core is held to hang. The longest step that is none
#: fills the token budget: 2,048 tokens of a model of 7 billion parameters take two minutes on a few processor cores.
STEP_TIMEOUT = 300.0
#: The same until a step has ended: on a GPU it compiles kernels, which takes minutes where none are cached.
FIRST_STEP_TIMEOUT = 900.0

logger = logging.getLogger("octavo")


class RequestStream:
    """The output of one request in increments, as an async iterator that ends with a finished one.

    What comes while its reader is away adds up to one increment, so who reads slowly sees fewer of them and misses
    nothing. ``close`` it, or the request runs on to its end.

    Raises (while iterating):
        EngineDeadError: the engine died before the request's end.
    """

    def __init__(self, llm: AsyncLLM, request: RequestState) -> None:
        self._llm = llm
        self._request = request
        self._unread = self._ended = False
        self._error: OctavoError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._unread = False
        output = self._request.take()
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Aborts the request if it has not ended; never waits."""
        self._ended = True
        self._unread = False
        self._llm._abandon(self._request)

    def _notify(self) -> None:
        self._unread = True
        self._news.set()

    def _fail(self, error: OctavoError) -> None:
        self._error = error
        self._news.set()


@dataclass(slots=True)
class _Queue:
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
        self.num_blocks = ready.num_blocks
        #: Called after each step with its statistics; what it raises is logged.
        self.on_step: Callable[[StepStats], None] | None = None
        #: Set when the core has died, not when it was shut down.
        self.died = asyncio.Event()
        #: Whether it sleeps: requests are refused.
        self.asleep = False
        self.inputs = InputProcessor(
            tokenizer,
            vocab_size=ready.model_config.vocab_size,
            eos_token_ids=ready.model_config.eos_token_ids,
            max_model_len=ready.max_model_len,
            seed=config.seed,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[str, RequestStream] = {}
        self._queue = _Queue()
        self._error: EngineDeadError | None = None
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        #: Messages about steps that have come.
        self._num_steps = 0
        self._watchdog: asyncio.Task[None] | None = None
        self._client = client
        client.on_step, client.on_death = self._take_in, self._die

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
        """Iterates over the states of one request, each all there is so far; ``submit`` gives what is new instead.

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
        """Checks and queues a request. If ``streaming``, steps give what they add; else there is one output, the whole.

        A lower ``priority`` goes first, under the policies that look at it; different salts share no cached prefix.

        Raises:
            InvalidRequestError: the request cannot be served; all else is as before.
            EngineDeadError: the engine has died or is being shut down.
            EngineStateError: it sleeps.
        """
        params = params if params is not None else SamplingParams()
        text, prompt = await self._tokenize(prompt)
        if request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        self.check_alive()
        if self.asleep:
            raise EngineStateError("the engine sleeps: wake_up() must come before a request")
        request = self.inputs.process(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        check_sendable(request.params)
        request.prompt = text if text is not None else request.prompt
        message = self._client.encode(Add(request.group))
        stream = RequestStream(self, self._outputs.open(request, streaming=streaming))
        self._streams[request_id] = stream
        self._queue.add(request.group.group_id, len(request.prompt_token_ids))
        self._nothing_open.clear()
        self._client.send(message)
        return stream

    async def _tokenize(self, prompt: Prompt) -> tuple[str | None, Prompt]:
        """A long text as itself and its token ids, made in a thread; any other prompt as it is."""
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
        """Ends a request whose stream is read no more."""
        stream = self._streams.get(request.request_id)
        if stream is not None and stream._request is request:  # else it has ended, and its id may be another's
            self._client.send(Abort(request.group_id))
            self._outputs.discard(request)
            self._forget(request)

    def _forget(self, request: RequestState) -> RequestStream:
        self._queue.remove(request.group_id)
        stream = self._streams.pop(request.request_id)
        if not self._streams:
            self._nothing_open.set()
        return stream

    # --- what comes from the core -----------------------------------------------------------------------------------

    async def _take_in(self, step: StepDone) -> None:
        """One step: news for the streams, and word to the core of the sequences that a stop text has ended."""
        self._num_steps += 1
        for admission in step.outputs.admissions:
            self._queue.remove(admission.group_id)
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
        stream._notify()

    async def _watch(self, step_timeout: float) -> None:
        """Ends a core that does nothing while it should.

        It counts its own turns of a tenth of the time, so that a pause of this process is not held against the core.
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
            self._outputs.discard(stream._request)
            self._forget(stream._request)._fail(self._error)
        self.died.set()

    # --- the engine -------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether the core has died; an orderly shutdown is no death."""
        return self.died.is_set()

    def check_alive(self) -> None:
        """Whether requests can be taken.

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
        return len(self._queue.lengths)

    @property
    def queued_tokens(self) -> int:
        """Their prompt tokens."""
        return self._queue.tokens

    async def stats(self) -> SchedulerStats:
        """The state of queues and blocks between two steps, and totals."""
        return await self._client.call("stats", SchedulerStats)

    async def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        await self._client.call("reset_prefix_cache", type(None))

    async def sleep(self) -> None:
        """Gives the GPU's memory back until ``wake_up``; see ``LLM.sleep``.

        Raises:
            EngineStateError: requests are unfinished.
            OctavoError: the weights cannot move.
        """
        self.check_alive()
        if self._streams:
            raise EngineStateError(f"{len(self._streams)} requests are unfinished: let them end or abort them first")
        self.asleep = True  # from now on none is taken
        try:
            await self._client.call("sleep", type(None))
        except OctavoError:
            self.asleep = False
            raise

    async def wake_up(self) -> None:
        """Takes the memory again and is as before; nothing happens if it does not sleep."""
        await self._client.call("wake_up", type(None))
        self.asleep = False

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Takes no more requests, lets the open ones finish for ``timeout`` seconds, aborts the rest, ends the core."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._nothing_open.wait()
        for request_id in list(self._streams):
            await self.abort(request_id)
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._client.close()


def _parts(outputs: StepOutputs) -> Iterator[StepOutputs]:
    """The same in the same order, in parts that the event loop can do in one go."""
    sequences = outputs.sequences
    if len(sequences) <= MAX_SEQUENCES_AT_ONCE:
        yield outputs
        return
    yield StepOutputs(admissions=outputs.admissions)
    for start in range(0, len(sequences), MAX_SEQUENCES_AT_ONCE):
        yield StepOutputs(sequences=sequences[start : start + MAX_SEQUENCES_AT_ONCE])
    yield StepOutputs(groups=outputs.groups)
