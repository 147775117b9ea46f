"""Messages between an executor and worker processes of one machine: one writer and many readers, and their answers.

A message is written once, to shared memory that all workers map, and a few bytes on each worker's socket say where it
lies. Answers come back on the same socket, in the order of the messages. The socket also tells each side that the other
has ended. The memory has no name in the file system, so that nothing of it is left behind, however a process ends.
"""

from __future__ import annotations

import mmap
import select
import socket
import struct
from collections.abc import Sequence

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
