"""``/engine/events``: what the engine looks like, as it changes, for any number of pages at the cost of one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.core.engine_view import NUM_STEPS, EngineEvent, EngineView, Histogram, ReplicaRow, StepRecord
from octavo.core.errors import OctavoError
from octavo.engine.async_llm import AsyncLLM
from octavo.server.api_errors import ApiError
from octavo.server.middleware import client_of
from octavo.server.streaming import EventStream

logger = logging.getLogger("octavo.server")

#: Seconds between two updates, at least.
INTERVAL = 0.25
#: Share of an engine core's time that making views may take; with a large KV cache there are fewer updates then.
COST_SHARE = 1 / 400
#: Seconds after which an event is sent although nothing has changed, or the engine has not answered.
HEARTBEAT = 2.0
#: Streams at once: in all, and of one client (an API key, or an address where no key is needed).
MAX_LISTENERS = 64
MAX_LISTENERS_PER_CLIENT = 16
#: Events that a stream may be behind; beyond, it gets everything anew.
_MOST_BEHIND = 8


class EngineEvents:
    """Owns the only watcher of the engine: a task that asks it for views while somebody listens.

    Invariant: while nobody listens there is no task, and engine cores collect nothing.
    """

    def __init__(self, llm: AsyncLLM, latencies: Callable[[], list[Histogram]]) -> None:
        self._llm, self._latencies = llm, latencies
        self._listeners: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        #: The last view and the last steps of each replica.
        self._views: dict[int, EngineView] = {}
        self._steps: dict[int, deque[StepRecord]] = {}
        #: The last events as they are sent, and how many there were.
        self._recent: deque[bytes] = deque(maxlen=_MOST_BEHIND)
        self._number = 0
        self._last: tuple[Any, ...] = ()
        self._sent = 0.0
        self._changed = asyncio.Condition()

    @property
    def num_listeners(self) -> int:
        """Streams that are open."""
        return self._listeners.total()

    async def listen(self, client: str = "") -> AsyncGenerator[bytes, None]:
        """Server-sent events until ``close``; the first has all that is known, and so has one after a long pause.

        Raises:
            ApiError: 429, too many listen, in all or of this client.
        """
        if self.num_listeners >= MAX_LISTENERS:
            raise ApiError(429, f"{MAX_LISTENERS} pages watch the engine already", code="too_many_watchers")
        if self._listeners[client] >= MAX_LISTENERS_PER_CLIENT:
            message = f"{MAX_LISTENERS_PER_CLIENT} of your pages watch the engine already; close one"
            raise ApiError(429, message, code="too_many_watchers")
        self._listeners[client] += 1
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            seen = self._number
            yield _encode(self._event([*self._views.values()], whole=True))
            while not self._closing:
                await self._newer_than(seen)
                if self._number - seen > len(self._recent):
                    yield _encode(self._event([*self._views.values()], whole=True))
                else:
                    for data in list(self._recent)[seen - self._number :]:
                        yield data
                seen = self._number
        finally:
            self._listeners[client] -= 1
            if not self._listeners[client]:
                del self._listeners[client]
            if not self._listeners and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def _newer_than(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._number > number or self._closing)

    async def close(self) -> None:
        """Ends all streams, as the server shuts down."""
        self._closing = True
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        self._views.clear()
        self._steps.clear()
        fresh, self._sent = True, time.monotonic()
        while True:
            asked = asyncio.ensure_future(self._llm.engine_views(fresh=fresh))
            try:
                await self._beat_until(asked)
                await self._publish(asked.result())
                fresh = False
            except OctavoError:  # the engine has died
                await self._publish([])
            except Exception:
                logger.exception("the engine could not be looked at")
                await self._publish([])
            finally:
                asked.cancel()
            cost = max((view.cost for view in self._views.values()), default=0.0)
            pause = asyncio.ensure_future(asyncio.sleep(max(INTERVAL, cost / COST_SHARE)))
            try:
                await self._beat_until(pause)
            finally:
                pause.cancel()

    async def _beat_until(self, done: asyncio.Future[Any]) -> None:
        """Waits for a future; whenever nothing was sent for ``HEARTBEAT`` seconds, an event without views is."""
        while not done.done():
            left = self._sent + HEARTBEAT - time.monotonic()
            if left <= 0:
                await self._publish([])
            else:
                await asyncio.wait({done}, timeout=left)

    async def _publish(self, views: list[EngineView]) -> None:
        for view in views:
            self._views[view.replica] = view
            self._steps.setdefault(view.replica, deque(maxlen=NUM_STEPS)).extend(view.steps)
        event = self._event(views, whole=False)
        content = (event.replicas, [(view.state, view.groups and view.at, view.blocks) for view in views])
        if content == self._last and time.monotonic() - self._sent < HEARTBEAT:
            return
        self._last, self._sent = content, time.monotonic()
        self._recent.append(_encode(event))
        self._number += 1
        async with self._changed:
            self._changed.notify_all()

    def _event(self, views: list[EngineView], *, whole: bool) -> EngineEvent:
        if whole:
            views = [
                msgspec.structs.replace(view, steps=[*self._steps[view.replica]], changes=[], num_changes=0)
                for view in views
            ]
        rows = [ReplicaRow(s.number, s.status, s.num_open, s.num_restarts) for s in self._llm.replica_states()]
        return EngineEvent(time.time(), rows, views, self._latencies(), whole)


def _encode(event: EngineEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def engine_events(request: Request) -> EventStream:
    """Views of the engine as they change, at most four a second.

    Raises:
        ApiError: 403, the server can be reached by others and has no keys.
    """
    options, events = request.app.state.service.options, request.app.state.service.events
    if not (options.is_local or request.app.state.has_keys):
        message = (
            f"the server listens on {options.host} without API keys: only with keys it shows its engine to others; set "
            "api_key_file, or listen on 127.0.0.1"
        )
        raise ApiError(403, message, code="needs_api_keys")
    return EventStream(events.listen(client_of(request)), None)
