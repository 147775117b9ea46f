"""Messages between an executor and worker processes of one machine: one writer and many readers, and their answers.

A message is written once, to shared memory that all workers map, and a few bytes on each worker's socket say where it
lies. Answers come back on the same socket, in the order of the messages. The socket also tells each side that the other
has ended. The memory has no name in the file system, so that nothing of it is left behind, however a process ends.
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
from octavo.process.children import LocalConnections
from octavo.runner.loaded_model import Ranks, SharedMemoryLink

#: Messages that may be unanswered, and the bytes of each that are sent through shared memory.
SLOTS, SLOT_BYTES = 16, 1 << 20
#: Of a message: its slot, or ``_INLINE`` if it is longer than one and follows on the socket; its length.
_HEADER = struct.Struct("<IQ")
_INLINE = 0xFFFFFFFF
#: Of an answer: its kind, and its length.
_ANSWER = struct.Struct("<BQ")
#: A longer answer is refused; the logprobs of a long prompt are the longest.
MAX_ANSWER = 1 << 30


class Broadcast:
    """The executor's side.

    An exception within ``send`` or ``receive`` that is none of theirs, such as KeyboardInterrupt, loses the place in
    the stream of bytes: it must be held back, or be the end of the workers.
    """

    def __init__(self, sockets: Sequence[socket.socket], memory: int | None) -> None:
        """``sockets`` lead to the workers, by rank; ``memory`` is a ``shared_memory`` of ``SLOTS * SLOT_BYTES``.

        Without memory, with workers on other machines, messages follow on the sockets.
        """
        self._sockets = list(sockets)
        self._memory = None if memory is None else mmap.mmap(memory, SLOTS * SLOT_BYTES)
        self._sent = 0

    def send(self, message: bytes) -> None:
        """Sends a message to all workers; fewer than ``SLOTS`` may be unanswered.

        Raises:
            ConnectionError: a worker has ended.
        """
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
        """The next answer of a worker, of which some bytes have arrived: its kind and content.

        Raises:
            ConnectionError: the worker has ended.
        """
        connection = self._sockets[rank]
        kind, length = _ANSWER.unpack(_receive_exactly(connection, _ANSWER.size))
        if length > MAX_ANSWER:
            raise ConnectionError(f"an answer of {length} bytes is longer than the {MAX_ANSWER} that are allowed")
        return kind, _receive_exactly(connection, length)

    def wait(self, ranks: Sequence[int], timeout: float | None = None) -> list[int]:
        """Waits until at least one of these workers has answered or ended: which.

        Raises:
            TimeoutError: none has within ``timeout`` seconds.
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
        """Closes the sockets, which ends the workers that still run, and the memory."""
        for connection in self._sockets:
            connection.close()
        if self._memory is not None:
            self._memory.close()


class Receiver:
    """A worker's side."""

    def __init__(self, connection: socket.socket, memory: int | None) -> None:
        """``memory`` is the descriptor of the memory that ``Broadcast`` writes to, if it does."""
        self._socket = connection
        if memory is not None:
            self._memory = memoryview(mmap.mmap(memory, SLOTS * SLOT_BYTES, prot=mmap.PROT_READ))

    def next(self) -> memoryview | bytes:
        """The next message, valid until it is answered.

        Raises:
            ConnectionError: the executor has ended.
        """
        slot, length = _HEADER.unpack(_receive_exactly(self._socket, _HEADER.size))
        if slot == _INLINE:
            return _receive_exactly(self._socket, length)
        return self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + length]

    def has_next(self) -> bool:
        """Whether a message has arrived."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def answer(self, kind: int, content: bytes = b"") -> None:
        """Sends an answer."""
        self._socket.sendall(_ANSWER.pack(kind, len(content)) + content)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    """The next ``length`` bytes.

    Raises:
        ConnectionError: the other side has ended, or does not answer any more.
    """
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


# Connects a worker with the others of its network through the memory of one machine.

#: Seconds that a rank waits for the others to connect, and in a collective: long enough for one that loads weights.
TIMEOUT = 600.0


def connect_local(layout: ParallelLayout, connections: LocalConnections) -> Ranks:
    """Connections within one machine."""
    group = None
    if connections.group is not None:
        from octavo.kernels.cpu.backend import SharedMemoryCommunicator

        memory = mmap.mmap(connections.group, os.fstat(connections.group).st_size)
        size = layout.tensor_parallel_size
        group = SharedMemoryCommunicator(memory, layout.tp_rank, size, timeout=TIMEOUT)
    links = (_link(layout, ends) for ends in (connections.incoming, connections.outgoing))
    return Ranks(layout, group, *links)


def link_slots(layout: ParallelLayout) -> int:
    """Slots of a ``SharedMemoryLink``: a step for each stage may be in flight."""
    return layout.pipeline_parallel_size + 1


def _link(layout: ParallelLayout, ends: tuple[int, int] | None) -> SharedMemoryLink | None:
    if ends is None:
        return None
    memory, pipe = ends
    return SharedMemoryLink(mmap.mmap(memory, os.fstat(memory).st_size), link_slots(layout), pipe)


# How workers of other machines connect to their executor: both sides.

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
