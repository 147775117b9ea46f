"""Accepts connections: no more than there is room for, in all and from one address.

asyncio's own way to accept goes on trying when descriptors have run out, and logs each of some 3,000 failures a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from octavo.core.server_options import ServerOptions
from octavo.server.http_protocol import HttpProtocol
from octavo.server.middleware import network_of

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
