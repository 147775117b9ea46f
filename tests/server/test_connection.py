"""Connections: how many there may be, and how long one may wait for the head of a request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.config.server_options import ServerOptions
from octavo.server.http import connection as listener
from octavo.server.http.connection import Acceptor, HttpProtocol, connection_limits, network_of
from tests.busy_machine import PATIENCE
from tests.server.running_server import Running

REFUSED_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\nx"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body; /slow a little later."""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def accepting(
    limit: int = 100,
    limit_by_address: int = 100,
    header_timeout: float = PATIENCE,
    wrapped: Callable[[socket.socket], Any] = lambda sock: sock,
) -> AsyncIterator[int]:
    """The port of a server for the time of a block."""
    config, state = uvicorn.Config(app, log_config=None, access_log=False), ServerState()
    config.load()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        acceptor = Acceptor(
            wrapped(sock),
            lambda: HttpProtocol(config, state, {}, header_timeout=header_timeout),
            limit=limit,
            limit_by_address=limit_by_address,
        )
        acceptor.start()
        try:
            async with asyncio.timeout(PATIENCE):
                yield sock.getsockname()[1]
        finally:
            acceptor.close()
            for connection in list(state.connections):
                connection.transport.close()


async def connect(port: int, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes = GET) -> bool:
    """Whether a request is answered; the connection stays open."""
    writer.write(request)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        return head.startswith(b"HTTP/1.1 200") and await reader.readexactly(2) == b"ok"
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return False


async def drips(writer: asyncio.StreamWriter) -> None:
    """A byte from time to time, without end."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: ",
        GET + b"GET / HT",
        REFUSED_BODY,
    ],
    ids=["nothing", "a part", "a part of the second", "a body that nobody wants"],
)
@pytest.mark.parametrize("dripping", [False, True])
def test_a_connection_whose_head_does_not_come_is_closed(begun: bytes, dripping: bool) -> None:
    async def check() -> None:
        async with accepting(header_timeout=0.2) as port:
            reader, writer = await connect(port)
            writer.write(begun)
            if b"\r\n\r\n" in begun:
                await reader.readuntil(b"ok")
                writer.write(b"GET")  # on a connection that is kept open the time begins with the first byte
            more = asyncio.ensure_future(drips(writer) if dripping else asyncio.sleep(0))
            with contextlib.suppress(ConnectionError):
                assert not await reader.read()
            more.cancel()
            writer.close()

    asyncio.run(check())


def test_the_time_for_heads_is_not_that_for_answers_nor_for_idle_connections() -> None:
    async def check() -> None:
        async with accepting(header_timeout=0.2) as port:
            reader, writer = await connect(port)
            assert await ask(reader, writer, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.4)
            assert await ask(reader, writer)
            writer.close()

    asyncio.run(check())


def test_further_connections_wait_until_one_closes() -> None:
    async def check() -> None:
        async with accepting(limit=2) as port:
            first, second, third = [await connect(port) for _ in range(3)]
            assert await ask(*first) and await ask(*second)
            waiting = asyncio.ensure_future(ask(*third))
            await asyncio.sleep(0.2)
            assert not waiting.done() and await ask(*first)
            second[1].close()
            assert await waiting
            for _, writer in (first, third):
                writer.close()

    asyncio.run(check())


def test_one_address_cannot_have_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with accepting(limit_by_address=1) as port:
            first = await connect(port)
            assert await ask(*first)
            for _ in range(5):
                refused = await connect(port)
                assert not await ask(*refused)
                refused[1].close()
            other = await connect(port, "127.0.0.2")
            assert await ask(*other) and await ask(*first)
            first[1].close()
            while not await ask(*(again := await connect(port))):  # once the server has noticed
                again[1].close()
            for _, writer in (other, again):
                writer.close()

    with caplog.at_level(logging.WARNING, "octavo.server"):
        asyncio.run(check())
    [line] = caplog.messages
    assert "127.0.0.1 has 1 connections" in line and "max_connections_per_address" in line


class Exhausted:
    """A listening socket whose process has no descriptor left until one is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_exhausted = False
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> Any:
        self.tries += 1
        if self.is_exhausted:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


def test_without_descriptors_nothing_is_accepted_until_one_is_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(retry: bool) -> None:
        made: list[Exhausted] = []
        monkeypatch.setattr(listener, "_RETRY", 0.05 if retry else PATIENCE)

        def wrapped(sock: socket.socket) -> Exhausted:
            made.append(Exhausted(sock))
            return made[0]

        async with accepting(wrapped=wrapped) as port:
            first = await connect(port)
            assert await ask(*first)
            made[0].is_exhausted, made[0].tries = True, 0
            waiting = asyncio.ensure_future(ask(*(second := await connect(port))))
            await asyncio.sleep(0.2)
            assert not waiting.done() and made[0].tries <= (10 if retry else 1)
            made[0].is_exhausted = False
            if not retry:
                first[1].close()
            assert await waiting
            for _, writer in (first, second):
                writer.close()

    for retry in (True, False):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "octavo.server"):
            asyncio.run(check(retry))
        assert len(caplog.messages) == 1 and "Too many open files" in caplog.messages[0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_addresses_of_one_client(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_limits_fit_the_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(listener.resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))
    assert connection_limits(ServerOptions()) == (8192, 4096)
    assert connection_limits(ServerOptions(max_connections=10, max_connections_per_address=10)) == (10, 10)
    assert not caplog.messages
    monkeypatch.setattr(listener.resource, "getrlimit", lambda kind: (1024, 1024))
    most, by_address = connection_limits(ServerOptions())
    assert 0 < most < 1024 - listener.RESERVED_DESCRIPTORS and by_address == most // 2
    assert "ulimit -n" in caplog.text


def test_a_request_with_two_ends_is_refused(tiny_server: Running) -> None:
    """What follows the end that ``Content-Length`` tells must not be taken for a request."""
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    with socket.create_connection(tiny_server.address, timeout=PATIENCE) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_framing" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
