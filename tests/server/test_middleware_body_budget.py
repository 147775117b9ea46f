"""The bodies of all requests together: what they take is bounded, for one client and in all, and is given back."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octavo.config.sources import resolve_server_options
from octavo.server.http.errors import ApiError
from octavo.server.http.middleware import BodyBudget, BodyLimitMiddleware, HeldBody, make_budget
from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import Running, Serve

ADDRESS = "127.0.0.1"


def test_a_budget_counts_bodies_by_client_and_in_all() -> None:
    budget = BodyBudget(100, 60)
    first, second = HeldBody(budget, "a"), HeldBody(budget, "a")
    first.grow_to(40)
    second.grow_to(20)
    with pytest.raises(ApiError) as caught:
        second.grow_to(21)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    assert (budget.total, second.size) == (60, 20)
    other = HeldBody(budget, "b")
    other.grow_to(40)
    other.grow_to(10)  # never less, while both forms of it exist
    with pytest.raises(ApiError) as caught:
        other.grow_to(41)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1")
    with pytest.raises(ApiError):
        budget.check("b", 1)
    first.release()
    first.release()
    other.grow_to(60)
    for held in (second, other):
        held.release()
    assert budget.total == 0 and not budget.by_client


def test_threads_count_together() -> None:
    budget = BodyBudget(1 << 30, 1 << 30)

    def work() -> None:
        for _ in range(2000):
            held = HeldBody(budget, "a")
            for size in range(1, 5):
                held.grow_to(size)
            held.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.total == 0 and not budget.by_client


def test_the_largest_body_has_room_by_default() -> None:
    def budget(largest: int, **values: Any) -> tuple[int, int]:
        made = make_budget(resolve_server_options(values, environ={}), largest)
        return made.max_bytes, made.max_bytes_per_client

    assert budget(65 << 20) == (512 << 20, 256 << 20)
    assert budget(1 << 30) == (4 << 30, 2 << 30)
    assert budget(65 << 20, max_body_bytes_total="1GiB") == (1 << 30, 1 << 29)
    assert budget(65 << 20, max_body_bytes_total=5000, max_body_bytes_per_client=9000) == (5000, 5000)


# --- the middleware -------------------------------------------------------------------------------------------------


class Guarded:
    """An application behind the middleware, which answers when it is told to."""

    def __init__(self, budget: BodyBudget, max_bytes: int = 1000) -> None:
        self.budget, self.go, self.reached = budget, asyncio.Event(), 0
        self._app = BodyLimitMiddleware(self._answer, max_bytes, PATIENCE, budget, {"/upload": 5000})
        self.go.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        self.reached += 1
        await self.go.wait()
        await JSONResponse(len(body))(scope, receive, send)

    async def post(
        self, content: Any, path: str = "/", client: str = ADDRESS, headers: dict[str, str] | None = None
    ) -> Response:
        transport = httpx.ASGITransport(self._app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            return await http.post(path, content=content, headers=headers)  # type: ignore[return-value]


def statuses(answers: list[Any]) -> list[int]:
    return sorted(answer.status_code for answer in answers)


async def waiting(guarded: Guarded, number: int) -> None:
    while guarded.reached < number:
        await asyncio.sleep(0)


def test_bodies_count_until_they_are_answered() -> None:
    async def check() -> None:
        guarded = Guarded(BodyBudget(3000, 2000))
        guarded.go.clear()
        begun = [asyncio.ensure_future(guarded.post(bytes(900))) for _ in range(2)]
        await waiting(guarded, 2)
        refused: Any = await guarded.post(bytes(900))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_body_bytes")
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        begun.append(asyncio.ensure_future(guarded.post(bytes(900), client="127.0.0.2")))
        await waiting(guarded, 3)
        refused = await guarded.post(bytes(900), client="127.0.0.3")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_body_bytes")
        guarded.go.set()
        assert statuses(await asyncio.gather(*begun)) == [200] * 3
        assert guarded.budget.total == 0 and (await guarded.post(bytes(900))).status_code == 200

    asyncio.run(check())


def test_a_body_counts_as_what_has_come_of_it() -> None:
    """Without a length, and one that says to be large; those that end in the middle give back what they had."""

    async def check() -> None:
        guarded, come = Guarded(BodyBudget(3000, 2000)), asyncio.Event()

        async def pieces(count: int) -> AsyncIterator[bytes]:
            for _ in range(count):
                yield bytes(100)
            come.set()
            await asyncio.sleep(PATIENCE)

        dripping = asyncio.ensure_future(guarded.post(pieces(9), headers={"content-length": "1000"}))
        await come.wait()
        assert 0 < guarded.budget.total <= 900
        both = await asyncio.gather(*(guarded.post(bytes(1000)) for _ in range(2)))
        assert statuses(list(both)) in ([200, 200], [200, 429])
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        assert guarded.budget.total == 0

    asyncio.run(check())


def test_a_compressed_body_counts_as_what_it_becomes() -> None:
    async def check() -> None:
        guarded = Guarded(BodyBudget(3000, 2000))
        guarded.go.clear()
        packed, headers = gzip.compress(bytes(950)), {"content-encoding": "gzip"}
        begun = [asyncio.ensure_future(guarded.post(packed, headers=headers)) for _ in range(2)]
        await waiting(guarded, 2)
        assert guarded.budget.total == 1900
        assert (await guarded.post(packed, headers=headers)).status_code == 429
        guarded.go.set()
        assert statuses(await asyncio.gather(*begun)) == [200, 200] and guarded.budget.total == 0

    asyncio.run(check())


def test_a_body_that_never_fits_is_too_large() -> None:
    async def check() -> None:
        refused: Any = await Guarded(BodyBudget(3000, 2000)).post(bytes(2500), path="/upload")
        assert refused.status_code == 413 and "max_body_bytes_per_client" in refused.json()["error"]["message"]

    asyncio.run(check())


# --- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frugal(tiny_model: Path, start_module_server: Serve) -> Running:
    flags = ("--max-body-bytes-total", "40MiB", "--max-body-bytes-per-client", "20MiB", "--max-body-bytes", "16777216")
    return start_module_server(tiny_model, *flags)


def resident(server: Running) -> int:
    """Bytes of the server's process in memory."""
    with open(f"/proc/{server.process.pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions", "/nothing"])
