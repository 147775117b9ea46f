"""Addresses of OpenAI's API without the version, which clients use whose base address lacks ``/v1``."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

#: Addresses, and what is below them, that no other API of this server has: /completions and /embeddings are llama.cpp's
#: own routes.
_UNVERSIONED = (
    "/chat/completions",
    "/responses",
    "/models",
    "/messages",
    "/audio/transcriptions",
    "/audio/translations",
)


def versioned(path: str) -> str:
    """The address with its version, where it lacks it."""
    lacks = any(path == each or path.startswith(f"{each}/") for each in _UNVERSIONED)
    return f"/v1{path}" if lacks else path


class UnversionedPaths:
    """Gives such an address its version before anything looks at it: keys, limits, metrics and the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] == "http" and (path := versioned(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self.app(scope, receive, send)
