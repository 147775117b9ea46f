"""The page at ``/``: its files, the headers under which browsers run them, and its stream of events of the engine."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.errors import OctavoError
from octavo.core.stats import NUM_STEPS, EngineEvent, EngineView, Histogram, ReplicaRow, StepRecord
from octavo.engine.async_llm import AsyncLLM
from octavo.server.http.errors import ApiError
from octavo.server.http.middleware import Middleware, client_of
from octavo.server.http.streaming import EventStream

logger = logging.getLogger("octavo.server")

FOLDER = Path(__file__).resolve().parent / "ui"
#: Addresses of the files begin with it.
PREFIX = "/ui/"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
#: Nothing is loaded from elsewhere, the page contains no script, and no text becomes markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    # Each load asks whether a file has changed: another version of the server may answer.
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True)
class UiFile:
    """A file of the page."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def ui_files() -> dict[str, UiFile]:
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            address = PREFIX + path.relative_to(FOLDER).as_posix()
            files[address] = _make(path.read_bytes(), MEDIA_TYPES[path.suffix])
    return files


def _make(body: bytes, media_type: str) -> UiFile:
    etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return UiFile(body, gzip.compress(body, mtime=0), media_type, etag)


def find_file(path: str, *, wants_html: bool) -> UiFile | None:
    """The file at an address of the server; at ``/`` the page, for clients that want HTML."""
    if path == "/" and wants_html:
        path = PREFIX + INDEX
    return ui_files().get(path) if path.startswith(PREFIX) else None


def for_recordings(file: UiFile) -> UiFile:
    """The page's file in the mode that shows a recording, without a server."""
    body = file.body.replace(b'name="octavo-mode" content="live"', b'name="octavo-mode" content="recording"')
    return file if body == file.body else _make(body, file.media_type)


def answer(file: UiFile, *, if_none_match: str, accept_encoding: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request with these headers."""
    headers = {**HEADERS, "etag": file.etag, "content-type": file.media_type}
    if file.etag in if_none_match:
        return 304, headers, b""
    body = file.body
    if "gzip" in accept_encoding:
        headers["content-encoding"], body = "gzip", file.compressed
    headers["content-length"] = str(len(body))
    return 200, headers, body


# The page's files are served in front of the routes: they hold nothing of the server's users and need no key.


class UiMiddleware(Middleware):
    """Answers GET requests for the page and its files; ``/`` is the page for browsers, JSON for other clients."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        wants_html = "text/html" in headers.get("accept", "")
        file = find_file(scope["path"], wants_html=wants_html) if scope["method"] == "GET" else None
        if file is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = SimpleNamespace(path=PREFIX)  # the pattern of all files, for metrics and logs
        status, sent, body = answer(
            file, if_none_match=headers.get("if-none-match", ""), accept_encoding=headers.get("accept-encoding", "")
        )
        await Response(body, status, sent)(scope, receive, send)


# ``/engine/events``: views of the engine, for any number of pages at the cost of one.

#: Least seconds between two updates.
INTERVAL = 0.25
#: Most of an engine core's time that making views may take; with a large KV cache updates are rarer.
COST_SHARE = 1 / 400
#: Most seconds between two events, also if nothing has changed or the engine has not answered.
HEARTBEAT = 2.0
#: Most streams at once: in all, and of one client (an API key, or an address where no key is needed).
MAX_LISTENERS = 64
MAX_LISTENERS_PER_CLIENT = 16
#: Events that a stream may lag behind; beyond, it gets the whole state again.
_MOST_BEHIND = 8


class EngineEvents:
    """Owns the only watcher of the engine: a task that asks it for views while there are listeners.

    Invariant: without a listener there is no task, and engine cores collect nothing.
    """

    def __init__(self, llm: AsyncLLM, latencies: Callable[[], list[Histogram]]) -> None:
        self._llm, self._latencies = llm, latencies
        self._listeners: Counter[str] = Counter()
        self._watcher: asyncio.Task[None] | None = None
        self._closing = False
        #: The last view and the last steps of each replica.
        self._views: dict[int, EngineView] = {}
        self._steps: dict[int, deque[StepRecord]] = {}
        #: The last events, encoded, and the number of all events.
        self._recent: deque[bytes] = deque(maxlen=_MOST_BEHIND)
        self._number = 0
        self._last: tuple[Any, ...] = ()
        self._sent = 0.0
        self._changed = asyncio.Condition()

    @property
    def num_listeners(self) -> int:
        return self._listeners.total()

    async def listen(self, client: str = "") -> AsyncGenerator[bytes, None]:
        """Server-sent events until ``close``; the first, and one after a long pause, has the whole state."""
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
                await self._wait_newer_than(seen)
                behind, seen = self._number - seen, self._number
                if behind > len(self._recent):
                    yield _encode(self._event([*self._views.values()], whole=True))
                elif behind:  # none are if the stream ends
                    for data in list(self._recent)[-behind:]:
                        yield data
        finally:
            self._listeners[client] -= 1
            if not self._listeners[client]:
                del self._listeners[client]
            if not self._listeners and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def _wait_newer_than(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._number > number or self._closing)

    async def close(self) -> None:
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
                logger.exception("views of the engine could not be made")
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
        """Waits for a future; sends an event without views whenever ``HEARTBEAT`` seconds pass without an event."""
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
            change = partial(msgspec.structs.replace, changes=[], num_changes=0, lives=[])
            views = [change(view, steps=[*self._steps[view.replica]]) for view in views]
        rows = [ReplicaRow(s.number, s.status, s.num_open, s.num_restarts) for s in self._llm.replica_states()]
        return EngineEvent(time.time(), rows, views, self._latencies(), whole)


def _encode(event: EngineEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def engine_events(request: Request) -> EventStream:
    """Views of an engine as they change, at most four a second; with several models, of the one that ``model`` names.

    Without a name it is the loaded model that was asked last. Watching neither loads a model nor keeps it loaded.
    """
    state = request.app.state
    options = state.options
    if not (options.is_local or request.app.state.has_keys):
        message = "the engine is shown to others only with API keys: set api_key_file, or listen on 127.0.0.1"
        raise ApiError(403, message, code="needs_api_keys")
    service = state.service if state.models is None else state.models.watched(request.query_params.get("model"))
    return EventStream(service.events.listen(client_of(request)), None)
