"""Middleware around every request: its id, log line and metrics, errors, API keys, limits on bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server import logging as server_logging
from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.body_budget import BodyBudget, HeldBody
from octavo.server.compressed_bodies import body_too_large, decompressed_beside_loop
from octavo.server.metrics import Metrics

#: Paths that need no key, as load balancers probe them; they reveal nothing about users.
OPEN_PATHS = frozenset({"/health", "/version"})
#: Request ids that clients may choose: safe in a log line and in a header.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestMiddleware:
    """The outermost middleware: request id, access log, HTTP metrics.

    An id from ``X-Request-Id`` (or a new one) goes into every log line of the request and into the response's headers.
    An exception that was not handled becomes a response of status 500 without internal details.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: bool) -> None:
        self.app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; never raises."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _SAFE_ID.fullmatch(wanted) else server_logging.new_request_id()
        token = server_logging.request_id.set(request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        start, method_sent = time.monotonic(), scope["method"]
        status = 0  # remains 0 if the client disconnects before the response starts

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                headers.update(scope["state"].get("response_headers", {}))
            await send(message)

        self._metrics.http_started()
        try:
            _check_framing(scope)
            if method_sent == "HEAD":  # GET without the body, which the protocol leaves out
                scope = {**scope, "method": "GET"}
            await self.app(scope, receive, send_with_id)
        except Exception as e:
            error = as_api_error(e)
            if not status:
                await error.response(scope)(scope, receive, send_with_id)
        finally:
            self._metrics.http_finished(_route(scope), status or 499)
            if self._log_requests:
                client = scope["client"][0] if scope.get("client") else None
                seconds = time.monotonic() - start
                fields = server_logging.log_fields(scope)
                server_logging.log_access(method_sent, scope["path"], status or 499, seconds, client, **fields)
            server_logging.request_id.reset(token)


def _check_framing(scope: Scope) -> None:
    """Refuses a request whose end two headers tell differently.

    A proxy that goes by the other header sees another next request: one that it has not checked (RFC 9112, 6.3).

    Raises:
        ApiError: 400.
    """
    headers = Headers(scope=scope)
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "a request has Content-Length or Transfer-Encoding, not both"
        raise ApiError(400, message, code="invalid_framing", headers=_CLOSE)


class BodyLimitMiddleware:
    """Middleware that reads bodies, bounded in size (as sent, and decompressed), in time, and all together."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout: float,
        budget: BodyBudget,
        by_path: Mapping[str, int] | None = None,
    ) -> None:
        """``timeout`` in seconds, for the whole body; ``by_path``: bytes where others are taken than ``max_bytes``.

        A body counts in the ``budget`` until its request is answered, as what was made of it takes as much.
        """
        self.app = app
        self._by_path = by_path or {}
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 408, 413, 415, 429 or 503, or passes the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = self._budget.open(client_of(Request(scope)))
        try:
            try:
                body = await self._body(scope, receive, held)
            except ApiError as e:
                await e.response(scope)(scope, receive, send)
                return
            if body is None:  # the client has disconnected
                return
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body  # whoever takes the message may give it up before the answer ends

            async def read_already() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, read_already, send)
        finally:
            held.release()

    async def _body(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes | None:
        """The body, decompressed; None: the client has disconnected.

        Raises:
            ApiError: it is refused.
        """
        headers = MutableHeaders(scope=scope)
        most, length = self._most(scope["path"]), headers.get("content-length", "")
        # A program may leave out the type of its JSON. A page may not: what it sends without one, a browser does not
        # ask the server about.
        if "content-type" not in headers and "origin" not in headers:
            headers["content-type"] = "application/json"
        if length.isdecimal():
            if int(length[:20]) > most:
                raise self._too_large(most)
            held.check(int(length))
        body = await self._read(receive, most, held)
        if body and (encoding := headers.get("content-encoding")):
            body = await decompressed_beside_loop(body, encoding, most, held.grow_to)
        return body

    async def _read(self, receive: Receive, most: int, held: HeldBody) -> bytes | None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > most:
                        raise self._too_large(most)
                    held.grow_to(len(body) + len(piece))
                    body += piece
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body was not complete within {self._timeout:g} seconds", headers=_CLOSE) from None

    def _most(self, path: str) -> int:
        return min(self._by_path.get(path, self._max_bytes), self._budget.max_bytes_per_client)

    def _too_large(self, most: int) -> ApiError:
        option = "max_body_bytes" if most == self._max_bytes else "max_audio_bytes"
        if most == self._budget.max_bytes_per_client:
            option = "max_body_bytes_per_client"
        return body_too_large(most, _CLOSE, option)


#: Headers of responses to requests that were not read completely.
_CLOSE = {"Connection": "close"}


def _route(scope: Scope) -> str:
    """The pattern that matched, as arbitrary paths must not become metric labels."""
    return getattr(scope.get("route"), "path", "unmatched")


class ApiKeyMiddleware:
    """Middleware that refuses requests without a known key, in ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        # Digests have one length, so that comparing them does not reveal the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, or passes the request on."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = _key_of(Headers(scope=scope))
            if key is None or not self._is_known(key):
                await _refusal(key).response(scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["api_key"] = _digest(key.encode("latin-1", "replace")).hex()
        await self.app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        digest = _digest(key.encode("latin-1", "replace"))
        # All keys are compared, so that the time does not depend on which one matches.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _key_of(headers: Headers) -> str | None:
    """The key of a request, from either header; empty if it is of another scheme; None if there is none."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")  # Anthropic's clients
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def owner_of(request: Request) -> str:
    """Names the API key of a request, without revealing it; empty where none is needed."""
    owner: str = request.scope.get("state", {}).get("api_key", "")
    return owner


def client_of(request: Request) -> str:
    """Names who sends a request: its API key, or its address where no key is needed (``network_of``)."""
    return owner_of(request) or network_of(request.client.host if request.client else "")


def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address; of IPv6 its first 64 bits, as a client has all addresses in them."""
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(key: str | None) -> ApiError:
    message = (
        "no API key was sent; send it as 'Authorization: Bearer KEY'" if key is None else "the API key is not known"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
