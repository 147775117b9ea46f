"""Many models behind one port: each is an engine of its own, loaded when a request names it.

``ModelSet`` owns the models. A model with open requests is never unloaded; of the others the least recently used one
makes room (the bounds are ``memory`` and ``max_loaded``). If all are busy, the one that was loaded first gets no new
requests until its open ones have ended, and is then unloaded; requests that wait for it load it again in their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config.engine_config import EngineConfig
from octavo.config.model_list import ListedModel
from octavo.config.server_options import ServerOptions
from octavo.core.errors import EngineKilledError, ModelNotFoundError, OctavoError, did_you_mean
from octavo.engine.memory_needs import SizedModel
from octavo.engine.tokenizer import Tokenizer
from octavo.process.startup import LOADING
from octavo.server.http.errors import ApiError, server_error
from octavo.server.http.streaming import with_cancellation
from octavo.server.metrics import Metrics
from octavo.server.state import MAX_NOTES, ResponseStore, ServerState

logger = logging.getLogger("octavo.server")

#: unloaded: not in memory. loading: a request waits for it. loaded: it answers. draining: it gets no new requests, to
#: make room. sleeping: its weights are in memory, its KV cache is not. failed: its last load failed.
Status = Literal["unloaded", "loading", "loaded", "draining", "sleeping", "failed"]

#: Seconds until a load that failed is tried again, doubled each time.
FIRST_RETRY, LAST_RETRY = 2.0, 120.0
#: A busy model stays at least this number of times as long as the load that waits for its memory will take.
RESIDENCE = 4.0
#: Seconds that a first load is taken to last.
_EXPECTED_LOAD = 1.0
#: Tokens of all tokenizers that are kept when their models are unloaded, as reading them again would block the event
#: loop; 262,144 take 92 MiB.
_KEPT_TOKENS = 1 << 19
#: Upper bounds of histogram buckets, in seconds.
_LOAD_BUCKETS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_GIB = 1 << 30


@dataclass(slots=True, eq=False)
class Slot:
    """A model of the set, loaded or not."""

    model: ListedModel
    metrics: Metrics
    #: Seconds without a request after which it is unloaded; None: never. Requests of Ollama's API may change it.
    keep_alive: float | None
    #: None: it is not loaded. The other fields say whether it is being loaded or unloaded.
    service: ServerState | None = None
    #: What its headers say; None: they were not read yet.
    sized: SizedModel | None = None
    load: asyncio.Task[None] | None = None
    is_closing: bool = False
    is_draining: bool = False
    #: Whether the KV cache was given up to make room (``AsyncLLM.sleep`` at level 1).
    is_asleep: bool = False
    progress: str = ""
    #: Why the last load failed, how often that happened in a row, and when the next one may begin.
    failure: ApiError | None = None
    num_failures: int = 0
    retry_at: float = 0.0
    #: Requests that use it, or wait for its load.
    users: int = 0
    last_used: float = 0.0
    loaded_at: float = 0.0
    #: Of the last load.
    load_seconds: float = _EXPECTED_LOAD
    #: Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.model.names[0]

    @property
    def need(self) -> int:
        """Bytes that it takes."""
        return 0 if self.sized is None else self.sized.need.total

    @property
    def cache(self) -> int:
        """Those of them that are the KV cache."""
        return 0 if self.sized is None else self.sized.need.cache

    @property
    def holds_memory(self) -> bool:
        return self.service is not None or self.is_closing

    @property
    def held(self) -> int:
        """Bytes that it takes now."""
        return (self.need - self.cache if self.is_asleep else self.need) if self.holds_memory else 0

    @property
    def is_ready(self) -> bool:
        return self.service is not None and not self.is_asleep and not self.service.died.is_set()

    @property
    def status(self) -> Status:
        if self.is_ready:
            return "draining" if self.is_draining else "loaded"
        if self.load is not None:
            return "loading"
        return "sleeping" if self.is_asleep else "unloaded" if self.failure is None else "failed"


class ModelSet:
    """The models of a server, for one event loop."""

    def __init__(
        self,
        models: Sequence[ListedModel],
        options: ServerOptions,
        metrics: Metrics,
        start: Callable[[Slot, EngineConfig], Awaitable[ServerState]],
        size: Callable[[EngineConfig, int], SizedModel],
        memory: int,
        clock: Callable[[], float] = time.monotonic,
        listed: Callable[[str], ListedModel | None] = lambda name: None,
        is_here: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """``start`` makes an engine that is ready; ``size`` (called in a thread) tells what it will take.

        ``metrics`` are the server's own, ``memory`` the bytes for all models. ``listed``: a model that may be added,
        by a name that is unknown so far; ``is_here``: whether a model needs no download. Both are called in threads.
        """
        self.options, self.metrics, self.memory = options, metrics, memory
        self.responses = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
        self.slots: list[Slot] = []
        #: Names that clients have given.
        self.aliases: set[str] = set()
        self.closing = False
        #: Never set: if an engine is lost for good, its model is loaded again by the next request.
        self.died = asyncio.Event()
        self._start, self._size, self._clock = start, size, clock
        self._listed, self._is_here = listed, is_here
        self._by_name: dict[str, Slot] = {}
        #: Held by the one load that makes room and loads.
        self._loads = asyncio.Lock()
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._noted: set[str] = set()
        #: Tokenizers of models that were unloaded, the last one at the end.
        self._tokenizers: list[Tokenizer] = []
        self._context = contextvars.copy_context()
        self._lines = _LoadingLines()
        registry = metrics.registry
        self._loaded = Gauge("octavo_model_loaded", "1 if the model is in memory.", ["model_name"], registry=registry)
        self._num_loads = Counter(
            "octavo_model_loads", "Loads of models, by result.", ["model_name", "result"], registry=registry
        )
        self._num_unloads = Counter(
            "octavo_model_unloads", "Unloads of models, by reason.", ["model_name", "reason"], registry=registry
        )
        self._load_times = Histogram(
            "octavo_model_load_seconds", "Times to load a model.", ["model_name"], buckets=_LOAD_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._waits = Gauge("octavo_model_waiting_requests", "Requests that wait for a load.", registry=registry)
        for model in models:
            self._add(model)

    def _add(self, model: ListedModel) -> Slot:
        slot = Slot(model, Metrics(model.names[0], server=self.metrics), model.keep_alive)
        self.slots.append(slot)
        self._by_name |= dict.fromkeys(model.names, slot)
        self._loaded.labels(slot.name).set(0)
        return slot

    def add_alias(self, name: str, slot: Slot) -> None:
        """Gives a model a further name."""
        self.aliases.add(name)
        self._by_name[name] = slot
        if slot.service is not None:
            slot.service.model_names.append(name)

    def names_of(self, slot: Slot) -> list[str]:
        return [name for name, owner in self._by_name.items() if owner is slot]

    def remove_alias(self, name: str) -> None:
        self.aliases.discard(name)
        slot = self._by_name.pop(name)
        if slot.service is not None:
            slot.service.model_names.remove(name)

    def remove(self, slot: Slot) -> None:
        """Forgets a model that is not loaded."""
        self.slots.remove(slot)
        for name in self.names_of(slot):
            del self._by_name[name]

    def expires(self, slot: Slot) -> float | None:
        """Seconds until a model is unloaded if nobody asks for it; None: it stays."""
        if slot.keep_alive is None or slot.model.pinned:
            return None
        return max(0.0, slot.keep_alive - (0.0 if slot.users else self._clock() - slot.last_used))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def answer(self, scope: Scope, receive: Receive, send: Send, respond: ASGIApp, *, loads: bool) -> None:
        """Has a request answered by the model that it names; without ``loads`` that must be in memory."""
        request = Request(scope, receive)
        body = await request.body()
        slot = await self.find(named_model(request, body))
        is_unload = scope["path"] in _OLLAMA_PATHS and not slot.is_ready and _is_unload(body)
        if not loads and not slot.is_ready:
            raise ApiError(409, f"the model {slot.name!r} is not loaded", param="model", code="model_not_loaded")
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def read_already() -> Message:
            return messages.pop() if messages else await receive()

        if is_unload:  # which needs no load before
            await respond(scope, read_already, send)
            return
        begun = self._clock()
        async with self.lease(slot, receive) as service:
            scope["state"]["service"] = service
            scope["state"]["load_seconds"] = self._clock() - begun
            await respond(scope, read_already, send)

    async def find(self, name: str | None) -> Slot:
        """The model of a name, an alias or an adapter; without a name the only one, or the only loaded one.

        Raises:
            ApiError: there is none (404), or it is not clear which one is meant (400).
        """
        if name is None:
            ready = [slot for slot in self.slots if slot.is_ready]
            chosen = self.slots if len(self.slots) == 1 else ready
            if len(chosen) == 1:
                return chosen[0]
            names = ", ".join(slot.name for slot in self.slots)
            raise ApiError(400, f"the request names no model; there are {names}", param="model", code="model_missing")
        slot = self.known(name)
        if slot is None and (model := await asyncio.to_thread(self._listed, name)) is not None:
            slot = self.known(name) or self._add(model)
        if slot is None:
            raise self.not_found(name)
        return slot

    def known(self, name: str) -> Slot | None:
        for each in (name, name.removesuffix(":latest")):
            if (slot := self._by_name.get(each)) is not None:
                return slot
        return next((slot for slot in self.slots if name in slot.model.lora_modules), None)

    def not_found(self, name: str) -> ApiError:
        hint = did_you_mean(name, self._by_name, f"there are {', '.join(self._by_name)}", cutoff=0.5)
        message = f"the model {name[:200]!r} does not exist here; {hint}"
        return ApiError(404, message, param="model", code="model_not_found")

    def watched(self, name: str | None) -> ServerState:
        """The model of a page that watches its engine; by default the loaded one that was asked last."""
        slots = self.slots if name is None else [slot for slot in [self.known(name)] if slot is not None]
        if not slots:
            raise self.not_found(name or "")
        loaded = [slot for slot in slots if slot.service is not None]
        service = max(loaded, key=lambda slot: slot.last_used).service if loaded else None
        if service is None:
            what = "no model" if name is None else f"the model {name!r}"
            message = f"{what} is {'' if name is None else 'not '}loaded now; a request loads it"
            raise ApiError(409, message, param="model", code="model_not_loaded")
        return service

    @asynccontextmanager
    async def lease(self, slot: Slot, receive: Receive | None = None) -> AsyncIterator[ServerState]:
        """The state of a model, which stays loaded within the block and is loaded before it if need be.

        ``receive``: of the request that waits, which ends if its client leaves.

        Raises:
            ApiError: it cannot be loaded, too many requests wait for loads (429), or the server shuts down.
            TimeoutError: it took longer than ``request_timeout``.
        """
        user = _User(self, slot)
        try:
            if slot.is_ready and not slot.is_draining:
                user.enter()
            else:
                deadline = asyncio.get_running_loop().time() + self.options.request_timeout
                with self._counted():
                    if receive is not None:
                        await with_cancellation(receive, self._wait_for(slot, user), deadline)
                    else:
                        async with asyncio.timeout_at(deadline):
                            await self._wait_for(slot, user)
            assert slot.service is not None
            slot.keep_alive = slot.model.keep_alive
            yield slot.service
        finally:
            user.leave()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request that waits for a load, or refuses it."""
        if self._num_waiting >= (most := self.options.max_queued_requests):
            message = f"the server is busy: {most} requests wait for models to be loaded; try again later"
            headers = {"Retry-After": "1"}
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        self._num_waiting += 1
        self._waits.set(self._num_waiting)
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._waits.set(self._num_waiting)

    async def _wait_for(self, slot: Slot, user: _User) -> None:
        while slot.is_draining:
            await self._change()
        user.enter()
        while not slot.is_ready:
            self.check_open()
            if slot.load is None:
                if slot.failure is not None and self._clock() < slot.retry_at:
                    raise slot.failure
                slot.load = self._run(self._load(slot))
            await asyncio.wait({slot.load})
            if not slot.is_ready and slot.failure is not None:
                raise slot.failure

    def check_open(self) -> None:
        """Refuses a request while the server shuts down (503)."""
        if self.closing:
            raise server_error(503, "the server is shutting down", "shutting_down")

    # --- loading and unloading ----------------------------------------------------------------------------------------

    async def preload(self) -> None:
        """Loads the pinned models, or else the first, and reads the headers of the others that are here."""
        for slot in [slot for slot in self.slots if slot.model.pinned] or self.slots[:1]:
            with contextlib.suppress(ApiError):  # logged, and told to those who ask for it
                async with self.lease(slot):
                    pass
        for slot in self.slots:
            if slot.sized is None and await asyncio.to_thread(self._is_here, slot.model.config.model):
                with contextlib.suppress(OctavoError):  # its load says why
                    slot.sized = await asyncio.to_thread(self._size, slot.model.config, self.memory)

    async def _load(self, slot: Slot) -> None:
        begun = self._clock()
        try:
            slot.progress = "reading its description"
            if slot.sized is None:
                slot.sized = await asyncio.to_thread(self._size, slot.model.config, self.memory)
            slot.progress = "waiting for memory"
            async with self._loads:
                if not slot.users or self.closing:  # all that waited have left
                    return
                if slot.service is not None and slot.service.died.is_set():
                    await self._unload(slot, "died")
                while slot.is_closing:
                    await self._change()
                await self._make_room(slot)
                if slot.service is not None and slot.is_asleep:
                    slot.progress = "waking up"
                    await slot.service.llm.wake_up()
                    slot.is_asleep = False
                    self._loaded.labels(slot.name).set(1)
                    return
                begun = self._clock()
                slot.service = service = await self._start_engine(slot, slot.sized.options)
            service.hold = lambda: self._hold(slot)
            service.model_names[:] = self.names_of(slot)
            slot.loaded_at = slot.last_used = self._clock()
            slot.load_seconds = slot.loaded_at - begun
            slot.failure, slot.num_failures = None, 0
            self._loaded.labels(slot.name).set(1)
            self._num_loads.labels(slot.name, "ok").inc()
            self._load_times.labels(slot.name).observe(slot.load_seconds)
            logger.info("model %s loaded in %.2f s", slot.name, slot.load_seconds)
            self._run(self._watch(slot, service))
        except Exception as e:
            self._fail(slot, e)
        finally:
            slot.load, slot.progress = None, ""
            self._notify()

    async def _start_engine(self, slot: Slot, options: EngineConfig) -> ServerState:
        """Starts an engine; again, as often as ``engine_restarts``, if its process is killed from outside meanwhile."""
        slot.progress = "starting"
        tries = 1 + options.engine_restarts
        while True:
            try:
                with self._lines.shown_in(slot):
                    return await self._start(slot, options)
            except EngineKilledError as e:
                tries -= 1
                if not tries or not slot.users or self.closing:
                    raise
                logger.warning("model %s: %s while it was loaded; it is started again", slot.name, e)

    def _fail(self, slot: Slot, error: Exception) -> None:
        if not isinstance(error, OctavoError):
            logger.error("the model %s could not be loaded", slot.name, exc_info=error)
        seconds = min(LAST_RETRY, FIRST_RETRY * 2**slot.num_failures)
        slot.num_failures += 1
        slot.retry_at = self._clock() + seconds
        # Clients must not see the full path of a folder.
        reason = str(error).replace(slot.model.config.model, slot.name) if isinstance(error, OctavoError) else ""
        message = f"the model {slot.name!r} cannot be loaded{f': {reason}' if reason else ''}"
        if isinstance(error, ModelNotFoundError):
            slot.failure = ApiError(404, message, param="model", code="model_not_found")
        else:
            headers = {"Retry-After": str(max(1, round(seconds)))}
            slot.failure = server_error(503, message, "model_load_failed", param="model", headers=headers)
        self._num_loads.labels(slot.name, "failed").inc()
        logger.warning("%s; it is tried again after %.0f s, when a request names it", message, seconds)

    async def _make_room(self, slot: Slot) -> None:
        """Unloads others until the model fits."""
        stay = [other for other in self.slots if other.model.pinned and other is not slot]
        if self.options.max_loaded is not None and len(stay) >= self.options.max_loaded:
            raise OctavoError(f"{len(stay)} pinned models are all that may be loaded (max_loaded)")
        pinned = sum(other.need for other in stay)
        if slot.need + pinned > self.memory:
            beside = f" beside {pinned / _GIB:.2f} GiB of pinned models" if pinned else ""
            raise OctavoError(
                f"it takes {slot.need / _GIB:.2f} GiB{beside}, more than the {self.memory / _GIB:.2f} GiB for all "
                "models (memory); lower its kv_cache_memory_bytes, or take a smaller quantization"
            )
        try:
            while not self._fits(slot):
                others = [o for o in self.slots if o.service is not None and not o.model.pinned and o is not slot]
                # Requests to a sleeping model wait for a load that comes after this one.
                idle = [other for other in others if other.is_asleep or not other.users]
                if idle:
                    await self._give_up(idle, slot)
                    continue
                # All are busy.
                now, until = self._clock(), None
                if not any(other.is_draining for other in others):
                    ends = {other: other.loaded_at + RESIDENCE * slot.load_seconds for other in others}
                    due = [other for other in others if ends[other] <= now]
                    if due:
                        min(due, key=lambda other: other.loaded_at).is_draining = True
                    elif ends:
                        until = min(ends.values()) - now
                await self._change(until)
        finally:
            for other in self.slots:
                other.is_draining = False
            self._notify()

    def _fits(self, slot: Slot) -> bool:
        return self._has_place(slot) and self._excess(slot) <= 0

    def _has_place(self, slot: Slot) -> bool:
        most = self.options.max_loaded
        return most is None or sum(other.holds_memory for other in self.slots if other is not slot) < most

    def _excess(self, slot: Slot) -> int:
        """Bytes beyond the memory with this model."""
        return sum(other.held for other in self.slots if other is not slot) + slot.need - self.memory

    async def _give_up(self, idle: Sequence[Slot], slot: Slot) -> None:
        """Takes memory from one of the idle models, in their order of use: KV caches alone if they are enough."""
        first = sorted(idle, key=lambda other: (other.users > 0, other.last_used))
        awake = [other for other in first if not other.is_asleep and other.cache]
        if self._has_place(slot) and sum(other.cache for other in awake) >= self._excess(slot):
            with contextlib.suppress(OctavoError):
                await self._sleep(awake[0])
                return
        await self._unload(first[0], "memory")

    async def _sleep(self, slot: Slot) -> None:
        assert slot.service is not None
        slot.is_asleep = True
        self._loaded.labels(slot.name).set(0)
        try:
            await slot.service.llm.sleep(1)
        except BaseException:
            slot.is_asleep = False
            raise
        logger.info("model %s sleeps: its KV cache makes room", slot.name)
        self._notify()

    async def _unload(self, slot: Slot, reason: str) -> None:
        service, slot.service = slot.service, None
        assert service is not None
        slot.is_closing, slot.is_draining = True, False
        slot.is_asleep = False
        self._keep_tokenizer(service.llm.tokenizer)
        try:
            await service.refuse_requests()
            await service.shut_down(0)
        finally:
            slot.is_closing = False
            slot.metrics.end_engine()
            self._loaded.labels(slot.name).set(0)
            self._num_unloads.labels(slot.name, reason).inc()
            logger.info("model %s unloaded (%s)", slot.name, reason)
            self._notify()

    def _keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        kept = self._tokenizers = [*(other for other in self._tokenizers if other is not tokenizer), tokenizer]
        while sum(each.vocab_size for each in kept) > _KEPT_TOKENS:
            del kept[0]

    async def unload(self, slot: Slot) -> bool:
        """Unloads a model that nobody uses; false: it is not loaded, is pinned, or has open requests."""
        if slot.service is None or slot.users or slot.model.pinned:
            return False
        await self._unload(slot, "request")
        return True

    async def _watch(self, slot: Slot, service: ServerState) -> None:
        await service.died.wait()
        if slot.service is service:
            logger.error("the engine of model %s is lost; the next request loads it again", slot.name)
            await self._unload(slot, "died")

    async def unload_expired(self) -> float | None:
        """Unloads the models that were idle for their ``keep_alive``; seconds until the next will have been."""
        now, waits = self._clock(), list[float]()
        for slot in self.slots:
            if slot.service is None or slot.users or slot.keep_alive is None or slot.model.pinned:
                continue
            left = slot.last_used + slot.keep_alive - now
            if left > 0:
                waits.append(left)
            else:
                await self._unload(slot, "idle")
        return min(waits, default=None)

    async def _expire(self) -> None:
        while True:
            await self._change(await self.unload_expired())

    # --- life of the set ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begins to load and unload models; to be called once, on the event loop."""
        logging.getLogger("octavo").addHandler(self._lines)
        self._run(self._expire())
        self._run(self.preload())

    @property
    def num_open(self) -> int:
        return sum(slot.users for slot in self.slots)

    @property
    def sees_images(self) -> bool:
        return False

    @property
    def max_model_len(self) -> int:
        return 0

    def note_unknown(self, name: str) -> None:
        if name not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(name)
            logger.warning("requests bring a field that is unknown or not supported here and ignored: %r", name[:100])

    def render_metrics(self) -> tuple[bytes, str]:
        for slot in self.slots:
            slot.metrics.refresh()
        return self.metrics.render()

    async def refuse_requests(self) -> None:
        self.closing = True
        self._notify()
        await asyncio.gather(*(slot.service.refuse_requests() for slot in self.slots if slot.service is not None))

    async def shut_down(self, timeout: float) -> None:
        """Gives open requests ``timeout`` seconds, and ends all engines."""
        self.closing = True
        logging.getLogger("octavo").removeHandler(self._lines)
        for task in self._tasks:
            task.cancel()  # an engine that is being loaded ends with its task
        await asyncio.gather(*self._tasks, return_exceptions=True)
        services = [slot.service for slot in self.slots if slot.service is not None]
        await asyncio.gather(*(service.shut_down(timeout) for service in services))

    def _hold(self, slot: Slot) -> Callable[[], None]:
        user = _User(self, slot)
        user.enter()
        return user.leave

    def _run(self, work: Any) -> asyncio.Task[Any]:
        # Not in the context of the request that comes first: an engine's log lines are not about it.
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float | None = None) -> None:
        """Waits for a change, at most ``seconds``."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()

    def left(self, slot: Slot) -> None:
        """A user of the model has ended."""
        slot.last_used = self._clock()
        if not slot.users:
            self._notify()


@dataclass(slots=True)
class _User:
    """A request that uses a model, or waits for its load."""

    models: ModelSet
    slot: Slot
    is_counted: bool = False

    def enter(self) -> None:
        self.slot.users += 1
        self.is_counted = True

    def leave(self) -> None:
        """May be called again."""
        if self.is_counted:
            self.is_counted = False
            self.slot.users -= 1
            self.models.left(self.slot)


class _LoadingLines(logging.Handler):
    """Shows log lines about loading weights as the progress of the one model that is being loaded."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._slot: Slot | None = None

    @contextlib.contextmanager
    def shown_in(self, slot: Slot) -> Iterator[None]:
        self._slot = slot
        try:
            yield
        finally:
            self._slot = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._slot is not None and (message := record.getMessage()).startswith(LOADING):
            self._slot.progress = message


