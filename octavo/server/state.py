"""State shared by all routes: the engine, the options, metrics, limits."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from starlette.requests import Request

from octavo.config.server_options import CHARS_PER_TOKEN, ServerOptions
from octavo.core.errors import AdapterConflictError, AdapterError, ConfigError, InvalidRequestError
from octavo.core.outputs import CompletionOutput, RequestMetrics
from octavo.core.request import LoRARequest
from octavo.engine.adapters import Adapter, AdapterResolver, find_by_name, listed, make_resolver
from octavo.engine.async_llm import AsyncLLM, QueuedTokens
from octavo.server.answer_format import ChatFormats
from octavo.server.http.errors import ApiError, invalid, server_error, unsupported
from octavo.server.logging import Tracer
from octavo.server.metrics import Metrics
from octavo.server.page import EngineEvents
from octavo.server.prompt_inputs import ImageInputs

if TYPE_CHECKING:
    from octavo.server.openai.response_protocol import InputItem


# Limits on the queue of requests, and the Retry-After of a full one.

#: Largest ``Retry-After``, in seconds.
MAX_RETRY_AFTER = 60
#: Weight of the newest request in the moving average of the time in the queue.
_NEWEST_WEIGHT = 0.1


class Measured(Protocol):
    """An output with its times."""

    metrics: RequestMetrics


class QueueLimit:
    """Refuses requests while too many prompts, or prompt tokens, wait for their first token.

    A prompt counts from the check on: here while its form is compiled or its adapter is read, then in the engine.
    """

    def __init__(self, llm: AsyncLLM, max_requests: int, max_tokens: int) -> None:
        """Bounds on the number of waiting prompts and on their tokens."""
        self._llm = llm
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        #: Prompts that the engine does not count yet, by name.
        self._entering = QueuedTokens()
        self._mean_wait = 0.0

    def enter(self, lengths: Mapping[Any, int]) -> None:
        """Counts the prompts of a request, given as names and lengths; ``leave`` ends it.

        A request that finds the queue empty is accepted whatever its size: later it would not fit better.

        Raises:
            ApiError: 429, with ``Retry-After``; none is counted.
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
        """These prompts are counted by the engine, or have failed; those that have left already stay so."""
        for name in names:
            self._entering.remove(name)

    @property
    def retry_after(self) -> int:
        """Mean time in the queue, in whole seconds."""
        return min(max(math.ceil(self._mean_wait), 1), MAX_RETRY_AFTER)

    def observe(self, output: Measured) -> None:
        """Adds the time in the queue of a request that has ended."""
        waited = output.metrics.time_in_queue
        if waited is not None:
            self._mean_wait += _NEWEST_WEIGHT * (waited - self._mean_wait)


# The latest responses in memory, within bounds on their number and their bytes.


class Run(Protocol):
    """What makes a response in the background, or has made it."""

    #: Whether its events can be followed.
    keeps_events: bool
    #: That it holds.
    num_bytes: int

    @property
    def has_ended(self) -> bool:
        """Whether the response is as it stays."""

    def encode(self) -> bytes:
        """The response as it is, as JSON; of one that has not ended."""

    def cancel(self) -> None:
        """Ends the response soon, unless it has ended."""

    async def stop(self) -> None:
        """Ends the response, unless it has ended, and waits until it has let go of its blocks."""

    def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events that come after the one with this number, to the last."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and all items that a later one continues."""

    #: As JSON.
    body: bytes
    #: Of the conversation up to its end: input and output of all responses that it continues, and its own.
    items: list[InputItem]
    #: Bytes of the items, as JSON.
    items_size: int
    #: The API key that it was made with, as ``owner_of`` names it; others cannot have it.
    owner: str
    #: How many of the items, the last ones, are its output.
    num_output: int = 0
    #: What makes it, or has made it, in the background; it ends if the response is forgotten.
    run: Run | None = None
    #: Bytes that the run holds.
    run_size: int = 0

    @property
    def input_items(self) -> list[InputItem]:
        """What the model read, but for the instructions."""
        return self.items[: len(self.items) - self.num_output]

    @property
    def size(self) -> int:
        """Bytes of the body, of the items and of what its run holds."""
        return len(self.body) + self.items_size + self.run_size


