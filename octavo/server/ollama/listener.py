"""Ollama's own address: the same server, with only the routes that Ollama has."""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.errors import ApiError, ollama_error

#: Addresses of Ollama's server: its own API, and of OpenAI's and Anthropic's what it has.
_PATHS = re.compile(r"/api/.*|/v1/(chat/completions|completions|embeddings|responses|messages|models(/.*)?)")


class OllamaListener:
    """Passes on requests; of those that came in at ``port``, only such as Ollama answers."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app, self._port = app, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = scope["type"] == "http" and (scope.get("server") or ("", 0))[1] == self._port
        if not own or _PATHS.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
        elif scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            await Response("Ollama is running", media_type="text/plain")(scope, receive, send)
        else:
            error = ApiError(404, f"there is nothing at this address ({scope['path'][:100]}) of Ollama's API")
            await Response(ollama_error(error), 404, media_type="application/json")(scope, receive, send)
