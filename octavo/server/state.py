"""State shared by all routes: the engine, the options, metrics, the queue's limits, stored responses."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from starlette.requests import Request

from octavo.config.server_options import CHARS_PER_TOKEN, ServerOptions
from octavo.core.errors import AdapterConflictError, AdapterError, ConfigError
from octavo.core.outputs import CompletionOutput, Pooled, RequestOutput
from octavo.core.request import LoRARequest
from octavo.engine.adapters import Adapter, AdapterResolver, find_by_name, listed, make_resolver
from octavo.engine.async_llm import AsyncLLM, QueuedTokens
from octavo.server.answer_format import ChatFormats
from octavo.server.http.errors import ApiError, server_error, unsupported
from octavo.server.logging import Tracer
from octavo.server.metrics import Metrics
from octavo.server.page import EngineEvents
from octavo.server.prompt_inputs import ImageInputs

if TYPE_CHECKING:
    from octavo.server.model_set import ModelSet
    from octavo.server.openai.response_protocol import InputItem
    from octavo.server.openai.responses import BackgroundResponse

#: Most log lines about unknown fields and tools, as clients can send any number of these.
MAX_NOTES = 100

logger = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a request: the engine's own, or an adapter."""

    #: Its name in the response.
    name: str
    adapter: LoRARequest | None = None


@dataclass(slots=True)
class ServerState:
    """One engine behind one HTTP server; each route gets it by ``state_of``."""

    llm: AsyncLLM
    options: ServerOptions
    metrics: Metrics
    #: Names of the model in requests; a response has the name of its request, or the first.
    model_names: list[str]
    queue: QueueLimit
    formats: ChatFormats
    responses: ResponseStore
    images: ImageInputs
    events: EngineEvents
    tracer: Tracer | None = None
    #: Looks for adapters that are not loaded.
    resolver: AdapterResolver | None = None
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Keeps the engine loaded beyond a request, until the function that it returns is called.
    hold: Callable[[], Callable[[], None]] = lambda: lambda: None
    #: During shutdown open requests may finish and new ones are refused.
    closing: bool = False
    #: Log lines that appear once.
    _logged: set[str] = field(default_factory=set)
    #: By an adapter's name: held while the resolver looks for it.
    _resolving: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    @property
    def max_prompt_chars(self) -> int:
        # A longer prompt is refused without being tokenized.
        return self.options.max_prompt_chars or CHARS_PER_TOKEN * self.llm.max_model_len

    def deadline(self) -> float:
        """The end of ``request_timeout`` for a request that begins now, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.options.request_timeout

    @property
    def tasks(self) -> tuple[str, ...]:
        """The model's tasks: "generate" and the tasks of ``PoolingParams``."""
        return self.llm.front_end.pooling.tasks

    @property
    def sees_images(self) -> bool:
        return self.images.are_seen

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self.llm.num_open

    @property
    def died(self) -> asyncio.Event:
        """Set when the engine is lost for good."""
        return self.llm.died

    async def shut_down(self, timeout: float) -> None:
        """Gives open requests ``timeout`` seconds, and ends the engine."""
        await self.llm.shutdown(timeout)

    async def refuse_requests(self) -> None:
        """Refuses new requests, and ends the streams of those who watch the engine."""
        self.closing = True
        await self.events.close()

    def check_running(self) -> None:
        """Refuses a request while the server shuts down (503), or after the engine's end."""
        if self.closing:
            raise server_error(503, "the server is shutting down", "shutting_down")
        self.llm.check_alive()

    def check_completion(self, completion: CompletionOutput, model: ServedModel) -> None:
        """Raises if the server ended the request as it shuts down, or could not load its adapter."""
        if completion.finish_reason == "abort":
            raise server_error(503, "the request was ended as the server shuts down", "aborted")
        if completion.adapter_failed and model.adapter is not None:
            raise AdapterConflictError(completion.error or "")

    def require(self, task: str) -> None:
        self.llm.front_end.pooling.require(task)

    async def model(self, name: str | None) -> ServedModel:
        """The model that a request names (else 404); the resolver loads an adapter that is not loaded yet."""
        self.check_running()
        if name is None or name in self.model_names or name.removesuffix(":latest") in self.model_names:
            return ServedModel(name or self.model_names[0])
        adapter = self.llm.adapters.get(name)
        if adapter is None and self.resolver is not None:
            adapter = await self._resolve(self.resolver, name)
        if adapter is not None:
            return ServedModel(name, adapter.request)
        names = listed([*self.model_names, *(adapter.name for adapter in self.llm.adapters)])
        raise ApiError(
            404, f"the model {name!r} does not exist here; served: {names}", param="model", code="model_not_found"
        )

    async def _resolve(self, resolver: AdapterResolver, name: str) -> Adapter | None:
        async with self._resolving.setdefault(name, asyncio.Lock()):
            if (adapter := self.llm.adapters.get(name)) is not None:
                return adapter
            path = await asyncio.to_thread(find_by_name, resolver, name)
            if path is None:
                return None
            await self.load_adapter(name, path)
            return self.llm.adapters.get(name)

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> bool:
        """``AsyncLLM.add_lora`` for a client, whose error messages have only the path that clients may see."""
        try:
            return await self._add_adapter(name, path, in_place)
        except AdapterError as e:
            if e.file is not None:
                e.file = self.shown_path(str(e.file))
            raise

    async def _add_adapter(self, name: str, path: str, in_place: bool = False) -> bool:
        adapter = self.llm.adapters.get(name)
        number = self.llm.adapters.new_number() if adapter is None else adapter.number
        added = await self.llm.add_lora(LoRARequest(name, number, path), load_inplace=in_place)
        state = "loaded" if added else "was loaded already"
        logger.info("adapter %s %s", name, state, extra={"fields": {"path": path}})
        return added

    def shown_path(self, path: str) -> str:
        """The path of an adapter for clients: within ``lora_folder``, or its last component."""
        folder = self.options.lora_folder
        if folder is not None and Path(path).is_relative_to(real := Path(os.path.realpath(folder))):
            return str(Path(path).relative_to(real))
        return Path(path).name

    async def load_modules(self) -> None:
        """Loads the adapters of the option ``lora_modules``; raises at the first that cannot be used."""
        for name, path in (self.options.lora_modules or {}).items():
            await self._add_adapter(name, path)

    def default_max_tokens(self, otherwise: int | None) -> int | None:
        """``max_tokens`` of a request without it: the model's own default, or ``otherwise``."""
        limit: int | None = self.llm.inputs.default_sampling.get("max_tokens", otherwise)
        return limit

    def leave_out_tool(self, where: str, kind: str) -> None:
        """Logs once, or refuses (``unsupported_tools``), a kind of tools that only another service could run."""
        if self.options.unsupported_tools == "refuse":
            problem = f"is not supported: its type is {kind[:100]!r}; only tools of the client can be used"
            raise unsupported(where, problem)
        self._log_once(f"requests offer tools that this server cannot run, which are left out: type {kind[:100]!r}")

    def note_unknown(self, name: str) -> None:
        """Logs a field that is ignored, once for each name."""
        self._log_once(f"requests bring a field that is unknown or not supported here and ignored: {name[:100]!r}")

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < MAX_NOTES:
            self._logged.add(message)
            logger.warning("%s", message)