class ResponseStore:
    """The responses that were stored or continued last; the others are forgotten."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Bounds on the responses and on the sum of their sizes; 0 responses: none is kept."""
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes of the responses."""
        return self._bytes

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response, and forgets the oldest beyond the bounds: perhaps itself, if it is too large."""
        self._responses[response_id] = response
        self._bytes += response.size
        self._forget_beyond_bounds()

    def replace(self, response_id: str, response: StoredResponse) -> None:
        """Keeps a response in the place of what is there of it, unless that is forgotten already; else as ``put``."""
        if response_id in self._responses:
            self._bytes += response.size - self._responses[response_id].size
            self._responses[response_id] = response
            self._forget_beyond_bounds()

    def grow(self, response_id: str, run_size: int) -> None:
        """The run of a response holds so many bytes now; as ``replace``."""
        if (stored := self._responses.get(response_id)) is not None:
            self.replace(response_id, replace(stored, run_size=run_size))

    def _forget_beyond_bounds(self) -> None:
        while len(self._responses) > self.max_responses or self._bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self._bytes -= response.size
        if response.run is not None:
            response.run.cancel()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """A response, which counts as the newest from now on.

        Raises:
            ApiError: 404, it is not there, or another's.
        """
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            raise self._unknown(response_id)
        self._responses.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forgets a response, which ends if it is still made.

        Raises:
            ApiError: as ``get``.
        """
        self.get(response_id, owner)
        self._forget(response_id)

    def _unknown(self, response_id: str) -> ApiError:
        if not self.max_responses:
            kept = "this server keeps none (max_stored_responses)"
        else:
            kept = (
                f"this server keeps the latest {self.max_responses} in memory, at most {self._max_bytes} bytes "
                "(max_stored_responses, max_stored_response_bytes), and forgets older ones, those that were not to be "
                "stored, and all when it restarts; send the whole conversation as input"
            )
        message = f"the response {response_id[:100]!r} is not known here: {kept}"
        return ApiError(404, message, param="previous_response_id", code="response_not_found")


#: Most notes on what requests bring that are logged, as clients can send any number of unknown fields.
MAX_NOTES = 100

logger = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request names as its model: the model itself, or an adapter of it."""

    #: As the response says it.
    name: str
    adapter: LoRARequest | None = None


@dataclass(slots=True)
class ServerState:
    """One engine behind one HTTP server."""

    llm: AsyncLLM
    options: ServerOptions
    metrics: Metrics
    #: Names that requests may give the model; responses carry the name that was requested, or the first.
    model_names: list[str]
    queue: QueueLimit
    formats: ChatFormats
    #: Those of ``/v1/responses`` that requests can continue.
    responses: ResponseStore
    #: Of conversations.
    images: ImageInputs
    events: EngineEvents
    tracer: Tracer | None = None
    #: Finds adapters that are not loaded yet.
    resolver: AdapterResolver | None = None
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))
    #: Set during shutdown: open requests may finish, new ones are refused.
    closing: bool = False
    #: Notes on what requests bring that were logged.
    _logged: set[str] = field(default_factory=set)
    #: By name: held while an adapter is looked for.
    _resolving: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    @property
    def max_prompt_chars(self) -> int:
        """Longest prompt in characters; a longer one is refused without being tokenized."""
        return self.options.max_prompt_chars or CHARS_PER_TOKEN * self.llm.max_model_len

    def deadline(self) -> float:
        """When a request that begins now must have ended, on the loop's clock (``request_timeout``)."""
        return asyncio.get_running_loop().time() + self.options.request_timeout

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model can do: "generate" and the tasks of ``PoolingParams``."""
        return self.llm.front_end.pooling.tasks

    def check_running(self) -> None:
        """Refuses a request while the server shuts down.

        Raises:
            ApiError: 503.
            EngineDeadError: the engine has ended, and is not started again.
        """
        if self.closing:
            raise server_error(503, "the server is shutting down", "shutting_down")
        self.llm.check_alive()

    def check_completion(self, completion: CompletionOutput, model: ServedModel) -> None:
        """Raises if a request was ended by the server itself, or failed as its adapter could not be loaded.

        Raises:
            ApiError: 503, the server shuts down.
            AdapterConflictError: the adapter's files are no longer what they were.
        """
        if completion.finish_reason == "abort":
            raise server_error(503, "the request was ended as the server shuts down", "aborted")
        if completion.adapter_failed and model.adapter is not None:
            raise AdapterConflictError(self._without_path(completion.error or "", model.name))

    def require(self, task: str) -> None:
        """Refuses a task that the model cannot do.

        Raises:
            ApiError: 400, with what it can do.
        """
        try:
            self.llm.front_end.pooling.require(task)
        except InvalidRequestError as e:
            # Clients shall not see where the server keeps the model.
            message = str(e).replace(repr(self.llm.config.model), repr(self.model_names[0]))
            raise invalid("model", message, "unsupported_task") from None

    async def model(self, name: str | None) -> ServedModel:
        """The model that a request names; an adapter that is not loaded yet is, if the resolver finds it.

        Raises:
            ApiError: 404, the name is not served; 503, the server shuts down.
            AdapterError: the adapter that the resolver found cannot be used.
        """
        self.check_running()
        if name is None or name in self.model_names:
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
        """The adapter that a resolver finds by this name, loaded; one search serves all requests that wait for it."""
        async with self._resolving.setdefault(name, asyncio.Lock()):
            if (adapter := self.llm.adapters.get(name)) is not None:
                return adapter
            path = await asyncio.to_thread(find_by_name, resolver, name)
            if path is None:
                return None
            await self.load_adapter(name, path)
            return self.llm.adapters.get(name)

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> bool:
        """Gives an adapter its name, for a client; false if it is loaded already, with the same content.

        Raises:
            AdapterError: see ``AsyncLLM.add_lora``; the message has the path as clients may know it.
        """
        try:
            return await self._add_adapter(name, path, in_place)
        except AdapterError as e:
            raise type(e)(str(e).replace(path, self.shown_path(path))) from None

    async def _add_adapter(self, name: str, path: str, in_place: bool = False) -> bool:
        adapter = self.llm.adapters.get(name)
        number = self.llm.adapters.new_number() if adapter is None else adapter.number
        added = await self.llm.add_lora(LoRARequest(name, number, path), load_inplace=in_place)
        what = "loaded" if added else "was loaded already"
        logger.info("adapter %s %s", name, what, extra={"fields": {"path": path}})
        return added

    def shown_path(self, path: str) -> str:
        """The path of an adapter as clients may know it: within ``lora_folder``, or its last part."""
        folder = self.options.lora_folder
        if folder is not None and Path(path).is_relative_to(real := Path(os.path.realpath(folder))):
            return str(Path(path).relative_to(real))
        return Path(path).name

    def _without_path(self, message: str, name: str) -> str:
        """A message about an adapter for clients, who shall not see where the server keeps it."""
        path = self.llm.adapters.named(name).ref.path
        return message.replace(path, self.shown_path(path))

    async def load_modules(self) -> None:
        """Loads the adapters of the option ``lora_modules``.

        Raises:
            AdapterError: naming the first that cannot be used.
        """
        for name, path in (self.options.lora_modules or {}).items():
            await self._add_adapter(name, path)

    def default_max_tokens(self, otherwise: int | None) -> int | None:
        """``max_tokens`` of a request that names none: the model's own default, or ``otherwise``."""
        limit: int | None = self.llm.inputs.default_sampling.get("max_tokens", otherwise)
        return limit

    def leave_out_tool(self, where: str, kind: str) -> None:
        """Leaves a tool out that only another service could run: it is logged, each kind once.

        Raises:
            ApiError: 400, with ``unsupported_tools: refuse``.
        """
        if self.options.unsupported_tools == "refuse":
            message = f"{where} is not supported: its type is {kind[:100]!r}; only tools of the client can be used"
            raise unsupported("tools", message)
        self._log_once(f"requests offer tools that this server cannot run, which are left out: type {kind[:100]!r}")

    def note_unknown(self, name: str) -> None:
        """Logs a field that is ignored, each name once."""
        self._log_once(f"requests bring a field that is unknown or not supported here and ignored: {name[:100]!r}")

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < MAX_NOTES:
            self._logged.add(message)
            logger.warning("%s", message)


