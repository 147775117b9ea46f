"""Clients that misbehave, an engine that dies, an operator who stops: what each of them gets, and what is left held."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.openai_judge import events
from tests.server.running_server import TINY, Running, start

Serve = Callable[..., Running]
#: Minutes of work for the demo model.
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
#: With one sequence at a time, a minute or more of the tiny model's.
SLOW: dict[str, Any] = {"prompt": ["x"] * 200, "max_tokens": 240, "ignore_eos": True}
ONE_AT_A_TIME = ("--max-num-seqs", "1")


def request_bytes(fields: dict[str, Any], path: str = "/v1/completions") -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def send(server: Running, fields: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=20)
    connection.sendall(request_bytes(fields))
    return connection


def wait_until_running(server: Running, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not server.metric("octavo_requests", state="running"):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_client_that_goes_away_leaves_nothing_behind(demo_server: Running, streamed: bool, how: str) -> None:
    demo_server.wait_until_idle()
    before = demo_server.metric("octavo_requests_finished_total", reason="abort")
    connection = send(demo_server, {**ENDLESS, "stream": streamed})
    if streamed:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    else:
        wait_until_running(demo_server)
    steps = demo_server.metric("octavo_step_duration_seconds_count")
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(10_000):
            pass
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    demo_server.wait_until_idle()
    assert demo_server.metric("octavo_requests_finished_total", reason="abort") == before + 1
    # Two steps, and those while the metrics were read and the news travelled; to its end it would have been 1,900.
    assert demo_server.metric("octavo_step_duration_seconds_count") - steps <= 10


def test_clients_that_go_away_at_random_moments_leave_nothing_behind(tiny_server: Running) -> None:
    abort_at_random(tiny_server, 150)


@pytest.mark.slow
def test_ten_thousand_clients_that_go_away_leave_nothing_behind(tiny_server: Running) -> None:
    abort_at_random(tiny_server, 10_000)


def abort_at_random(server: Running, count: int) -> None:
    server.wait_until_idle()
    draw = random.Random(0)
    lock = threading.Lock()
    left = count

    def ask() -> None:
        nonlocal left
        while True:
            with lock:
                if left <= 0:
                    return
                left -= 1
                fields = {"prompt": "x" * draw.randint(1, 100), "max_tokens": 100, "stream": draw.random() < 0.5}
                fields["n"] = draw.choice([1, 1, 2, 4])
                seconds, cut = draw.random() * 0.1, draw.random()
            data = request_bytes(fields)
            with socket.create_connection(server.address, timeout=20) as connection:
                connection.sendall(data if cut < 0.9 else data[: int(len(data) * cut)])
                time.sleep(seconds)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_until_idle(60)
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_client_that_does_not_read_slows_nobody_and_is_cut_off(serve: Serve) -> None:
    server = serve("--stall-timeout", "1")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(server.address)
    # Tens of megabytes of chunks, if they were all made.
    fields = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 64, "logprobs": 20, "stream": True}
    connection.sendall(request_bytes(fields))
    start_time = time.monotonic()
    with server.http() as http:
        for _ in range(10):
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
            assert answer.status_code == 200
    assert time.monotonic() - start_time < 20
    server.wait_until_idle(40)
    time.sleep(2.5)
    # What the buffers hold can still be read; then it ends, without the end of the stream.
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    assert b"[DONE]" not in received
    assert server.metric("octavo_http_open_requests") == 1  # the one that reads the metrics
    connection.close()


def test_a_slow_reader_gets_all_of_it(tiny_server: Running) -> None:
    fields = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "n": 8, "logprobs": 20, "seed": 1}
    with tiny_server.http() as http:
        expected = [choice["text"] for choice in http.post("/v1/completions", json=fields).json()["choices"]]
        with http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
            pieces = []
            for piece in answer.iter_bytes(16384):
                pieces.append(piece)
                time.sleep(0.01)
    texts = [""] * 8
    for chunk in events(b"".join(pieces).decode()):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except httpx.HTTPError as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def post(server: Running, fields: dict[str, Any]) -> httpx.Response:
    with server.http() as http:
        return http.post("/v1/completions", json=fields)


def last_error(text: str) -> dict[str, Any]:
    assert "[DONE]" not in text
    error: dict[str, Any] = json.loads(text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]
    return error


def test_when_the_engine_dies_open_requests_end_at_once_and_the_server_with_code_70(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME)
    streaming, streamed = in_background(lambda: post(server, {**SLOW, "stream": True}))
    waiting, whole = in_background(lambda: post(server, SLOW))
    wait_until_running(server)
    time.sleep(0.3)
    killed = time.monotonic()
    os.kill(server.core_pid(), signal.SIGKILL)
    streaming.join(10)
    waiting.join(10)
    assert time.monotonic() - killed < 1.5
    assert last_error(streamed[0].text)["code"] == "engine_dead"
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
    with server.http() as http:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/metrics").status_code == 200
    assert server.process.wait(10) == 70


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_what_is_open_and_ends_with_code_0(serve: Serve, number: int) -> None:
    server = serve()
    core = server.core_pid()
    fields = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 8, "stream": True}
    thread, results = in_background(lambda: post(server, fields))
    wait_until_running(server)
    assert server.stop(number) == 0
    thread.join(10)
    chunks = events(results[0].text)
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 8
    with pytest.raises(httpx.ConnectError):
        post(server, fields)
    assert not Path(f"/proc/{core}").exists()


def test_what_does_not_finish_in_time_is_ended_with_an_error(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--shutdown-timeout", "0.5")
    streaming, streamed = in_background(lambda: post(server, {**SLOW, "stream": True}))
    wait_until_running(server)
    time.sleep(0.3)
    assert server.stop() == 0
    streaming.join(10)
    assert last_error(streamed[0].text)["code"] in ("aborted", "engine_dead")


def test_told_twice_it_ends_at_once(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME)
    core = server.core_pid()
    thread, _ = in_background(lambda: post(server, SLOW))
    wait_until_running(server)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)  # says nothing new
    time.sleep(0.3)
    assert server.process.poll() is None
    told = time.monotonic()
    assert server.stop(signal.SIGINT) == 130
    assert time.monotonic() - told < 3
    thread.join(10)
    assert not Path(f"/proc/{core}").exists()


def test_a_full_disk_for_the_log_holds_up_nothing(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "log").symlink_to("/dev/full")
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "octavo",
            "serve",
            str(tiny_model),
            "--port",
            str(port),
            "--log-file",
            str(tmp_path / "log"),
            *TINY,
        ]
    )
    try:
        server = Running(process, f"http://127.0.0.1:{port}", tmp_path / "none")
        end = time.monotonic() + 60
        while True:
            try:
                assert post(server, {"prompt": "a", "max_tokens": 2}).status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < end
                time.sleep(0.1)
        assert server.metric("octavo_log_lines_dropped_total") > 0
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(
    tiny_server: Running, tiny_model: Path, tmp_path: Path
) -> None:
    port = str(tiny_server.address[1])
    with pytest.raises(AssertionError, match=r"cannot listen on 127\.0\.0\.1"):
        start(tiny_model, tmp_path / "log", "--port", port)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_streaming_clients_for_two_minutes_lose_nothing_and_memory_stays_flat(demo_server: Running) -> None:
    end = time.monotonic() + 120
    lock = threading.Lock()
    answered = tokens = 0
    sizes = []

    pids = (demo_server.process.pid, demo_server.core_pid())

    def resident() -> int:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ask(number: int) -> None:
        nonlocal answered, tokens
        with demo_server.http(timeout=300) as http:
            while time.monotonic() < end:
                fields = {"prompt": f"Fact {number}:", "max_tokens": 32, "ignore_eos": True, "stream": True}
                fields["stream_options"] = {"include_usage": True}
                answer = http.post("/v1/completions", json=fields)
                if answer.status_code == 429:
                    time.sleep(int(answer.headers["retry-after"]))
                    continue
                assert answer.status_code == 200, answer.text
                usage = events(answer.text)[-1]["usage"]
                assert usage["completion_tokens"] == 32
                with lock:
                    answered += 1
                    tokens += 32

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            ask(number)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(200)]
    sizes.append(resident())
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(5)
        sizes.append(resident())
    assert not failures, failures[:3]
    demo_server.wait_until_idle()
    print(f"{answered} answers, {tokens} tokens, MB resident: {[size >> 20 for size in sizes]}")
    warm = max(sizes[: max(3, len(sizes) // 3)])
    assert max(sizes) < warm * 1.1 + (16 << 20)
