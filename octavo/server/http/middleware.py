"""Middleware around every request: its id, log line and metrics, errors, API keys, limits on bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import stat
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config.server_options import API_KEYS_VARIABLE, ServerOptions, host_name, names
from octavo.core.errors import ConfigError
from octavo.server import logging as server_logging
from octavo.server.http.errors import ApiError, as_api_error, server_error
from octavo.server.metrics import Metrics

# The memory that the bodies of all requests take together: bounded, for one client and in all.

#: The largest bodies that a server without an option for the sum has room for, and bytes that it has room for at least.
_LARGEST_BODIES = 4
_LEAST_TOTAL = 512 << 20

#: Such a body may not be read to its end.
_REFUSED = {"Retry-After": "1", "Connection": "close"}


class BodyBudget:
    """Owns the count of bytes in bodies, by client; from any thread.

    Invariant: ``total`` and ``by_client`` are the sums of the sizes of the ``HeldBody`` that are not released.
    """

    def __init__(self, max_bytes: int, max_bytes_per_client: int) -> None:
        """Most bytes in all, and of one client."""
        self.max_bytes = max_bytes
        self.max_bytes_per_client = min(max_bytes, max_bytes_per_client)
        self.total = 0
        self.by_client: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(self, client: str) -> HeldBody:
        """The body of a request that begins; it is empty."""
        return HeldBody(self, client)

    def check(self, client: str, more: int) -> None:
        """Refuses ``more`` bytes of a client that do not fit now.

        Raises:
            ApiError: 429, the client has its share; 503, all clients together have taken what there is.
        """
        if self.by_client[client] + more > self.max_bytes_per_client:
            message = (
                f"the bodies of your requests take {self.by_client[client]} of {self.max_bytes_per_client} bytes "
                "(max_body_bytes_per_client); send this one when others are done"
            )
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_body_bytes", headers=_REFUSED)
        if self.total + more > self.max_bytes:
            message = (
                f"the bodies of all requests take {self.total} of {self.max_bytes} bytes (max_body_bytes_total); try "
                "again later"
            )
            raise server_error(503, message, "too_many_body_bytes", headers=_REFUSED)

    def add(self, client: str, more: int) -> None:
        """Counts ``more`` bytes of a client, which may be negative.

        Raises:
            ApiError: as ``check``; none is counted.
        """
        with self._lock:
            if more > 0:
                self.check(client, more)
            self.total += more
            self.by_client[client] += more
            if not self.by_client[client]:
                del self.by_client[client]


class HeldBody:
    """What one body counts for in a budget, until it is released."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self.size = 0

    def check(self, size: int) -> None:
        """Refuses a body that is to become so large, without counting it.

        Raises:
            ApiError: see ``BodyBudget.check``.
        """
        self._budget.check(self._client, size - self.size)

    def grow_to(self, size: int) -> None:
        """The body has so many bytes now; it never shrinks: while it is unpacked both forms of it exist.

        Raises:
            ApiError: see ``BodyBudget.check``.
        """
        if size > self.size:
            self._budget.add(self._client, size - self.size)
            self.size = size

    def release(self) -> None:
        """The body is given up."""
        self._budget.add(self._client, -self.size)
        self.size = 0


