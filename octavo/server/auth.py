"""API keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError

#: What a load balancer asks before it knows a key; neither says anything of a user.
OPEN_PATHS = frozenset({"/health", "/version"})


class KeyCheck:
    """Middleware that lets requests pass that bring ``Authorization: Bearer KEY`` with one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        # Digests are of one length, so that a comparison tells nothing of a key's.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, or passes the request on."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization")
            if given is None or not self._known(given):
                await _refusal(given).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("latin-1", "replace"))
        # Every key is compared, so that the time does not tell which of them was near.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(given: str | None) -> ApiError:
    message = (
        "no API key was sent; send it as 'Authorization: Bearer KEY'" if given is None else "the API key is not known"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