def test_uploads_that_do_not_end_take_no_more_than_the_budget(frugal: Running, path: str) -> None:
    """30 connections send all but the end of 15 MB each."""
    before, size = resident(frugal), 15 << 20
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    with ExitStack() as stack:
        seen: list[bytes] = []

        def send() -> None:
            connection = stack.enter_context(socket.create_connection(frugal.address, PATIENCE))
            with suppress(OSError):  # it is refused before the end
                connection.sendall(head.encode() + bytes(size - 1))
            connections.append(connection)

        connections: list[socket.socket] = []
        threads = [threading.Thread(target=send) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        most = resident(frugal) - before
        for connection in connections:
            connection.setblocking(False)
            try:
                seen.append(connection.recv(12)[9:])
            except OSError:  # it waits for the rest, or was reset as it sent what nobody reads
                seen.append(b"")
        assert set(seen) <= {b"429", b""} and seen.count(b"") >= 1
        assert most < 100 << 20  # the budget, twice while bodies grow, and buffers of sockets
    with frugal.http() as client:
        eventually(lambda: client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200)


def test_uploads_beyond_the_budget_are_told_when_to_come_again(frugal: Running) -> None:
    """A body that waits for its end holds the client's share."""
    size = 12 << 20
    with socket.create_connection(frugal.address, PATIENCE) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + bytes(size - 1))
        with frugal.http() as client:

            def refused() -> bool:
                answer = client.post("/v1/completions", content=bytes(9 << 20))
                assert answer.status_code in (400, 429)
                return answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_body_bytes"

            eventually(refused)
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    other = http.client.HTTPConnection(*frugal.address, timeout=PATIENCE)
    packed = gzip.compress(b" " * (15 << 20))
    kinds = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    def is_served() -> bool:
        other.request("POST", "/v1/completions", packed, kinds)
        answer = other.getresponse()
        answer.read()
        return answer.status == 400  # no JSON: it was read

    eventually(is_served)
    other.close()