def make_budget(options: ServerOptions, largest: int) -> BodyBudget:
    """The budget of a server whose largest body has ``largest`` bytes."""
    most = options.max_body_bytes_total or max(_LEAST_TOTAL, _LARGEST_BODIES * largest)
    return BodyBudget(most, options.max_body_bytes_per_client or most // 2)


# Bodies of requests that are compressed: bounded in what they become.

#: Encoding -> window bits of zlib, which tell its format.
_ZLIB = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

#: Most encodings, one within the other: some clients compress what is compressed, nobody does it more often.
MAX_ENCODINGS = 2
#: Bytes that a decoder is given at once, and makes at once; after each step the size is counted, and other threads
#: have a turn.
_PIECE = 64 << 10
_STEP = 1 << 20
#: Largest window of zstd, as a power of two, that takes memory beside the result: 8 MiB (RFC 9659).
_MAX_WINDOW_LOG = 23

#: A single thread, so that no number of bodies takes the processors from the event loop and the engine.
_expander = ThreadPoolExecutor(1, thread_name_prefix="octavo-unpack")


def decompressed(
    body: bytes, encoding: str, max_bytes: int, grow_to: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body of a request with the header ``Content-Encoding``; to be called beside the event loop.

    Args:
        body: as it was sent.
        encoding: the header's value; several are separated by commas, in the order in which they were applied.
        max_bytes: most bytes of the result, and of each step to it.
        grow_to: is told how many bytes there are, while they become more; what it raises ends the work.

    Raises:
        ApiError: 415, the encoding is not known, or there are too many; 400, the body is not in it; 413, the result is
            too large.
    """
    names = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(names) > MAX_ENCODINGS:
        message = f"the body is compressed {len(names)} times (Content-Encoding); at most {MAX_ENCODINGS} are taken"
        raise ApiError(415, message, code="unsupported_encoding")
    for name in reversed(names):
        body = _decoded(_decoder(name), body, name, max_bytes, grow_to)
    return body


async def decompressed_beside_loop(body: bytes, encoding: str, max_bytes: int, grow_to: Callable[[int], None]) -> bytes:
    """``decompressed`` in a thread: a body of some kilobytes may become one of the largest, in a tenth of a second."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_expander, decompressed, body, encoding, max_bytes, grow_to)


def _decoder(name: str) -> Any:
    if name == "zstd":
        return _zstd_decoder()
    if name not in _ZLIB:
        codings = ", ".join(("gzip", "deflate", "zstd"))
        message = f"Content-Encoding {name[:50]!r} is not known here; send the body as it is, or as {codings}"
        raise ApiError(415, message, code="unsupported_encoding")
    return zlib.decompressobj(_ZLIB[name])


def _zstd_decoder() -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
    except ImportError:
        message = "Content-Encoding 'zstd' needs a server with Python 3.14; send the body as it is, or in gzip"
        raise ApiError(415, message, code="unsupported_encoding") from None
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})


def _decoded(decoder: Any, body: bytes, name: str, max_bytes: int, grow_to: Callable[[int], None]) -> bytes:
    """What a decoder makes of a body in its encoding."""
    pieces, size = list[bytes](), 0
    for start in range(0, len(body), _PIECE):
        rest, is_full = body[start : start + _PIECE], True
        while rest or is_full:
            most = min(_STEP, max_bytes + 1 - size)
            try:
                piece = decoder.decompress(rest, most)
            except Exception:  # zlib.error, or zstd's own
                raise _not_whole(name) from None
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise body_too_large(max_bytes)
            grow_to(size)
            if decoder.eof:
                return b"".join(pieces)
            # zlib gives back what it has not read; zstd keeps it.
            rest, is_full = getattr(decoder, "unconsumed_tail", b""), len(piece) == most
    raise _not_whole(name)


def _not_whole(name: str) -> ApiError:
    message = f"the body is not whole, or not in its Content-Encoding ({name})"
    return ApiError(400, message, code="invalid_encoding")


def body_too_large(
    max_bytes: int, headers: Mapping[str, str] | None = None, option: str = "max_body_bytes"
) -> ApiError:
    """The error for a body of more bytes than an option allows."""
    message = f"the body is larger than the {max_bytes} bytes that this server takes ({option})"
    return ApiError(413, message, code="body_too_large", headers=headers)


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


# Addresses of OpenAI's API without the version, which clients use whose base address lacks ``/v1``.

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


