"""Connections: their protocol, their number, and the answers while the model loads."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import resource
import socket
import ssl
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from html import escape
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.config.server_options import ServerOptions
from octavo.process.startup import LOADING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("octavo.server")


#: Descriptors reserved for files of models and adapters, processes, sockets to workers.
RESERVED_DESCRIPTORS = 64
#: Most connections that are accepted in one turn of the event loop.
_ACCEPTS_AT_ONCE = 64
#: Seconds until accepting is tried again although no connection has closed: other files may use the descriptors.
_RETRY = 1.0
#: Seconds between two log lines about refused connections.
LOG_INTERVAL = 10.0


def network_of(address: str) -> str:
    """An IPv4 address, or the first 64 bits of an IPv6 address, as a client has all addresses with these bits."""
    if ":" not in address:
        return address
    ip = ipaddress.IPv6Address(address.partition("%")[0])
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))


class Acceptor:
    """Owns the listening socket and the count of connections (asyncio's own server fails when descriptors run out).

    Invariant: there are never more than ``limit`` connections, nor ``limit_by_address`` from one address. At the first
    limit, or when descriptors run out, nothing is accepted until a connection closes: clients wait in the kernel's
    queue. At the second, a connection is closed at once, as those behind it may be another's.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], HttpProtocol],
        *,
        limit: int,
        limit_by_address: int,
        tls: ssl.SSLContext | None = None,
        handshake_timeout: float = 60.0,
    ) -> None:
        """``handshake_timeout``: seconds that the handshake of TLS may take."""
        self._sock, self._make_protocol = sock, make_protocol
        self._limit, self._limit_by_address = limit, limit_by_address
        self._tls, self._handshake_timeout = tls, handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()
        self._retry: asyncio.TimerHandle | None = None
        self._is_paused = self._is_closed = False
        self._next_line = 0.0
        self._num_unlogged = 0

    def start(self) -> None:
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accepts no more; the connections go on."""
        self._is_closed = True
        self._pause()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._connections) >= self._limit:
                self._pause()
                self._log(f"all {self._limit} connections are taken (max_connections); new ones wait until one closes")
                return
            try:
                connection, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:  # descriptors or memory have run out, or the network is down
                self._pause()
                self._retry = self._loop.call_later(_RETRY, self._resume)
                self._log(f"no connection can be accepted: {e.strerror}; tried again when another closes")
                return
            self._take(connection, network_of(peer[0]))

    def _take(self, connection: socket.socket, client: str) -> None:
        if self._by_address[client] >= self._limit_by_address:
            connection.close()
            limit = f"{self._limit_by_address} connections (max_connections_per_address)"
            self._log(f"{client} has {limit} open; further ones are closed")
            return
        connection.setblocking(False)
        self._by_address[client] += 1
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(lambda _: self._release(task, client))

    async def _serve(self, connection: socket.socket) -> None:
        seconds = None if self._tls is None else self._handshake_timeout
        try:
            _, protocol = await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as e:  # the handshake failed
            logger.debug("a connection could not be opened: %s", e)
            connection.close()
            return
        await protocol.closed.wait()

    def _release(self, task: asyncio.Task[None], client: str) -> None:
        self._connections.discard(task)
        self._by_address[client] -= 1
        if not self._by_address[client]:
            del self._by_address[client]
        self._resume()

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self._sock)

    def _resume(self) -> None:
        if self._is_paused and not self._is_closed:
            self._is_paused = False
            self._loop.add_reader(self._sock, self._accept)

    def _log(self, line: str) -> None:
        """Logs at most every ``LOG_INTERVAL`` seconds, with the number of events since the last line."""
        self._num_unlogged += 1
        if (now := time.monotonic()) < self._next_line:
            return
        self._next_line = now + LOG_INTERVAL
        times, self._num_unlogged = self._num_unlogged, 0
        logger.warning("%s", line, extra={"fields": {"times": times}})


def connection_limits(options: ServerOptions) -> tuple[int, int]:
    """Most connections in all and from one address, by the options and the limit on descriptors."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = options.max_connections
    if allowed != resource.RLIM_INFINITY:
        room = max(1, allowed - len(os.listdir("/dev/fd")) - RESERVED_DESCRIPTORS)
        if room < limit:
            logger.warning(
                "max_connections is %d here, not %d: the limit on open files (ulimit -n) is %d", room, limit, allowed
            )
            limit = room
    by_address = options.max_connections_per_address
    return limit, max(1, limit // 2) if by_address is None else by_address


class HttpProtocol(H11Protocol):
    """uvicorn's protocol of one connection, with a limit on the time that the head of a request may take.

    Invariant: while the server answers no request, the client has ``header_timeout`` seconds for a whole head, counted
    from its first byte (on a new connection: from the connection's begin), or for the rest of a body whose request was
    refused. Between requests uvicorn's ``timeout_keep_alive`` holds.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout = header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        #: Set when the connection has ended.
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self.closed.set()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            # uvicorn's own way to end an idle connection.
            self._head_timer = self.loop.call_later(self._header_timeout, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


#: Seconds for sending the last bytes of responses at the shutdown.
FLUSH = 5.0


class Server(uvicorn.Server):
    """uvicorn's server with an ``Acceptor``, and without its signal handlers, which exit by the signal."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=HttpProtocol,
                timeout_keep_alive=options.keep_alive_timeout,
                timeout_graceful_shutdown=int(options.shutdown_timeout + FLUSH) + 1,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
            )
        )
        self._options = options
        self._acceptors: list[Acceptor] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        socks = sockets or []
        timeout = self._options.header_timeout
        limit, limit_by_address = connection_limits(self._options)
        for sock in socks:  # which share the limits
            acceptor = Acceptor(
                sock,
                partial(HttpProtocol, self.config, self.server_state, self.lifespan.state, header_timeout=timeout),
                limit=max(1, limit // len(socks)),
                limit_by_address=max(1, limit_by_address // len(socks)),
                tls=self.config.ssl,
                handshake_timeout=timeout,
            )
            self._acceptors.append(acceptor)
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


# Answers while the model loads: 503 with the progress of the start, so that no client takes the server for dead.

#: Seconds for which the rest of a body is read after the answer: closing a connection with an unread body resets it,
#: and the answer is lost.
_DRAIN_TIMEOUT = 5.0


class StartingApp:
    """The application of a server from its first moment: it answers 503 until ``open`` gives it the routes.

    One acceptor and one protocol serve both. Importing them (h11, uvicorn) takes 0.03 s of processor time; the engine
    and the routes, which are imported while this answers, take 0.3 s (phases of ``octavo serve --profile-startup``).
    """

    def __init__(self) -> None:
        self._routes: ASGIApp | None = None
        self._progress = _Progress()
        logging.getLogger("octavo").addHandler(self._progress)

    def open(self, routes: ASGIApp) -> None:
        self._routes = routes
        logging.getLogger("octavo").removeHandler(self._progress)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._routes is not None:
            await self._routes(scope, receive, send)
            return
        accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
        body, headers = self._progress.page() if b"text/html" in accepted else self._progress.error(scope["path"])
        headers = {"retry-after": "1", "connection": "close", "content-length": str(len(body)), **headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 503, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


#: Of the page that browsers see until the model is there.
_STYLE = "body{font:1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:25vh auto;padding:0 1rem}h1{font-size:1.5rem}"


class _Progress(logging.Handler):
    """Keeps the last log line about loading weights; other lines may hold information that API keys protect."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._begin = time.monotonic()
        self._line = "starting"

    def emit(self, record: logging.LogRecord) -> None:
        if (message := record.getMessage()).startswith(LOADING):
            self._line = message

    @property
    def _message(self) -> str:
        return f"the model is loading, for {time.monotonic() - self._begin:.0f} s: {self._line}"

    def error(self, path: str) -> tuple[bytes, dict[str, str]]:
        """Body and headers of the answer to a program, in the format of the API that the path belongs to."""
        # Without octavo.server.http.errors, whose imports take longer than all of this.
        if path.startswith(("/v1/messages", "/messages")):
            body: dict[str, Any] = {"type": "error", "error": {"type": "overloaded_error", "message": self._message}}
        elif path.startswith("/api/"):
            body = {"error": self._message}
        else:
            body = {"error": {"message": self._message, "type": "server_error", "param": None, "code": "loading"}}
        return json.dumps(body).encode(), {"content-type": "application/json"}

    def page(self) -> tuple[bytes, dict[str, str]]:
        """Body and headers of the answer to a browser, which asks again after a second."""
        body = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1">'
            '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
            f"<title>Octavo is starting</title><style>{_STYLE}</style>"
            f"<h1>Octavo is starting</h1><p>{escape(self._message)}</p></html>"
        )
        digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
        policy = {"content-security-policy": f"default-src 'none'; style-src 'sha256-{digest}'"}
        return body.encode(), {"content-type": "text/html; charset=utf-8", **policy}
