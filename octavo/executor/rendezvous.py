"""How workers of other machines connect to their executor: both sides.

The port is open to the whole network while workers connect, so a worker shows a secret that it got by other means.
Whoever shows nothing, or something else, is a stranger: it is let go and delays nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from dataclasses import dataclass, field

from octavo.core.errors import EngineDeadError

#: Bytes of the secret that a worker shows when it connects; its rank follows.
SECRET_BYTES = 32
_RANK_BYTES = 4
#: Seconds that all workers together have to connect, and that each has to show the secret, which it sends at once.
CONNECT_TIMEOUT, GREETING_TIMEOUT = 120.0, 5.0
#: Connections that may be silent at once, beyond which the first of them goes.
_MAX_SILENT = 64


def connect(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """The worker's side: its connection to the executor."""
    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT)
    connection.settimeout(None)
    _configure(connection)
    connection.sendall(secret + rank.to_bytes(_RANK_BYTES, "little"))
    return connection


def accept(
    server: socket.socket,
    secret: bytes,
    count: int,
    timeout: float = CONNECT_TIMEOUT,
    greeting_timeout: float = GREETING_TIMEOUT,
) -> list[socket.socket]:
    """The executor's side: the connections of workers 0 to ``count`` - 1, which ``server`` listens for.

    Raises:
        EngineDeadError: not all have connected within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    workers: dict[int, socket.socket] = {}
    with _Greetings(server, greeting_timeout) as greetings:
        while missing := sorted(set(range(count)) - set(workers)):
            if time.monotonic() >= end:
                for worker in workers.values():
                    worker.close()
                host, port = server.getsockname()[:2]
                raise EngineDeadError(
                    f"workers {missing} have not connected to {host} port {port} within {timeout:g} s: the machines "
                    "must reach each other"
                )
            for connection, said in greetings.wait(end):
                rank = int.from_bytes(said[SECRET_BYTES:], "little")
                if hmac.compare_digest(said[:SECRET_BYTES], secret) and rank in missing:
                    connection.setblocking(True)
                    _configure(connection)
                    workers[rank] = connection
                else:
                    connection.close()
    return [workers[rank] for rank in range(count)]


@dataclass(eq=False)
class _Greeting:
    """What a connection has said so far, and until when it must have said it all."""

    connection: socket.socket
    end: float
    said: bytearray = field(default_factory=bytearray)


class _Greetings:
    """Owns the connections that have not shown who they are; closes those that take too long, and all at its end."""

    def __init__(self, server: socket.socket, timeout: float) -> None:
        self._server, self._timeout = server, timeout
        #: In the order in which they came.
        self._silent: list[_Greeting] = []
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Greetings:
        return self

    def __exit__(self, *exception: object) -> None:
        for greeting in list(self._silent):
            self._forget(greeting).close()
        self._selector.close()

    def wait(self, end: float) -> list[tuple[socket.socket, bytes]]:
        """Waits until something happens, or ``end``: connections that have shown who they are, and what they said."""
        now = time.monotonic()
        for greeting in [each for each in self._silent if each.end <= now]:
            self._forget(greeting).close()
        first = min([end, *(greeting.end for greeting in self._silent)])
        shown = []
        for key, _ in self._selector.select(max(0.0, first - now)):
            if key.data is None:
                self._accept()
            elif key.data in self._silent and self._read(key.data):
                shown.append((self._forget(key.data), bytes(key.data.said)))
        return shown

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            connection, _ = self._server.accept()
            connection.setblocking(False)
            greeting = _Greeting(connection, time.monotonic() + self._timeout)
            self._silent.append(greeting)
            self._selector.register(connection, selectors.EVENT_READ, greeting)
            if len(self._silent) > _MAX_SILENT:
                self._forget(self._silent[0]).close()

    def _read(self, greeting: _Greeting) -> bool:
        """Takes what has come: whether that is all. A connection that has ended is closed."""
        try:
            data = greeting.connection.recv(SECRET_BYTES + _RANK_BYTES - len(greeting.said))
        except OSError:
            data = b""
        if not data:
            self._forget(greeting).close()
            return False
        greeting.said += data
        return len(greeting.said) == SECRET_BYTES + _RANK_BYTES

    def _forget(self, greeting: _Greeting) -> socket.socket:
        self._silent.remove(greeting)
        self._selector.unregister(greeting.connection)
        return greeting.connection


def _configure(connection: socket.socket) -> None:
    """Small messages leave at once, and the loss of the machine at the other end is noticed within seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
