"""Serves the page at ``/`` in front of the routes: its files say nothing of the server's users and need no key."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.ui_files import PREFIX, answer, find_file


@dataclass(frozen=True)
class _Route:
    """What metrics and logs call the files."""

    path: str = PREFIX


class UiMiddleware:
    """Answers requests for the page and its files, and passes all others on.

    ``/`` is the page for browsers; other clients get what answered there before: JSON.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or passes the request on."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        file = find_file(scope["path"], wants_html="text/html" in headers.get("accept", ""))
        if file is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = _Route()
        status, sent, body = answer(
            file,
            if_none_match=headers.get("if-none-match", ""),
            accept_encoding=headers.get("accept-encoding", ""),
        )
        raw = [(name.encode(), value.encode()) for name, value in sent.items() if name != "x-content-type-options"]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})
