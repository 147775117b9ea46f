"""Middleware around every request: its id, log line and metrics, API keys, origins of pages, limits on bodies.

From the outermost to the innermost: ``RequestMiddleware``, ``SameOriginMiddleware``, ``ApiKeyMiddleware``,
``BodyLimitMiddleware`` (``octavo.server.app.make_routes``).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config.server_options import ServerOptions, host_name
from octavo.process.children import WorkThread
from octavo.server.http.connection import network_of
from octavo.server.http.errors import ApiError, as_api_error, server_error
from octavo.server.logging import log_access, log_fields, new_request_id
from octavo.server.logging import request_id as current_request_id
from octavo.server.metrics import Metrics

logger = logging.getLogger("octavo")

#: Paths that need no key, as load balancers probe them; they reveal nothing about users.
OPEN_PATHS = frozenset({"/health", "/version"})
#: Request ids that clients may choose: safe in a log line and in a header.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
#: Headers of responses to requests that were not read completely.
_CLOSE = {"Connection": "close"}


class Middleware(ABC):
    """Middleware of HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.handle(scope, receive, send)
        except ApiError as e:
            await e.response(scope)(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, passes it on to ``app``, or raises an ``ApiError``, which is sent to the client."""


class RequestMiddleware(Middleware):
    """Request id (that of ``X-Request-Id``, or a new one), access log, HTTP metrics, responses to unhandled errors.

    It adds the version to an address before keys, limits, metrics and routes see it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: bool) -> None:
        super().__init__(app)
        self._metrics, self._log_requests = metrics, log_requests

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (path := versioned(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        request_headers = Headers(scope=scope)
        client_id = request_headers.get("x-request-id", "")
        request_id = client_id if _SAFE_ID.fullmatch(client_id) else new_request_id()
        token = current_request_id.set(request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        start, method = time.monotonic(), scope["method"]
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
            # A proxy that uses the other header sees another next request, which it has not checked (RFC 9112, 6.3).
            if "content-length" in request_headers and "transfer-encoding" in request_headers:
                message = "a request has Content-Length or Transfer-Encoding, not both"
                raise ApiError(400, message, code="invalid_framing", headers=_CLOSE)
            if method == "HEAD":  # GET without the body, which the protocol leaves out
                scope = {**scope, "method": "GET"}
            await self.app(scope, receive, send_with_id)
        except Exception as e:
            error = as_api_error(e)
            if not status:
                await error.response(scope)(scope, receive, send_with_id)
        finally:
            # The route's pattern: requested paths must not become labels of metrics.
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.http_finished(route, status or 499)
            if self._log_requests:
                client = scope["client"][0] if scope.get("client") else None
                seconds = time.monotonic() - start
                log_access(method, scope["path"], status or 499, seconds, client, **log_fields(scope))
            current_request_id.reset(token)


#: Addresses of OpenAI's API without their version, for clients whose base address lacks ``/v1``. /completions and
#: /embeddings are missing: they are llama.cpp's own routes.
_UNVERSIONED = re.compile(
    r"/(chat/completions|responses|models|messages|audio/transcriptions|audio/translations)(/|\Z)"
)


def versioned(path: str) -> str:
    return f"/v1{path}" if _UNVERSIONED.match(path) else path


# API keys, and the names of clients.


class ApiKeyMiddleware(Middleware):
    """Refuses requests without a known key, in ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        super().__init__(app)
        # Digests have one length, so that comparing them does not reveal the length of a key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            scope.setdefault("state", {})["api_key"] = self._check_key(Headers(scope=scope)).hex()
        await self.app(scope, receive, send)

    def _check_key(self, headers: Headers) -> bytes:
        key = headers.get("x-api-key")  # Anthropic's clients
        if (authorization := headers.get("authorization")) is not None:
            scheme, _, key = authorization.partition(" ")
            key = key.strip() if scheme.lower() == "bearer" else ""
        message = "no API key was sent; send it as 'Authorization: Bearer KEY'"
        if key is not None:
            message, digest = "the API key is not known", hashlib.sha256(key.encode("latin-1", "replace")).digest()
            # All keys are compared, so that the time does not depend on which one matches.
            if any([hmac.compare_digest(digest, known) for known in self._digests]):
                return digest
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def owner_of(request: Request) -> str:
    """The digest of a request's API key; empty where none is needed."""
    owner: str = request.scope.get("state", {}).get("api_key", "")
    return owner


def client_of(request: Request) -> str:
    """The sender of a request: its API key's digest, or its network where no key is needed."""
    return owner_of(request) or network_of(request.client.host if request.client else "")


# Which pages of a browser may use the server: checks of each request's Host and of its sender's origin.

#: Methods that only read.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": "80", "https": "443"}
#: A request target in absolute form (RFC 9112, 3.2.2): scheme, authority, path.
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:@/\\\s]*)(?::([0-9]{0,5}))?")


def split_authority(authority: str) -> tuple[str, str] | None:
    """(normalised host, port or "") of a Host header or of an authority in a URL; None: it is malformed."""
    match = _AUTHORITY.fullmatch(authority.strip())
    if match is None or not (name := host_name(match.group(1))):
        return None
    return name, match.group(2) or ""


def is_loopback_name(host: str) -> bool:
    """Whether a normalised host is ``localhost`` or a loopback address; no DNS server can redirect these."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def host_rule(options: ServerOptions, *, has_keys: bool) -> Callable[[str], bool] | None:
    """Whether a request may name a host; None: any.

    With API keys, DNS rebinding is harmless. On other addresses than loopback the server does not know its names.
    """
    allowed = options.allowed_hosts
    if "*" in allowed or not (allowed or (options.is_local and not has_keys)):
        return None
    names = frozenset(name for name in allowed if not name.startswith("*."))
    suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))
    return lambda host: host in names or host.endswith(suffixes) or is_loopback_name(host)


class SameOriginMiddleware(Middleware):
    """Refuses hosts that are not the server's, and changes that pages of other origins ask for."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_own_host: Callable[[str], bool] | None,
        origins: Sequence[str],
        operator_paths: Collection[str] = (),
    ) -> None:
        """``origins``: the allowed ones; ``*`` allows all, except at ``operator_paths``, which change the server."""
        super().__init__(app)
        self._is_own_host = is_own_host
        self._origins = frozenset(origins)
        self._operator_paths = frozenset(operator_paths)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        _read_absolute_form(scope)
        self._check_host(scope)
        if scope["method"] not in _SAFE_METHODS:
            self._check_origin(scope)
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        if self._is_own_host is None:
            return
        hosts = Headers(scope=scope).getlist("host")
        parts = split_authority(hosts[0]) if len(hosts) == 1 else None
        # An address that a connection has reached is the server's; only a name can be made to lead to another server.
        own_address = (scope.get("server") or ("",))[0]
        if parts is None or not (self._is_own_host(parts[0]) or parts[0] == host_name(own_address)):
            host = repr(hosts[0][:100]) if hosts else "none"
            message = f"the Host is {host}, not a name of this server: use localhost, or add it to allowed_hosts"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed", headers=_CLOSE)

    def _check_origin(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        is_any_allowed = "*" in self._origins and scope["path"] not in self._operator_paths
        if origin in self._origins or (origin is not None and is_any_allowed):
            return
        # No page can set this header (a forbidden request header of the Fetch standard). It also holds behind proxies
        # that replace the Host. "none": the user's own action, such as opening a bookmark.
        if site is not None:
            is_same = site.lower() in ("same-origin", "none")
        else:
            is_same = origin is None or _is_same_origin(origin, headers.get("host", ""), scope["scheme"])
        if not is_same:
            message = f"pages of {origin or 'other sites'!r:.100} may not do this (allowed_origins)"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed", headers=_CLOSE)


def _read_absolute_form(scope: Scope) -> None:
    """Replaces a target in absolute form by its path; its authority replaces the Host header."""
    match = _ABSOLUTE.fullmatch(scope["path"])
    if match is None:
        return
    authority, path = match.groups()
    if not authority:
        raise ApiError(400, "the request's target is a URL without a host", code="invalid_target", headers=_CLOSE)
    raw = _ABSOLUTE.fullmatch(scope.get("raw_path", b"").decode("latin-1"))
    scope["path"] = path or "/"
    scope["raw_path"] = ((raw and raw.group(2)) or "/").encode("latin-1")
    MutableHeaders(scope=scope)["host"] = authority


def _is_same_origin(origin: str, host: str, scheme: str) -> bool:
    """Whether an ``Origin`` belongs to a ``Host``. The server may speak http to a proxy that speaks https."""
    origin_scheme, separator, authority = origin.partition("://")
    origin_scheme = origin_scheme.lower()
    if not separator or origin_scheme not in _DEFAULT_PORTS or (scheme == "https" and origin_scheme != "https"):
        return False  # "null", too
    theirs, ours, default = split_authority(authority), split_authority(host), _DEFAULT_PORTS[origin_scheme]
    if theirs is None or ours is None:
        return False
    return theirs[0] == ours[0] and (theirs[1] or default) == (ours[1] or default)


# Bodies: their size, their time, and the memory of all together.


class BodyLimitMiddleware(Middleware):
    """Reads bodies, with limits on their size (as sent, and decompressed), their time, and all of them together."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout: float, budget: BodyBudget, by_path: Mapping[str, int] | None = None
    ) -> None:
        """``timeout``: seconds for a whole body. ``by_path``: routes with another limit than ``max_bytes``.

        A body counts in the ``budget`` until its request is answered, as the values made of it take as much memory.
        """
        super().__init__(app)
        self._max_bytes, self._by_path = max_bytes, by_path or {}
        self._timeout, self._budget = timeout, budget

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = HeldBody(self._budget, client_of(Request(scope)))
        try:
            body = await self._read_body(scope, receive, held)
            if body is None:  # the client has disconnected
                return
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body  # the reader of the message may give it up before the answer ends

            async def read_already() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, read_already, send)
        finally:
            held.release()

    async def _read_body(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes | None:
        """The body, decompressed; None: the client has disconnected."""
        headers = MutableHeaders(scope=scope)
        most = min(self._by_path.get(scope["path"], self._max_bytes), self._budget.max_bytes_per_client)
        length = headers.get("content-length", "")
        # A program may leave out the type of its JSON. A page may not: a browser sends a request without a type without
        # asking the server whether the page may (CORS).
        if "content-type" not in headers and "origin" not in headers:
            headers["content-type"] = "application/json"
        if length.isdecimal():
            if int(length[:20]) > most:
                raise self._too_large(most)
            self._budget.check(held.client, int(length))
        body = await self._receive(receive, most, held)
        if body and (encoding := headers.get("content-encoding")):
            # In a thread: a few kilobytes may become one of the largest bodies, in a tenth of a second.
            body = await _decompressor.run(decompressed, body, encoding, most, held.grow_to)
        return body

    async def _receive(self, receive: Receive, most: int, held: HeldBody) -> bytes | None:
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

    def _too_large(self, most: int) -> ApiError:
        option = "max_body_bytes" if most == self._max_bytes else "max_audio_bytes"
        if most == self._budget.max_bytes_per_client:
            option = "max_body_bytes_per_client"
        return body_too_large(most, _CLOSE, option)


#: Default of max_body_bytes_total: this number of largest bodies, and at least this number of bytes.
_LARGEST_BODIES = 4
_LEAST_TOTAL = 512 << 20

#: The connection is closed, as the body may not be read to its end.
_REFUSED = {"Retry-After": "1", **_CLOSE}


class BodyBudget:
    """Owns the count of bytes in bodies, by client; may be used from any thread.

    Invariant: ``total`` and ``by_client`` are the sums of the sizes of the ``HeldBody`` that are not released.
    """

    def __init__(self, max_bytes: int, max_bytes_per_client: int) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_per_client = min(max_bytes, max_bytes_per_client)
        self.total = 0
        self.by_client: Counter[str] = Counter()
        self._lock = threading.Lock()

    def check(self, client: str, more: int) -> None:
        """Refuses ``more`` bytes that exceed the client's share (429) or the total of all clients (503)."""
        if self.by_client[client] + more > self.max_bytes_per_client:
            taken = f"{self.by_client[client]} of {self.max_bytes_per_client} bytes (max_body_bytes_per_client)"
            message = f"the bodies of your requests take {taken}; send this one when others are done"
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_body_bytes", headers=_REFUSED)
        if self.total + more > self.max_bytes:
            taken = f"{self.total} of {self.max_bytes} bytes (max_body_bytes_total)"
            message = f"the bodies of all requests take {taken}; try again later"
            raise server_error(503, message, "too_many_body_bytes", headers=_REFUSED)

    def add(self, client: str, more: int) -> None:
        """Counts ``more`` bytes of a client, which may be negative; raises as ``check``, and counts none then."""
        with self._lock:
            if more > 0:
                self.check(client, more)
            self.total += more
            self.by_client[client] += more
            if not self.by_client[client]:
                del self.by_client[client]


@dataclass(slots=True)
class HeldBody:
    """The bytes of one body in a budget, until it is released."""

    budget: BodyBudget
    client: str
    size: int = 0

    def grow_to(self, size: int) -> None:
        """Counts the body's bytes; never fewer than before, as both forms of it exist while it is decompressed."""
        if size > self.size:
            self.budget.add(self.client, size - self.size)
            self.size = size

    def release(self) -> None:
        self.budget.add(self.client, -self.size)
        self.size = 0


def make_budget(options: ServerOptions, largest: int) -> BodyBudget:
    most = options.max_body_bytes_total or max(_LEAST_TOTAL, _LARGEST_BODIES * largest)
    return BodyBudget(most, options.max_body_bytes_per_client or most // 2)


#: Encoding -> window bits of zlib, which select its format.
_ZLIB = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

#: Most encodings of a body, one within the other: some clients compress a compressed body again.
MAX_ENCODINGS = 2
#: Bytes that a decoder reads and makes at once; after each step the size is counted, and other threads have a turn.
_PIECE = 64 << 10
_STEP = 1 << 20
#: Largest window of zstd, as a power of two, which takes memory beside the result: 8 MiB (RFC 9659).
_MAX_WINDOW_LOG = 23

_decompressor = WorkThread("unpack")


def decompressed(
    body: bytes, encoding: str, max_bytes: int, grow_to: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body of a request with the header ``Content-Encoding``; to be called in a thread.

    ``max_bytes`` limits the result of each step; ``grow_to`` is called with the growing number of bytes.
    """
    names = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(names) > MAX_ENCODINGS:
        message = f"the body is compressed {len(names)} times (Content-Encoding); at most {MAX_ENCODINGS} are taken"
        raise ApiError(415, message, code="unsupported_encoding")
    for name in reversed(names):
        body = _decode(_make_decoder(name), body, name, max_bytes, grow_to)
    return body


def _make_decoder(name: str) -> Any:
    if name == "zstd":
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
        except ImportError:
            message = "Content-Encoding 'zstd' needs a server with Python 3.14; send the body as it is, or in gzip"
            raise ApiError(415, message, code="unsupported_encoding") from None
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    if name not in _ZLIB:
        message = f"Content-Encoding {name[:50]!r} is not known here; send the body as it is, or as gzip, deflate, zstd"
        raise ApiError(415, message, code="unsupported_encoding")
    return zlib.decompressobj(_ZLIB[name])


def _decode(decoder: Any, body: bytes, name: str, max_bytes: int, grow_to: Callable[[int], None]) -> bytes:
    pieces, size = list[bytes](), 0
    for start in range(0, len(body), _PIECE):
        rest, is_full = body[start : start + _PIECE], True
        while rest or is_full:
            most = min(_STEP, max_bytes + 1 - size)
            try:
                piece = decoder.decompress(rest, most)
            except Exception:  # zlib.error, or zstd's own
                raise _incomplete(name) from None
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise body_too_large(max_bytes)
            grow_to(size)
            if decoder.eof:
                return b"".join(pieces)
            # zlib gives back what it has not read; zstd keeps it.
            rest, is_full = getattr(decoder, "unconsumed_tail", b""), len(piece) == most
    raise _incomplete(name)


def _incomplete(name: str) -> ApiError:
    message = f"the body is not whole, or not in its Content-Encoding ({name})"
    return ApiError(400, message, code="invalid_encoding")


def body_too_large(
    max_bytes: int, headers: Mapping[str, str] | None = None, option: str = "max_body_bytes"
) -> ApiError:
    message = f"the body is larger than the {max_bytes} bytes that this server takes ({option})"
    return ApiError(413, message, code="body_too_large", headers=headers)
