"""What the log says: how a stream ended, and at the start what an operator should know."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo.config.server_options import ServerOptions
from tests.busy_machine import eventually
from tests.server.running_server import Running

TEXT = "/v1/completions"
ROUTES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
}


def access_line(server: Running, request_id: str) -> dict[str, Any]:
    """The line of a request in the access log, once it is there."""

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("request_id") == request_id and "status" in line]

    eventually(lambda: bool(found()), lambda: f"no line of {request_id} in\n{server.log.read_text()}")
    (line,) = found()
    return line


def test_the_log_says_how_a_stream_ended(serve: Callable[..., Running]) -> None:
    threads = (len(os.sched_getaffinity(0)) or 1) + 1
    server = serve(
        "--log-format",
        "json",
        "--request-timeout",
        "3",
        "--host",
        "0.0.0.0",
        "--served-model-name",
        "tiny",
        "--num-threads",
        str(threads),
    )
    assert "without API keys" in server.log.read_text()
    assert f"num_threads is {threads}" in server.log.read_text()
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    long = {"prompt": ["x"] * 200, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.http(base_url=url) as http:
        for route, fields in ROUTES.items():
            body = {**fields, "max_tokens": 1, "stream": True}
            text = http.post(route, json=body, headers={"X-Request-Id": f"whole-{route}"}).text
            assert ("message_stop" if route == "/v1/messages" else "[DONE]") in text
            line = access_line(server, f"whole-{route}")
            assert (line["status"], line["stream"], line["completion_tokens"]) == (200, "complete", 1)
            assert "error" not in line
        with http.stream("POST", TEXT, json=long, headers={"X-Request-Id": "left"}) as answer:
            next(answer.iter_text())
        line = access_line(server, "left")
        assert (line["status"], line["stream"], line["prompt_tokens"]) == (200, "aborted", 200)
        assert line["completion_tokens"] > 0
        assert leave_whole(server, long)["completion_tokens"] > 0
        for route, text in late_streams(server, http, long).items():
            line = access_line(server, f"late-{route}")
            assert (line["status"], line["stream"], line["error"]) == (200, "error", "request_timeout")
            event = json.loads(text.removesuffix("\n\n").rpartition("data: ")[2])
            if route == "/v1/responses":
                assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
                openai.types.responses.ResponseFailedEvent.model_validate(event, strict=True)
                assert http.get(f"{route}/{event['response']['id']}").status_code == 404
                event = event["response"]
            elif route == "/v1/messages":
                assert "\nevent: error\n" in text and event["type"] == "error"
            assert "request_timeout" in event["error"]["message"]
        body = {"prompt": "x", "n": 0, "stream": True}
        refused = http.post(TEXT, json=body, headers={"X-Request-Id": "no"})
        assert refused.status_code == 400
        assert "stream" not in access_line(server, "no")


def leave_whole(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    """The line of a request that is not streamed, and whose client goes away while tokens are generated."""
    before = server.metric("octavo_generation_tokens_total")
    asked = json.dumps({**body, "stream": False}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: [::1]\r\nX-Request-Id: left-whole\r\nContent-Length: {len(asked)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.address[1])) as connection:
        connection.sendall(head.encode() + asked)
        steps = server.metric("octavo_step_duration_seconds_count")
        eventually(lambda: server.metric("octavo_step_duration_seconds_count") > steps + 3)
    line = access_line(server, "left-whole")
    assert line["status"] == 499
    assert server.metric("octavo_generation_tokens_total") == before + line["completion_tokens"]
    return line


def late_streams(server: Running, http: httpx.Client, long: dict[str, Any]) -> dict[str, str]:
    """What streams of all routes send whose core stands still until they are out of time."""
    fields = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    bodies = {route: {**body, **fields} for route, body in ROUTES.items() if route != TEXT}
    bodies["/v1/responses"] = {"input": "x", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    bodies[TEXT] = {**long, "prompt": long["prompt"][:24]}  # as many as run at once beside the others
    texts: dict[str, str] = {}
    open_streams: dict[str, Iterator[str]] = {}
    core = server.core_pid()
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:

        def begin(route: str) -> None:
            headers = {"X-Request-Id": f"late-{route}"}
            answer = stack.enter_context(http.stream("POST", route, json=bodies[route], headers=headers))
            open_streams[route] = answer.iter_text()
            texts[route] = next(open_streams[route])

        # The core runs for a few steps at a time, so that no stream ends before all have begun.
        os.kill(core, signal.SIGSTOP)
        begun = [pool.submit(begin, route) for route in bodies]
        while not all(stream.done() for stream in begun):
            os.kill(core, signal.SIGCONT)
            time.sleep(0.004)
            os.kill(core, signal.SIGSTOP)
            time.sleep(0.02)
        for stream in begun:
            stream.result()
        try:
            for route, pieces in open_streams.items():
                texts[route] += "".join(pieces)
        finally:
            os.kill(core, signal.SIGCONT)
    return texts


def test_a_server_of_this_machine_only_warns_of_nothing(tiny_server: Running) -> None:
    assert "WARNING" not in tiny_server.log.read_text().split("serving")[0]


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.7", False), ("example.org", False)],
)  # fmt: skip
def test_addresses_of_this_machine(host: str, local: bool) -> None:
    assert ServerOptions(host=host).is_local is local
