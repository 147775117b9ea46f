"""Bodies with very much in them: refused by its count, read beside the event loop, answered as others are."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import field_validator
from starlette.applications import Starlette
from starlette.requests import Request

from octavo.server.fields import Int, RequestModel
from octavo.server.http.bodies import LARGE, MAX_ENTRIES, MAX_PARTS, check_size, run_in_thread_if_large
from octavo.server.http.errors import ApiError, handle_errors
from octavo.server.http.routing import ApiRoute
from tests.busy_machine import PATIENCE, held_up
from tests.server.running_server import Running

ITEM = {"role": "user", "content": "a"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a\\",[]{}:é\n'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a\\"{,', max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """Texts, objects and lists in a value; and entries of lists and objects but for the first of each."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [counted(entry) for entry in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    return 1 + names + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(entries for _, entries in inner)


@settings(max_examples=20)
@given(VALUES, st.booleans())
def test_what_is_counted_is_what_a_parser_makes(value: Any, ascii_only: bool) -> None:
    parts, entries = counted(value)
    padding = [""] * (MAX_PARTS - 1 - parts)  # as many texts as there is room for, and the list that holds all
    body = json.dumps([value, *padding], ensure_ascii=ascii_only).encode()
    room = entries + len(padding)
    check_size(body, room)
    with pytest.raises(ApiError, match="entries"):
        check_size(body, room - 1)
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS} texts"):
        check_size(json.dumps([value, "", *padding], ensure_ascii=ascii_only).encode(), room + 1)


class Body(RequestModel):
    """A body that tells in which thread it was validated."""

    tokens: list[Int]
    text: str = ""

    @field_validator("tokens")
    @classmethod
    def _note(cls, value: list[int]) -> list[int]:
        validated_in.append(threading.current_thread().name)
        return value


validated_in: list[str] = []


async def count(request: Request, body: Body) -> dict[str, Any]:
    worked_in = await run_in_thread_if_large(request, lambda: threading.current_thread().name)
    return {"tokens": len(body.tokens), "worked_in": worked_in}


def answers(*bodies: bytes | dict[str, Any], content_type: str = "application/json") -> list[httpx.Response]:
    """What a route of a ``Body`` answers."""
    app = Starlette(routes=[ApiRoute("POST", "/", count)])
    app.state.models = None
    app.state.service = SimpleNamespace(
        options=SimpleNamespace(unknown_fields="refuse"), sees_images=False, max_model_len=100
    )
    handle_errors(app)

    async def post_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            headers = {"content-type": content_type}
            contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
            return [await http.post("/", content=content, headers=headers) for content in contents]

    validated_in.clear()
    return asyncio.run(post_all())


def test_large_bodies_are_validated_beside_the_event_loop() -> None:
    small, large = answers({"tokens": [1]}, {"tokens": [1], "text": "x" * LARGE})
    here = threading.current_thread().name
    assert small.json() == {"tokens": 1, "worked_in": here} and large.json()["tokens"] == 1
    assert large.json()["worked_in"].startswith("octavo-bodies")
    assert validated_in == [here, large.json()["worked_in"]]


def test_a_body_with_too_much_in_it_is_refused_before_it_is_validated() -> None:
    bodies: list[dict[str, Any]] = [
        {"tokens": [1] * (MAX_ENTRIES + 2)},
        {"tokens": [1], "more": [{}] * MAX_PARTS},
        {"tokens": [1], **{f"unknown{i}": 1 for i in range(MAX_PARTS)}},
    ]
    for response in answers(*bodies):
        assert response.status_code == 400 and response.json()["error"]["code"] == "too_many_values"
    assert not validated_in


@pytest.mark.parametrize(
    "body",
    [b'{"tokens": [1, "x"], "text": "%s"}', b'{"text": "%s"}', b'{"tokens": [1], "text": "%s"', b'["%s"]',
     b'{"tokens": [true], "text": "%s"}', b'{"tokens": [1], "tex": "\\ud800%s"}'],
)  # fmt: skip
def test_a_large_body_is_answered_as_a_small_one(body: bytes) -> None:
    small, large = (response.json() for response in answers(body % b"x", body % (b"x" * LARGE)))
    if "error" in small:
        # Where JSON breaks off depends on its length.
        assert {**large["error"], "message": ""} == {**small["error"], "message": ""}
        assert large["error"]["message"].rstrip("0123456789") == small["error"]["message"].rstrip("0123456789")
    else:
        assert large["tokens"] == small["tokens"]


