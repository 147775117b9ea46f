"""State shared by all routes: the engine, the options, metrics, limits."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from starlette.requests import Request

from octavo.core.adapters import LoRARequest
from octavo.core.errors import AdapterConflictError, AdapterError, ConfigError, InvalidRequestError
from octavo.core.outputs import CompletionOutput
from octavo.core.server_options import CHARS_PER_TOKEN, ServerOptions
from octavo.engine.adapter_folder import AdapterResolver, find_by_name, make_resolver
from octavo.engine.adapter_registry import Adapter, listed
from octavo.engine.async_llm import AsyncLLM
from octavo.server.api_errors import ApiError, invalid, server_error, unsupported
from octavo.server.chat_formats import ChatFormats
from octavo.server.engine_events import EngineEvents
from octavo.server.image_inputs import ImageInputs
from octavo.server.metrics import Metrics
from octavo.server.queue_limit import QueueLimit
from octavo.server.responses.store import ResponseStore
from octavo.server.tracing import Tracer

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
class Service:
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
) -> Service:
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
    return Service(llm, options, metrics, model_names, limit, formats, responses, images, events, tracer, resolver)


def _check_extras(llm: AsyncLLM) -> None:
    """Logs which package of this model's recordings or images cannot be imported; other requests are served."""
    checks: list[tuple[str, Callable[[], object]]] = []
    if "transcribe" in llm.front_end.pooling.tasks:
        from octavo.speech.audio_files import import_soundfile  # with numpy, of which other models need nothing

        checks.append(("recordings", import_soundfile))
    if llm.model_config.image_facts is not None:
        from octavo.images.pillow import pillow

        checks.append(("images", pillow))
    for what, check in checks:
        try:
            check()
        except ConfigError as e:
            logger.warning("requests with %s will be refused: %s", what, e)


def engine_request_id(response_id: str, index: int, count: int) -> str:
    """What engine and logs call prompt ``index`` of ``count``: as its response, with a number if that has several."""
    return response_id if count == 1 else f"{response_id}-{index}"


def service_of(request: Request) -> Service:
    """The ``Service`` of the application that received the request."""
    service: Service = request.app.state.service
    return service


def operator_service(request: Request) -> Service:
    """The ``Service`` for a route that changes the server.

    Raises:
        EngineDeadError: the engine has died.
    """
    service = service_of(request)
    service.llm.check_alive()
    return service