# Which pages of a browser may use the server: checks of the Host of every request, and of the origin of its sender.

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
    """Whether a normalised host is ``localhost`` or a loopback address; no DNS server can give these to another."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def host_rule(options: ServerOptions, *, has_keys: bool) -> Callable[[str], bool] | None:
    """Which hosts requests may name; None: any.

    With API keys a rebound page knows no key. On another address than loopback the server's names are not known here,
    so only ``allowed_hosts`` limits them.
    """
    allowed = options.allowed_hosts
    if "*" in allowed or not (allowed or (options.is_local and not has_keys)):
        return None
    names = frozenset(name for name in allowed if not name.startswith("*."))
    suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))
    return lambda host: host in names or host.endswith(suffixes) or is_loopback_name(host)


class SameOriginMiddleware:
    """Middleware that refuses hosts that are not the server's, and changes that pages of other origins ask for."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        is_own_host: Callable[[str], bool] | None,
        origins: Sequence[str],
        operator_paths: Collection[str] = (),
    ) -> None:
        """``is_own_host``: see ``host_rule``; ``origins``: those allowed, ``*`` for all, but not at ``operator_paths``,
        which change the server: there an origin has to be named."""
        self.app = app
        self._is_own_host = is_own_host
        self._origins = frozenset(origins)
        self._operator_paths = frozenset(operator_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400 or 403, or passes the request on; a target in absolute form as its path."""
        if scope["type"] == "http":
            try:
                _read_absolute_form(scope)
                self._check_host(scope)
                if scope["method"] not in _SAFE_METHODS:
                    self._check_origin(scope)
            except ApiError as e:
                await e.response(scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        if self._is_own_host is None:
            return
        hosts = Headers(scope=scope).getlist("host")
        parts = split_authority(hosts[0]) if len(hosts) == 1 else None
        # An address that a connection has reached is the server's; only names can be made to lead to others.
        own_address = (scope.get("server") or ("",))[0]
        if parts is None or not (self._is_own_host(parts[0]) or parts[0] == host_name(own_address)):
            named = repr(hosts[0][:100]) if hosts else "none"
            message = (
                f"the request's Host is {named}, which is not a name of this server; use localhost, or name it in "
                "allowed_hosts"
            )
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed", headers=_CLOSE)

    def _check_origin(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and self._is_allowed(origin, scope["path"]):
            return
        # What browsers say of a request's site no page can set (a forbidden request header of the Fetch standard). It
        # holds behind proxies, too, that replace the Host. "none": somebody's own doing, such as a bookmark.
        if site is not None:
            is_same = site.lower() in ("same-origin", "none")
        else:
            is_same = origin is None or _is_same_origin(origin, headers.get("host", ""), scope["scheme"])
        if not is_same:
            message = f"pages of {origin or 'other sites'!r:.100} may not do this (allowed_origins)"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed", headers=_CLOSE)

    def _is_allowed(self, origin: str, path: str) -> bool:
        return origin in self._origins or ("*" in self._origins and path not in self._operator_paths)


def _read_absolute_form(scope: Scope) -> None:
    """Replaces a target in absolute form by its path; its authority counts as Host, whatever the header says.

    Raises:
        ApiError: 400, there is no authority.
    """
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
    """Whether an ``Origin`` is that of a ``Host``. The server may speak http to a proxy that speaks https."""
    origin_scheme, separator, authority = origin.partition("://")
    origin_scheme = origin_scheme.lower()
    if not separator or origin_scheme not in _DEFAULT_PORTS or (scheme == "https" and origin_scheme != "https"):
        return False  # "null", too
    theirs, ours, default = split_authority(authority), split_authority(host), _DEFAULT_PORTS[origin_scheme]
    if theirs is None or ours is None:
        return False
    return theirs[0] == ours[0] and (theirs[1] or default) == (ours[1] or default)


# The API keys of a server: from an option, the file that another names, and the environment.

logger = logging.getLogger("octavo")


def read_api_keys(options: ServerOptions, environ: Mapping[str, str]) -> list[str]:
    """API keys from the options, the file and the environment; if there are none, requests need no key.

    Raises:
        ConfigError: the file is unreadable or holds no key, or a key has characters that a header cannot carry.
    """
    keys = names(environ.get(API_KEYS_VARIABLE)) + names(options.api_key)
    path = options.api_key_file
    if path is not None:
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read api_key_file {path}: {getattr(e, 'strerror', None) or e}") from None
        if stat.S_ISREG(mode) and mode & stat.S_IROTH:
            # Not an error: secrets mounted into containers have such permissions.
            logger.warning("api_key_file %s can be read by every user of this machine", path)
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise ConfigError(f"api_key_file {path} holds no key; write one a line")
        keys += from_file
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key must be made of visible ASCII characters")
    return keys
