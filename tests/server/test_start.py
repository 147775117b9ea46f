"""A server that starts: it holds its address from the beginning and says how far it is."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo.config.server_options import ServerOptions
from octavo.server.http.connection import Server, StartingApp
from octavo.server.serve import listening_socket
from tests.busy_machine import eventually
from tests.server.running_server import TINY, running

PATIENCE = 120


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def starting(options: ServerOptions) -> AsyncIterator[StartingApp]:
    """A server whose model loads."""
    app = StartingApp()
    server = Server(app, options)
    with listening_socket(options) as sock:
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            yield app
        finally:
            server.should_exit = True
            await serving


def test_every_request_is_answered_with_503_and_the_progress_while_the_model_loads() -> None:
    options = ServerOptions(port=free_port())
    url = f"http://127.0.0.1:{options.port}"
    of_anthropic: list[httpx.Response] = []

    async def scenario() -> list[httpx.Response]:
        async with starting(options), httpx.AsyncClient(base_url=url) as http:
            logging.getLogger("octavo.loader").warning("loading weights: %d %%", 40)
            logging.getLogger("octavo.server").warning("a path that nobody shall see")
            body = {"messages": [{"role": "user", "content": "hi" * 100_000}]}
            answers = [
                await http.get("/health"),
                await http.post("/v1/chat/completions", json=body),
                *await asyncio.gather(*(http.head("/") for _ in range(20))),
            ]
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                of_anthropic.append(await http.post(path, json=body))
            # A client that says nothing holds nobody up.
            _, writer = await asyncio.open_connection("127.0.0.1", options.port)
            answers.append(await http.get("/health"))
            writer.close()
            return answers

    for answer in asyncio.run(scenario()):
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        if answer.request.method != "HEAD":
            error = answer.json()["error"]
            assert error["code"] == "loading" and "loading weights: 40 %" in error["message"]
    assert len(of_anthropic) == 2
    for answer in of_anthropic:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
        assert "loading weights: 40 %" in body["error"]["message"]


def test_a_body_that_is_never_complete_gets_its_answer_while_the_model_loads() -> None:
    options = ServerOptions(port=free_port())

    async def scenario() -> bytes:
        async with starting(options):
            reader, writer = await asyncio.open_connection("127.0.0.1", options.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            answer = await reader.readuntil(b"}}")
            writer.close()
            return answer

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 503")


def test_browsers_see_a_page_that_asks_again_while_the_model_loads() -> None:
    options = ServerOptions(port=free_port())

    async def scenario() -> httpx.Response:
        async with starting(options), httpx.AsyncClient() as http:
            logging.getLogger("octavo.loader").warning("loading weights: <40> %s", "%")
            return await http.get(f"http://127.0.0.1:{options.port}/", headers={"accept": "text/html,*/*"})

    answer = asyncio.run(scenario())
    assert answer.status_code == 503 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert 'http-equiv="refresh" content="1"' in answer.text and "loading weights: &lt;40&gt; %" in answer.text
    policy, style = answer.headers["content-security-policy"], answer.text.split("<style>")[1].split("</style>")[0]
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'"


def test_a_connection_that_was_open_before_is_answered_by_the_routes() -> None:
    options = ServerOptions(port=free_port())

    async def routes(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> bytes:
        async with starting(options) as app:
            reader, writer = await asyncio.open_connection("127.0.0.1", options.port)
            writer.write(b"GET /health HTTP/1.1\r\n")
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"http://127.0.0.1:{options.port}/health")).status_code == 503
            app.open(routes)
            writer.write(b"Host: a\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 204")


def test_a_server_answers_from_its_first_moment_and_its_address_is_taken_by_then(
    tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    command: list[Any] = [sys.executable, "-m", "octavo", "serve", str(tiny_model), "--port", str(port)]
    statuses: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            second = None
            end = time.monotonic() + PATIENCE
            while 200 not in statuses and time.monotonic() < end:
                try:
                    statuses.append(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
                except httpx.TransportError:
                    assert not statuses, "it answered before"
                    time.sleep(0.01)
                    continue
                if second is None:
                    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            assert statuses[0] == 503 and statuses[-1] == 200
            assert second is not None
            assert b"cannot listen" in second.communicate(timeout=PATIENCE)[1]
        finally:
            process.kill()


def test_a_server_that_is_told_to_stop_while_it_loads_stops(tiny_model: Path) -> None:
    """Not by the signal's default action, which the first process of a container does not have."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(tiny_model), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            eventually(lambda: answers(port))
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            assert process.wait(PATIENCE) == 0
            assert process.stderr is not None and b"Traceback" not in process.stderr.read()
            eventually(lambda: not any(child.is_running() for child in children))
        finally:
            process.kill()


def answers(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_profile_says_when_each_process_did_what(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--profile-startup", "--tensor-parallel-size", "2")
    with running(tiny_model, tmp_path / "log", *TINY, *flags) as server:
        log = server.wait_for_log("serving")
    parts = re.split(r"INFO (server|engine core|worker \d): begun at ([\d.]+) s", log)[1:]
    begins = dict(zip(parts[::3], map(float, parts[1::3]), strict=True))
    texts = dict(zip(parts[::3], parts[2::3], strict=True))
    assert [*texts] == ["server", "engine core", "worker 0", "worker 1"]
    assert begins["server"] == 0 <= begins["engine core"] <= begins["worker 0"]
    for name, phase, package in (
        ("server", "imports of the routes", "starlette"),
        ("engine core", "imports", "octavo.scheduler"),
        ("worker 1", "reading and packing weights", "octavo.runner"),
    ):
        assert re.search(rf"INFO +[\d.]+ +\+[\d.]+  {phase}\n", texts[name]), texts[name]
        assert re.search(rf"INFO   imports [\d.]+: .*\b{package} [\d.]+,", texts[name]), texts[name]


def test_an_idle_server_is_small(tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path / "log", *TINY) as server:
        with server.http() as http:
            http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        # The front end does without the modules of the engine core.
        assert not any("numpy" in mapped.path for mapped in psutil.Process(server.process.pid).memory_maps())

        def megabytes() -> list[float]:
            return [psutil.Process(pid).memory_info().rss / 2**20 for pid in (server.process.pid, server.core_pid())]

        # Beside weights and KV cache, which are next to nothing here; pages that processes share count for each.
        eventually(lambda: sum(megabytes()) < 200, lambda: f"{megabytes()} MB")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-lora", "--lora-modules", "a=no/adapter"), "no/adapter is missing"),
        (("--distributed-executor-backend", "ray"), "octavo[ray]"),
        (("--api-key-file", "no-keys.txt"), "cannot read api_key_file no-keys.txt"),
    ],
)
def test_what_is_missing_is_reported_before_the_model_is_looked_for(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "octavo", "serve", "no/where", "--port", "0", *flags]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert said in done.stderr and "no/where" not in done.stderr