def test_large_bodies_that_are_no_json_are_refused() -> None:
    deep = b'{"tokens": %s1%s}' % (b"[" * 60_000, b"]" * 60_000)
    for body in (deep, json.dumps({"tokens": [1], "text": "x" * LARGE}).encode("utf-16")):
        (response,) = answers(body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"
    [response] = answers({"tokens": [1], "text": "x" * LARGE}, content_type="text/plain")
    assert response.status_code == 400 and "Content-Type: application/json" in response.json()["error"]["message"]


def test_a_long_list_of_tokens_becomes_its_text(tiny_server: Running) -> None:
    text = "hello wörld " * 3000
    with tiny_server.http() as http:
        tokens = [
            token
            for piece in (text[i : i + 500] for i in range(0, len(text), 500))
            for token in http.post("/tokenize", json={"prompt": piece, "add_special_tokens": False}).json()["tokens"]
        ]
        assert len(json.dumps(tokens)) > LARGE
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
        wrong = http.post("/detokenize", json={"tokens": [*tokens, 10**6]})
    assert wrong.status_code == 400 and "1000000" in wrong.json()["error"]["message"]


#: Route and body: what a client can do with the 8 MB that are allowed. The later ones are as much as is read at all.
ATTACKS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "items": ("/v1/responses", lambda: {"input": [ITEM] * 230_000}),
    "turns": ("/v1/messages", lambda: {"model": "tiny", "max_tokens": 1, "messages": [ITEM] * 230_000}),
    "messages": ("/v1/chat/completions", lambda: {"messages": [ITEM] * 230_000}),
    "parts": (
        "/v1/chat/completions",
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 240_000}]},
    ),
    "ids": ("/detokenize", lambda: {"tokens": [11] * 2_600_000}),
    "unknown fields": ("/v1/completions", lambda: {"prompt": "a", **{f"unknown{i}": 1 for i in range(300_000)}}),
    "empty lists": ("/v1/completions", lambda: {"prompt": "a", "json_schema": {"enum": [[]] * 2_000_000}}),
    "quotes": ("/v1/completions", lambda: {"prompt": '"' * 4_000_000}),
    "as many items as are read": ("/v1/responses", lambda: {"input": [ITEM] * 13_000}),
    "as many turns": ("/v1/messages", lambda: {"model": "tiny", "max_tokens": 1, "messages": [ITEM] * 13_000}),
    "as many messages": ("/v1/chat/completions", lambda: {"messages": [ITEM] * 13_000}),
    "as many ids": ("/detokenize", lambda: {"tokens": [65] * 500_000}),
    "as long a prompt": ("/v1/completions", lambda: {"prompt": [11] * 500_000}),
    "as many prompts": ("/v1/completions", lambda: {"prompt": [[11] * 2000] * 250}),
    "as many wrong ids": ("/v1/completions", lambda: {"prompt": [*[11] * 500_000, "x"]}),
    "as many unknown fields": ("/v1/completions", lambda: {"prompt": "a", **{f"u{i}": 1 for i in range(60_000)}}),
    "as large a schema": (
        "/v1/chat/completions",
        lambda: {
            "messages": [ITEM],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(16_000)}}}}],
        },
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ATTACKS)
def test_health_is_answered_within_300_ms_under_large_bodies(tiny_server: Running, attack: str) -> None:
    """Six at once, twice each, while a load balancer asks on connections of its own."""
    route, make = ATTACKS[attack]
    body = json.dumps(make(), separators=(",", ":")).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    statuses: list[bytes] = []

    def send() -> None:
        for _ in range(2):
            statuses.append(asked(tiny_server, head.encode() + b"Connection: close\r\n\r\n" + body))

    latencies: list[float] = []
    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        begun, waited = time.monotonic(), held_up(tiny_server.process.pid)
        assert asked(tiny_server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == b"200"
        # Without the time for which other programs had the processors.
        latencies.append(time.monotonic() - begun - (held_up(tiny_server.process.pid) - waited))
        time.sleep(0.01)
    print(f"{attack}: {len(body)} bytes, answers {set(statuses)}, slowest /health {max(latencies) * 1000:.0f} ms")
    assert max(latencies) < 0.3
    assert set(statuses) <= {b"200", b"400"}


def layers(number: int) -> bytes:
    """A body of 4 MB in so many layers of gzip, none of which makes it smaller."""
    body = os.urandom(4_000_000)
    for _ in range(number):
        stored = zlib.compressobj(0, zlib.DEFLATED, 31)
        body = stored.compress(body) + stored.flush()
    return body


#: Path, Content-Encoding, body, and the status.
PACKED: dict[str, tuple[str, str, Callable[[], bytes], bytes]] = {
    "300 layers": ("/v1/completions", ",".join(["gzip"] * 300), lambda: layers(300), b"415"),
    "two layers": ("/v1/completions", "gzip,gzip", lambda: layers(2), b"400"),
    "expands": ("/v1/completions", "gzip", lambda: gzip.compress(b" " * (8 << 20)), b"400"),
    "expands to an upload": ("/v1/audio/transcriptions", "gzip", lambda: gzip.compress(bytes(64 << 20)), b"400"),
    "expands twice": (
        "/v1/audio/transcriptions", "gzip,gzip", lambda: gzip.compress(gzip.compress(bytes(64 << 20))), b"400",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", PACKED)
def test_health_is_answered_within_300_ms_under_compressed_bodies(tiny_server: Running, kind: str) -> None:
    """30 at once; some find no room."""
    path, encoding, make, expected = PACKED[kind]
    body = make()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body
    statuses: list[bytes] = []
    threads = [threading.Thread(target=lambda: statuses.append(asked(tiny_server, request))) for _ in range(30)]
    for thread in threads:
        thread.start()
    latencies: list[float] = []
    while any(thread.is_alive() for thread in threads):
        begun, waited = time.monotonic(), held_up(tiny_server.process.pid)
        assert asked(tiny_server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == b"200"
        latencies.append(time.monotonic() - begun - (held_up(tiny_server.process.pid) - waited))
        time.sleep(0.01)
    print(f"{kind}: {len(body)} bytes, answers {set(statuses)}, slowest /health {max(latencies) * 1000:.0f} ms")
    assert expected in statuses and set(statuses) <= {expected, b"429", b"503"}
    assert max(latencies) < 0.3


def asked(server: Running, request: bytes) -> bytes:
    """The status of an answer; with sockets alone, as a client's own work would count too."""
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 20):
            answer = answer or data
    return answer.split(b" ", 2)[1]
