"""Channels between processes: messages of an executor to its workers (``Broadcast``), links between workers.

A message is written once, to shared memory that all workers map (vLLM's ``MessageQueue``); a few bytes on each worker's
socket give its place. Answers come back on the same socket, in order. The socket also tells each side that the other
has ended. The memory has no name in the file system, so it never outlives the processes.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.config.options import ParallelLayout
from octavo.core.errors import EngineDeadError
from octavo.process.start_process import LocalConnections
from octavo.runner.loaded_model import Ranks, SharedMemoryLink

#: Maximum number of unanswered messages, and bytes of the largest message that goes through shared memory.
SLOTS, SLOT_BYTES = 16, 1 << 20
#: Before a message: its slot, or ``_INLINE`` if it does not fit and follows on the socket; its length.
_HEADER = struct.Struct("<IQ")
_INLINE = 0xFFFFFFFF
_ANSWER = struct.Struct("<BQ")
#: Maximum length of an answer; the longest are logprobs of long prompts.
MAX_ANSWER = 1 << 30


class Broadcast:
    """The executor's side.

    After a foreign exception within ``send`` or ``receive``, such as KeyboardInterrupt, the place in the stream is
    lost: hold such exceptions back, or end the workers.
    """

    def __init__(self, sockets: Sequence[socket.socket], memory: int | None) -> None:
        """``sockets``: by rank; ``memory``: ``shared_memory`` of ``SLOTS * SLOT_BYTES``, None for other machines."""
        self._sockets = list(sockets)
        self._memory = None if memory is None else mmap.mmap(memory, SLOTS * SLOT_BYTES)
        self._sent = 0

    def send(self, message: bytes) -> None:
        """Sends a message to all workers; fewer than ``SLOTS`` may be unanswered. ConnectionError: one has ended."""
        slot = self._sent % SLOTS
        self._sent += 1
        if self._memory is not None and len(message) <= SLOT_BYTES:
            start = slot * SLOT_BYTES
            self._memory[start : start + len(message)] = message
            data = _HEADER.pack(slot, len(message))
        else:
            data = _HEADER.pack(_INLINE, len(message)) + message
        try:
            for connection in self._sockets:
                connection.sendall(data)
        except OSError as e:
            raise ConnectionError(str(e)) from None

    def receive(self, rank: int) -> tuple[int, bytes]:
        """The kind and content of a worker's next answer, which has begun to arrive. ConnectionError: it has ended."""
        connection = self._sockets[rank]
        kind, length = _ANSWER.unpack(_receive_exactly(connection, _ANSWER.size))
        if length > MAX_ANSWER:
            raise ConnectionError(f"an answer of {length} bytes is longer than the {MAX_ANSWER} that are allowed")
        return kind, _receive_exactly(connection, length)

    def wait(self, ranks: Sequence[int], timeout: float | None = None) -> list[int]:
        """Waits until at least one of these workers has answered or ended: their ranks.

        Raises:
            TimeoutError: no worker has within ``timeout`` seconds.
        """
        poll = select.poll()
        by_descriptor = {self._sockets[rank].fileno(): rank for rank in ranks}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1e3)
        if not ready:
            raise TimeoutError
        return [by_descriptor[descriptor] for descriptor, _ in ready]

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        if self._memory is not None:
            self._memory.close()


