"""Routes that are made when the first request for one of them comes, so that a server that gets none starts sooner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


class DeferredRoutes(BaseRoute):
    """Stands for routes of an application until they are made; then it is gone."""

    def __init__(self, app: FastAPI, paths: Sequence[str], make: Callable[[], None]) -> None:
        """``make`` adds the routes with these ``paths`` to the application."""
        self.paths = frozenset(paths)
        self._app, self._make = app, make
        self._lock = threading.Lock()
        app.router.routes.append(self)

    @property
    def _is_waiting(self) -> bool:
        return self in self._app.router.routes

    def make(self) -> None:
        """Makes the routes, unless that is done; from any thread."""
        with self._lock:
            if self._is_waiting:
                self._make()
                self._app.router.routes.remove(self)  # until here it stands before them

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See ``BaseRoute``."""
        is_one = scope["type"] == "http" and scope["path"] in self.paths
        return (Match.FULL if is_one else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Makes the routes beside the event loop, which takes 0.1 s, and passes the request on to its own."""
        if self._is_waiting:
            await asyncio.to_thread(self.make)
        await self._app.router(scope, receive, send)


def make_deferred(app: FastAPI) -> None:
    """Makes all routes that are not made yet."""
    for route in [route for route in app.router.routes if isinstance(route, DeferredRoutes)]:
        route.make()