# The model that a request names.


class _Named(msgspec.Struct):
    model: Any = None
    #: Of /v1/load_lora_adapter.
    base_model_name: Any = None


class _Unload(msgspec.Struct):
    keep_alive: Any = None
    messages: Any = None
    prompt: Any = None


#: A request without a prompt loads a model, or unloads it.
_OLLAMA_PATHS = ("/api/chat", "/api/generate")


def _is_unload(body: bytes) -> bool:
    """Whether a request of Ollama's API unloads the model that it names."""
    try:
        request = msgspec.json.decode(body, type=_Unload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return request.keep_alive in (0, "0", "0s", "0m") and not request.messages and not request.prompt


_decode = msgspec.json.Decoder(_Named).decode
#: The field ``model`` of a multipart form.
_FORM_FIELD = re.compile(rb'\bname="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n', re.IGNORECASE)


def named_model(request: Request, body: bytes) -> str | None:
    """The model that a body names as JSON or in a form, else the query; None: none, or the body cannot be read."""
    name: Any = None
    if b"multipart/form-data" in request.headers.get("content-type", "").encode():
        if (match := _FORM_FIELD.search(body)) is not None:
            name = match.group(1).decode(errors="replace")
    elif body:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            named = _decode(body)
            name = named.model or named.base_model_name
    return name if isinstance(name, str) and name else request.query_params.get("model") or None
