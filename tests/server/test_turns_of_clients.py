"""What clients send to be compiled or rendered counts in the queue, takes turns, and is dropped when they leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from octavo.core.errors import ClientLimitError, SandboxError
from octavo.server.http.errors import as_api_error
from octavo.server.http.middleware import client_of
from tests.busy_machine import PATIENCE
from tests.server.running_server import Running, Serve

CHAT = "/v1/chat/completions"
MOST_QUEUED = 8
#: Minutes of compiling, minutes of rendering.
SLOW = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20)]}
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": SLOW}}},
}

SLOW_ONES: dict[str, dict[str, Any]] = {
    "forms": {"guided_json": SLOW},
    "tools": {"tools": [TOOL], "tool_choice": "required", "chat_template": "{% if tools %}hi{% endif %}"},
    "streams": {"guided_json": SLOW, "stream": True},
}


@pytest.fixture(scope="module")
def server(tiny_model: Path, start_module_server: Serve) -> Running:
    flags = ["--max-queued-requests", str(MOST_QUEUED), "--structured-outputs-compile-seconds", "1000"]
    flags += ["--sandbox-seconds-per-client", "2", "--trust-request-chat-template"]
    keys = ",".join([*SLOW_ONES, "b", "c", "d"])
    return start_module_server(tiny_model, *flags, env={"OCTAVO_API_KEYS": keys})


@contextlib.asynccontextmanager
async def client(server: Running, key: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE, limits=limits) as http:
        yield http


async def ask(http: httpx.AsyncClient, **given: Any) -> httpx.Response:
    return await http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **given})


async def small(http: httpx.AsyncClient, number: int) -> int:
    return (await ask(http, guided_regex=f"[a-z]{{{number}}}", max_tokens=8)).status_code


async def until_accepted(http: httpx.AsyncClient) -> None:
    """Waits until the queue has room."""
    end = time.monotonic() + PATIENCE
    while (status := (await ask(http)).status_code) != 200:
        assert status == 429 and time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", [*SLOW_ONES])
def test_one_client_fills_its_places_and_holds_up_no_other(server: Running, kind: str) -> None:
    async def test() -> None:
        async with client(server, kind) as a, client(server, "b") as b:

            def slow(number: int) -> asyncio.Task[httpx.Response]:
                given = SLOW_ONES[kind]
                if "guided_json" in given:
                    given = {**given, "guided_json": {**SLOW, "title": f"{kind} {number}"}}
                if "tools" in given:
                    given = {**given, "tools": [{**TOOL, "function": {**TOOL["function"], "name": f"f{number}"}}]}
                return asyncio.create_task(ask(a, **given))

            tasks = [slow(i) for i in range(MOST_QUEUED - 1)]
            for number in range(1, 4):
                assert await small(b, number) == 200
            assert not any(task.done() for task in tasks)
            more = [slow(100 + i) for i in range(10)]
            while sum(task.done() for task in more) < 9:
                await asyncio.sleep(0.01)
            refused = [task.result() for task in more if task.done()]
            assert {answer.status_code for answer in refused} == {429}
            assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
            for task in [*tasks, *more]:
                task.cancel()
            await asyncio.gather(*tasks, *more, return_exceptions=True)
            await until_accepted(b)

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@pytest.mark.slow
def test_endless_templates_hold_up_no_other_client_and_take_the_seconds_of_theirs(server: Running) -> None:
    async def test() -> None:
        async with client(server, "c") as c, client(server, "d") as d:
            endless = [asyncio.create_task(ask(c, chat_template=ENDLESS)) for _ in range(6)]
            for _ in range(3):
                assert (await ask(d)).status_code == (await ask(d, chat_template="hi")).status_code == 200
            assert not all(task.done() for task in endless)
            answers = await asyncio.gather(*endless)
            assert {answer.status_code for answer in answers} == {400, 429}
            answer = await ask(c, guided_regex="new+", max_tokens=8)
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "client_limit"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert await small(d, 9) == 200 and (await ask(c)).status_code == 200

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_a_client_is_an_api_key_or_an_address() -> None:
    def sent(address: str, **state: str) -> str:
        return client_of(Request({"type": "http", "client": (address, 1), "state": state}))

    assert sent("10.0.0.1") != sent("10.0.0.2")
    assert sent("10.0.0.1", api_key="x") == sent("10.0.0.2", api_key="x") == "x"
    assert sent("2001:db8::1") == sent("2001:db8::ffff:2") != sent("2001:db8:0:1::1")
    assert sent("fe80::1%eth0") == sent("fe80::2")
    assert sent("::ffff:10.0.0.1") == sent("10.0.0.1") != sent("::ffff:10.0.0.2")
    assert client_of(Request({"type": "http", "client": None})) == ""


def test_what_the_sandbox_could_not_finish_is_the_servers_fault() -> None:
    error = as_api_error(SandboxError("processes were killed"))
    assert (error.status, error.kind, error.code) == (503, "server_error", "sandbox_failed")
    assert int((error.headers or {})["Retry-After"]) > 0


def test_a_limit_of_a_client_is_answered_as_a_full_queue_is() -> None:
    error = as_api_error(ClientLimitError("enough", 7))
    assert (error.status, error.code, error.headers) == (429, "client_limit", {"Retry-After": "7"})