def make_service(
    llm: AsyncLLM, options: ServerOptions, metrics: Metrics, model_names: list[str], tracer: Tracer | None = None
) -> ServerState:
    """The service of an engine that is ready; ``load_modules`` comes next.

    Raises:
        ConfigError: there is no such resolver or parser.
    """
    limit = QueueLimit(llm, options.max_queued_requests, options.max_queued_tokens)
    llm.adapters.reserved += model_names
    llm.inputs.sandbox.seconds_per_minute = options.sandbox_seconds_per_client
    metrics.adapter_states = llm.adapter_requests
    metrics.replica_states, metrics.num_resumed = llm.replica_states, lambda: llm.num_resumed
    metrics.grammars = llm.inputs.grammars.stats
    _check_extras(llm)
    resolver = make_resolver(options.lora_resolver, options.lora_folder)
    formats = ChatFormats(options.tool_call_parser, options.reasoning_parser)
    responses = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
    images, events = ImageInputs(llm, options), EngineEvents(llm, metrics.latencies)
    return ServerState(llm, options, metrics, model_names, limit, formats, responses, images, events, tracer, resolver)


def _check_extras(llm: AsyncLLM) -> None:
    """Logs which package of this model's recordings or images cannot be imported; other requests are served."""
    checks: list[tuple[str, Callable[[], object]]] = []
    if "transcribe" in llm.front_end.pooling.tasks:
        from octavo.speech.audio_files import import_soundfile  # with numpy, of which other models need nothing

        checks.append(("recordings", import_soundfile))
    if llm.model_config.image_facts is not None:
        from octavo.images.image_files import pillow

        checks.append(("images", pillow))
    for what, check in checks:
        try:
            check()
        except ConfigError as e:
            logger.warning("requests with %s will be refused: %s", what, e)


def engine_request_id(response_id: str, index: int, count: int) -> str:
    """What engine and logs call prompt ``index`` of ``count``: as its response, with a number if that has several."""
    return response_id if count == 1 else f"{response_id}-{index}"


def state_of(request: Request) -> ServerState:
    """The ``ServerState`` of the application that received the request."""
    service: ServerState = request.app.state.service
    return service


def operator_state(request: Request) -> ServerState:
    """The ``ServerState`` for a route that changes the server.

    Raises:
        EngineDeadError: the engine has died.
    """
    service = state_of(request)
    service.llm.check_alive()
    return service
