"""Accepts connections: no more than there is room for, in all and from one address.

asyncio's own way to accept goes on trying when descriptors have run out, and logs each of some 3,000 failures a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from html import escape
from socket import socket as Socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.config.server_options import ServerOptions
from octavo.process.startup import LOADING
from octavo.server.http.middleware import network_of

# HTTP on one connection: uvicorn's protocol with a limit on the time that the head of a request may take.


class HttpProtocol(H11Protocol):
    """Owns one connection.

    Invariant: while no request of it is being answered, its client has ``header_timeout`` seconds to bring a whole
    head, counted from the first byte (of a new connection: from its beginning), or the rest of a body whose request
    was refused before. Between requests uvicorn's ``timeout_keep_alive`` holds.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout = header_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        #: Set when the connection has ended.
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_lost(exc)
        self._stop_timer()
        self.closed.set()

    def _watch_head(self) -> None:
        """To be called when bytes have come, which end the wait that ``timeout_keep_alive`` limits."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            # uvicorn's own way to end a connection that waits in vain.
            self._head_timer = self.loop.call_later(self._header_timeout, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


logger = logging.getLogger("octavo.server")

#: Descriptors that connections leave to everything else: files of models and adapters, processes, sockets to workers.
RESERVED_DESCRIPTORS = 64
#: Most connections that are accepted before the event loop turns to other things.
_ACCEPTS_AT_ONCE = 64
#: Seconds after which accepting is tried again although no connection has closed: descriptors may be others'.
_RETRY = 1.0
#: Seconds between two lines of the log about connections that found no room.
LOG_INTERVAL = 10.0


class Acceptor:
    """Owns the listening socket and the count of connections.

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
        """Takes over the listening socket. ``handshake_timeout``: seconds that the handshake of TLS may take."""
        self._sock = sock
        self._make_protocol = make_protocol
        self._limit = limit
        self._limit_by_address = limit_by_address
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()
        self._retry: asyncio.TimerHandle | None = None
        self._is_paused = self._is_closed = False
        self._next_line = 0.0
        #: Events that the log has not told of yet.
        self._untold = 0

    def start(self) -> None:
        """Accepts connections."""
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
            self._log(
                f"{client} has {self._limit_by_address} connections open (max_connections_per_address); further ones "
                "are closed"
            )
            return
        connection.setblocking(False)
        self._by_address[client] += 1
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(lambda _: self._release(task, client))

    async def _serve(self, connection: socket.socket) -> None:
        """Lives as long as the connection."""
        seconds = None if self._tls is None else self._handshake_timeout
        try:
            _, protocol = await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError as e:  # what a client does in the handshake
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
        """A line of the log at most every ``LOG_INTERVAL`` seconds, however often it happens."""
        self._untold += 1
        if (now := time.monotonic()) < self._next_line:
            return
        self._next_line = now + LOG_INTERVAL
        times, self._untold = self._untold, 0
        logger.warning("%s", line, extra={"fields": {"times": times}})


def connection_limits(options: ServerOptions) -> tuple[int, int]:
    """Most connections in all and from one address: what the options say, and descriptors allow."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = options.max_connections
    if allowed != resource.RLIM_INFINITY:
        room = max(1, allowed - len(os.listdir("/dev/fd")) - RESERVED_DESCRIPTORS)
        if room < most:
            logger.warning(
                "max_connections is %d here, not %d: the limit on open files (ulimit -n) is %d", room, most, allowed
            )
            most = room
    by_address = options.max_connections_per_address
    return most, max(1, most // 2) if by_address is None else by_address


# Answers while the model loads: 503 with how far the start is, so that no client takes the server for a dead one.

#: Bytes of a request's head that are waited for, and seconds that all of a connection may take.
_MAX_HEAD = 64 << 10
_TIMEOUT = 5.0

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def answers_while_loading(sock: Socket, options: ServerOptions) -> AsyncIterator[None]:
    """Answers every request at the socket, which listens, with status 503; the socket stays open."""
    progress = _LastLine()
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
                # A connection that is closed before its body has been read is reset, and the answer lost.
                while await reader.read(_MAX_HEAD):
                    pass
        writer.close()

    waiting = _Acceptor(sock, answer, tls)
    try:
        yield
    finally:
        waiting.close()
        logging.getLogger("octavo").removeHandler(progress)


class _Acceptor:
    """Accepts connections until it is closed; those that it has accepted are answered all the same.

    A server of asyncio leaves connections open, without an answer, whose transport is not made yet when it is closed.
    """

    def __init__(self, sock: Socket, answer: Answer, tls: ssl.SSLContext | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock, self._answer, self._tls = sock, answer, tls
        self._blocking = sock.getblocking()
        self._tasks: set[asyncio.Task[object]] = set()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        try:
            connection = self._sock.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # descriptors have run out: clients wait for the server
            self._loop.remove_reader(self._sock)
            return
        connection.setblocking(False)
        reader = asyncio.StreamReader(_MAX_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader, self._answer)
        task = asyncio.ensure_future(self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls))
        self._tasks.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # such as of a handshake of TLS that fails

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.setblocking(self._blocking)


class _LastLine(logging.Handler):
    """Remembers the last thing that the start said of the weights; other lines hold what keys are to protect."""

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
        """The response to any request of a program, by the head of which its API is known."""
        # Not by api_errors, whose imports take longer than all of this.
        path = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
        if path and path[0].startswith((b"/v1/messages", b"/messages")):
            body: dict[str, Any] = {"type": "error", "error": {"type": "overloaded_error", "message": self._message}}
        else:
            error = {"message": self._message, "type": "server_error", "param": None, "code": "loading"}
            body = {"error": error}
        return _response(json.dumps(body).encode(), "application/json")

    def page(self) -> bytes:
        """The response to a browser, which asks again after a second."""
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