class Receiver:
    """A worker's side."""

    def __init__(self, connection: socket.socket, memory: int | None) -> None:
        self._socket = connection
        if memory is not None:
            self._memory = memoryview(mmap.mmap(memory, SLOTS * SLOT_BYTES, prot=mmap.PROT_READ))

    def next(self) -> memoryview | bytes:
        """The next message, valid until it is answered. ConnectionError: the executor has ended."""
        slot, length = _HEADER.unpack(_receive_exactly(self._socket, _HEADER.size))
        if slot == _INLINE:
            return _receive_exactly(self._socket, length)
        return self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + length]

    def has_next(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def answer(self, kind: int, content: bytes = b"") -> None:
        self._socket.sendall(_ANSWER.pack(kind, len(content)) + content)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    try:
        while len(data) < length:
            received = connection.recv(min(length - len(data), 1 << 20))
            if not received:
                raise ConnectionError("the other side has ended")
            if len(received) == length:
                return received
            data += received
    except OSError as e:
        raise ConnectionError(str(e)) from None
    return bytes(data)


# --- links between the workers of one machine -------------------------------------------------------------------------

#: Seconds that a rank waits for others to connect, and in a collective: long enough to load weights.
TIMEOUT = 600.0


def connect_local(layout: ParallelLayout, connections: LocalConnections) -> Ranks:

    def link(ends: tuple[int, int] | None) -> SharedMemoryLink | None:
        if ends is None:
            return None
        memory, pipe = ends
        return SharedMemoryLink(mmap.mmap(memory, os.fstat(memory).st_size), link_slots(layout), pipe)

    group = None
    if connections.group is not None:
        from octavo.kernels.cpu.backend import SharedMemoryCommunicator

        memory = mmap.mmap(connections.group, os.fstat(connections.group).st_size)
        size = layout.tensor_parallel_size
        group = SharedMemoryCommunicator(memory, layout.tp_rank, size, timeout=TIMEOUT)
    return Ranks(layout, group, link(connections.incoming), link(connections.outgoing))


def link_slots(layout: ParallelLayout) -> int:
    """Slots of a ``SharedMemoryLink``: one step per stage may be in flight."""
    return layout.pipeline_parallel_size + 1


# --- connections of workers on other machines to their executor -------------------------------------------------------

#: Bytes of the secret that a worker sends when it connects, followed by its rank.
SECRET_BYTES = 32
_RANK_BYTES = 4
#: Seconds for all workers to connect, and for a connection to send the secret.
CONNECT_TIMEOUT, GREETING_TIMEOUT = 120.0, 5.0
#: Maximum number of connections without a secret; the oldest one is closed.
_MAX_SILENT = 64


def connect(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
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
    """The executor's side: accepts connections of workers 0 to ``count`` - 1, with the right secret.

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
            for connection, sent in greetings.wait(end):
                rank = int.from_bytes(sent[SECRET_BYTES:], "little")
                if hmac.compare_digest(sent[:SECRET_BYTES], secret) and rank in missing:
                    connection.setblocking(True)
                    _configure(connection)
                    workers[rank] = connection
                else:
                    connection.close()
    return [workers[rank] for rank in range(count)]


@dataclass(eq=False)
class _Greeting:
    """The bytes that a connection has sent, and its deadline for all of them."""

    connection: socket.socket
    end: float
    received: bytearray = field(default_factory=bytearray)


class _Greetings:
    """Owns the connections without a secret so far; closes those that take too long, and all at its end."""

    def __init__(self, server: socket.socket, timeout: float) -> None:
        self._server, self._timeout = server, timeout
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
        """Waits for an event, or until ``end``: the connections that have sent secret and rank, and these bytes."""
        now = time.monotonic()
        for greeting in [each for each in self._silent if each.end <= now]:
            self._forget(greeting).close()
        first = min([end, *(greeting.end for greeting in self._silent)])
        shown = []
        for key, _ in self._selector.select(max(0.0, first - now)):
            if key.data is None:
                with contextlib.suppress(OSError):  # it has left already
                    connection, _ = self._server.accept()
                    connection.setblocking(False)
                    greeting = _Greeting(connection, time.monotonic() + self._timeout)
                    self._silent.append(greeting)
                    self._selector.register(connection, selectors.EVENT_READ, greeting)
                    if len(self._silent) > _MAX_SILENT:
                        self._forget(self._silent[0]).close()
            elif key.data in self._silent and self._read(key.data):
                shown.append((self._forget(key.data), bytes(key.data.received)))
        return shown

    def _read(self, greeting: _Greeting) -> bool:
        try:
            data = greeting.connection.recv(SECRET_BYTES + _RANK_BYTES - len(greeting.received))
        except OSError:
            data = b""
        if not data:
            self._forget(greeting).close()
            return False
        greeting.received += data
        return len(greeting.received) == SECRET_BYTES + _RANK_BYTES

    def _forget(self, greeting: _Greeting) -> socket.socket:
        self._silent.remove(greeting)
        self._selector.unregister(greeting.connection)
        return greeting.connection


def _configure(connection: socket.socket) -> None:
    """Sends small messages at once, and detects the loss of the other machine within seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
