"""Workers connect to their executor while strangers knock at the same port."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from octavo.core.errors import EngineDeadError
from octavo.executor.channels import SECRET_BYTES, accept, connect

SECRET = secrets.token_bytes(SECRET_BYTES)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        yield made


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def ends(connection: socket.socket) -> bool:
    """Whether the other side closes the connection."""
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_workers_are_connected_by_rank_past_strangers_of_every_kind(server: socket.socket) -> None:
    address = server.getsockname()
    silent = [socket.create_connection(address) for _ in range(100)]
    gone = socket.create_connection(address)
    gone.close()
    wrong = socket.create_connection(address)
    wrong.sendall(b"GET / HTTP/1.1\r\nHost: a-name-that-fills-it\r\n\r\n")
    half = socket.create_connection(address)
    half.sendall(SECRET[:-1])
    no_rank = connect(address, SECRET, 7)
    workers: dict[int, socket.socket] = {}

    def work() -> None:
        for rank in (2, 0, 1):
            workers[rank] = connect(address, SECRET, rank)

    thread = beside(work)
    found = accept(server, SECRET, 3, timeout=60)
    thread.join()
    for rank, connection in enumerate(found):
        connection.sendall(bytes([rank]))
        assert workers[rank].recv(1) == bytes([rank])
    assert all(ends(stranger) for stranger in (wrong, half, no_rank, *silent)), "no connection is left behind"
    for connection in [*found, *workers.values()]:
        connection.close()


def test_a_secret_that_arrives_in_pieces_is_a_secret(server: socket.socket) -> None:
    worker = socket.create_connection(server.getsockname())

    def work() -> None:
        for byte in SECRET + (0).to_bytes(4, "little"):
            worker.sendall(bytes([byte]))

    thread = beside(work)
    (found,) = accept(server, SECRET, 1, timeout=60)
    thread.join()
    found.sendall(b"x")
    assert worker.recv(1) == b"x"
    found.close()
    worker.close()


def test_a_stranger_is_let_go_after_its_time_while_others_are_waited_for(server: socket.socket) -> None:
    stranger = socket.create_connection(server.getsockname())
    late: list[socket.socket] = []

    def work() -> None:
        assert ends(stranger)
        late.append(connect(server.getsockname(), SECRET, 0))

    thread = beside(work)
    found = accept(server, SECRET, 1, timeout=60, greeting_timeout=0.05)
    thread.join()
    for connection in [*found, *late, stranger]:
        connection.close()


def test_workers_that_do_not_come_are_named(server: socket.socket) -> None:
    port = server.getsockname()[1]
    came, stranger = connect(server.getsockname(), SECRET, 1), socket.create_connection(server.getsockname())
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"workers \[0, 2\] have not connected to 127.0.0.1 port {port} within"):
        accept(server, SECRET, 3, timeout=0.3)
    assert time.monotonic() - start >= 0.3
    assert ends(came) and ends(stranger)