#: The default of the engine's ``max_logprobs`` in a server: the limit of OpenAI's API.
DEFAULT_MAX_LOGPROBS = 20


def make_service(
    llm: AsyncLLM,
    options: ServerOptions,
    metrics: Metrics,
    model_names: list[str],
    tracer: Tracer | None = None,
    responses: ResponseStore | None = None,
) -> ServerState:
    """The state of a server whose engine is ready; ``load_modules`` comes next.

    ``responses``: a store that other models share.
    """
    limit = QueueLimit(llm, options.max_queued_requests, options.max_queued_tokens)
    llm.adapters.reserved += model_names
    llm.inputs.sandbox.seconds_per_minute = options.sandbox_seconds_per_client
    metrics.adapter_states = llm.adapter_requests
    metrics.replica_states, metrics.num_resumed = llm.replica_states, lambda: llm.num_resumed
    metrics.num_moved = lambda: llm.num_moved
    metrics.grammars = llm.inputs.grammars.stats
    if llm.config.max_logprobs is None:
        llm.inputs.max_logprobs = DEFAULT_MAX_LOGPROBS
    _check_extras(llm)
    resolver = make_resolver(options.lora_resolver, options.lora_folder)
    formats = ChatFormats(options.tool_call_parser, options.reasoning_parser)
    if responses is None:
        responses = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
    images, events = ImageInputs(llm, options), EngineEvents(llm, metrics.latencies)
    return ServerState(llm, options, metrics, model_names, limit, formats, responses, images, events, tracer, resolver)


def _check_extras(llm: AsyncLLM) -> None:
    """Logs which package for this model's recordings or images is missing; other requests are served."""
    checks: list[tuple[str, Callable[[], object]]] = []
    if "transcribe" in llm.front_end.pooling.tasks:
        from octavo.speech.audio_files import import_soundfile, import_soxr  # imports numpy

        checks += [("recordings", import_soundfile), ("recordings at rates other than 16 kHz", import_soxr)]
    if llm.model_config.image_facts is not None:
        from octavo.images.image_files import pillow

        checks.append(("images", pillow))
    for inputs, check in checks:
        try:
            check()
        except ConfigError as e:
            logger.warning("requests with %s will be refused: %s", inputs, e)


def state_of(request: Request) -> ServerState:
    """The state of the model that the request names; or of the only one."""
    service: ServerState = request.scope.get("state", {}).get("service") or request.app.state.service
    return service


def models_of(request: Request) -> ModelSet | None:
    """The models of a server that has several."""
    models: ModelSet | None = request.app.state.models
    return models


def deadline_of(request: Request) -> float:
    """``ServerState.deadline``, before the model is known."""
    timeout: float = request.app.state.options.request_timeout
    return asyncio.get_running_loop().time() + timeout


