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
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from html import escape
from socket import socket as Socket
from typing import TYPE_CHECKING, Any

from octavo.config.server_options import ServerOptions
from octavo.process.startup import LOADING

if TYPE_CHECKING:
    from octavo.server.app import HttpProtocol

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
        make_protocol: Callable[[], HttpProtocol | _LoadingProtocol],
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


# Answers while the model loads: 503 with the progress of the start, so that no client takes the server for dead.

#: Longest head of a request in bytes, and seconds that a whole connection may take.
_MAX_HEAD = 64 << 10
_TIMEOUT = 5.0

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def answers_while_loading(sock: Socket, options: ServerOptions) -> AsyncIterator[None]:
    """Answers every request at the listening socket with status 503; the socket stays open."""
    progress = _Progress()
    logging.getLogger("octavo").addHandler(progress)
    tls = None
    if options.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(options.tls_cert, options.tls_key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(progress.page() if b"text/html" in head.lower() else progress.response(head))
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                # Closing a connection with an unread body resets it, and the answer is lost.
                while await reader.read(_MAX_HEAD):
                    pass
        writer.close()

    # Unlike a server of asyncio it answers connections that are accepted, but have no transport yet, when it is closed.
    acceptor = Acceptor(
        sock, lambda: _LoadingProtocol(answer), limit=sys.maxsize, limit_by_address=sys.maxsize, tls=tls
    )
    acceptor.start()
    try:
        yield
    finally:
        acceptor.close()
        logging.getLogger("octavo").removeHandler(progress)


class _LoadingProtocol(asyncio.StreamReaderProtocol):
    def __init__(self, answer: Answer) -> None:
        super().__init__(asyncio.StreamReader(_MAX_HEAD), answer)
        self.closed = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed.set()


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

    def response(self, head: bytes) -> bytes:
        """The response to a program, in the format of the API that the path belongs to."""
        # Without octavo.server.http.errors, whose imports take longer than all of this.
        path = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
        if path and path[0].startswith((b"/v1/messages", b"/messages")):
            body: dict[str, Any] = {"type": "error", "error": {"type": "overloaded_error", "message": self._message}}
        else:
            error = {"message": self._message, "type": "server_error", "param": None, "code": "loading"}
            body = {"error": error}
        return _response(json.dumps(body).encode(), "application/json")

    def page(self) -> bytes:
        """The response to a browser, which reloads it after a second."""
        body = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1">'
            '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
            f"<title>Octavo is starting</title><h1>Octavo is starting</h1><p>{escape(self._message)}</p></html>"
        )
        return _response(body.encode(), "text/html; charset=utf-8", "Content-Security-Policy: default-src 'none'\r\n")


def _response(body: bytes, media_type: str, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {media_type}\r\nRetry-After: 1\r\n{headers}"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