def responses_of(request: Request) -> ResponseStore:
    """The stored responses, of all models."""
    return state_of(request).responses if (models := models_of(request)) is None else models.responses


def operator_state(request: Request) -> ServerState:
    """The ``ServerState`` for a route that changes the server, whose engine must be alive."""
    service = state_of(request)
    service.llm.check_alive()
    return service


# Limits on the queue of requests.

#: Largest ``Retry-After``, in seconds.
MAX_RETRY_AFTER = 60
#: Weight of the newest request in the moving average of the time in the queue.
_NEWEST_WEIGHT = 0.1


class QueueLimit:
    """Refuses requests while too many prompts, or prompt tokens, wait for their first token.

    A prompt counts from ``enter`` on: here while its grammar is compiled or its adapter is read, then in the engine.
    """

    def __init__(self, llm: AsyncLLM, max_requests: int, max_tokens: int) -> None:
        self._llm, self.max_requests, self.max_tokens = llm, max_requests, max_tokens
        #: Prompts, by name, that the engine does not count yet.
        self._entering = QueuedTokens()
        self._mean_wait = 0.0

    def enter(self, lengths: Mapping[Any, int]) -> None:
        """Counts the prompts of a request (name -> length) until ``leave``, or refuses all with 429.

        An empty queue accepts a request of any size: later it would not fit better.
        """
        requests = self._llm.num_queued + len(self._entering.lengths)
        tokens = self._llm.queued_tokens + self._entering.tokens
        if requests and requests + len(lengths) > self.max_requests:
            full = f"{requests} of at most {self.max_requests} requests"
        elif requests and tokens + sum(lengths.values()) > self.max_tokens:
            full = f"{tokens} of at most {self.max_tokens} prompt tokens"
        else:
            for name, length in lengths.items():
                self._entering.add(name, length)
            return
        raise ApiError(
            429,
            f"the server is busy: {full} wait; try again later",
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after)},
        )

    def leave(self, *names: Hashable) -> None:
        """The engine counts these prompts now, or they have failed; may be called again."""
        for name in names:
            self._entering.remove(name)

    @property
    def retry_after(self) -> int:
        return min(max(math.ceil(self._mean_wait), 1), MAX_RETRY_AFTER)

    def observe(self, output: RequestOutput | Pooled) -> None:
        if (waited := output.metrics.time_in_queue) is not None:
            self._mean_wait += _NEWEST_WEIGHT * (waited - self._mean_wait)


# Responses of ``/v1/responses`` that requests can continue.


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and all items that a later one continues."""

    #: JSON.
    body: bytes
    #: The conversation up to its end: input and output of all responses that it continues, and its own.
    items: list[InputItem]
    #: Bytes of the items as JSON.
    items_size: int
    #: ``owner_of`` its request; others get 404.
    owner: str
    #: Number of the last items that are its output.
    num_output: int = 0
    #: Its background run, which is cancelled if the response is forgotten.
    run: BackgroundResponse | None = None
    run_size: int = 0

    @property
    def input_items(self) -> list[InputItem]:
        """The model's input without the instructions."""
        return self.items[: len(self.items) - self.num_output]

    @property
    def size(self) -> int:
        return len(self.body) + self.items_size + self.run_size


class ResponseStore:
    """The responses that were stored or continued most recently (LRU); the others are forgotten."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """``max_bytes`` limits the sum of sizes; with ``max_responses`` 0 none is kept."""
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        #: Sum of the sizes of the responses.
        self.num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response and forgets the oldest beyond the limits: perhaps this one, if it is too large."""
        self._responses[response_id] = response
        self.num_bytes += response.size
        self._forget_beyond_bounds()

    def replace(self, response_id: str, response: StoredResponse) -> None:
        """Replaces a response, unless it has been forgotten; else as ``put``."""
        if response_id in self._responses:
            self.num_bytes += response.size - self._responses[response_id].size
            self._responses[response_id] = response
            self._forget_beyond_bounds()

    def grow(self, response_id: str, run_size: int) -> None:
        if (stored := self._responses.get(response_id)) is not None:
            self.replace(response_id, replace(stored, run_size=run_size))

    def _forget_beyond_bounds(self) -> None:
        while len(self._responses) > self.max_responses or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self.num_bytes -= response.size
        if response.run is not None:
            response.run.cancel()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """A response, which becomes the most recent; 404 if it does not exist, or has another owner."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            kept = "this server keeps none (max_stored_responses)"
            if self.max_responses:
                kept = (
                    f"this server keeps the latest {self.max_responses} in memory, at most {self._max_bytes} bytes "
                    "(max_stored_responses, max_stored_response_bytes), and forgets older ones, those that were not to "
                    "be stored, and all when it restarts; send the whole conversation as input"
                )
            message = f"the response {response_id[:100]!r} is not known here: {kept}"
            raise ApiError(404, message, param="previous_response_id", code="response_not_found")
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forgets a response and cancels its run; raises as ``get``."""
        self.get(response_id, owner)
        self._forget(response_id)
