"""Misbehaving clients, a dying engine, shutdown: what clients get, and that no resources are left held."""

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
import psutil
import pytest

from octavo.lab.bench.chaos_processes import open_descriptors, server_processes
from tests.busy_machine import PATIENCE, eventually
from tests.server.openai_judge import events
from tests.server.running_server import TINY, Running, Serve, start

#: Minutes of work for the demo model.
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True}
#: With one sequence at a time, a minute or more of the tiny model's.
SLOW: dict[str, Any] = {"prompt": ["x"] * 200, "max_tokens": 240, "ignore_eos": True}
RESTARTS = "octavo_replica_restarts_total"
#: Of a piece without tokens.
NOTHING: dict[str, Any] = {"token_logprobs": []}
ONE_AT_A_TIME = ("--max-num-seqs", "1")


def request_bytes(fields: dict[str, Any], path: str = "/v1/completions") -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def send(server: Running, fields: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=PATIENCE)
    connection.sendall(request_bytes(fields))
    return connection


@pytest.mark.parametrize(
    ("how", "streamed"),
    [
        *((how, True) for how in ("close", "reset", "half-close")),
        ("close", False),
        *(pytest.param(how, False, marks=pytest.mark.slow) for how in ("reset", "half-close")),
    ],
)
def test_a_client_that_goes_away_leaves_nothing_behind(
    demo_server: Running, streamed: bool, how: str, tries: Callable[..., None]
) -> None:
    tries(lambda: go_away(demo_server, streamed, how))


def go_away(demo_server: Running, streamed: bool, how: str) -> dict[str, bool]:
    """Leaves a request that would take minutes; whether it was soon given up."""
    demo_server.wait_until_idle()
    before = demo_server.metric("octavo_requests_finished_total", reason="abort")
    connection = send(demo_server, {**ENDLESS, "stream": streamed})
    if streamed:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    else:
        demo_server.wait_until_running()
    steps = demo_server.metric("octavo_step_duration_seconds_count")
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(10_000):
            pass
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    eventually(lambda: demo_server.metric("octavo_requests_finished_total", reason="abort") > before)
    demo_server.wait_until_idle()
    assert demo_server.metric("octavo_requests_finished_total", reason="abort") == before + 1
    # Two steps, and those while the metrics were read and the news travelled; to its end it would have been 1,900.
    more = demo_server.metric("octavo_step_duration_seconds_count") - steps
    return {f"at most 10 more steps, not {more}": more <= 10}


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
            with socket.create_connection(server.address, timeout=PATIENCE) as connection:
                connection.sendall(data if cut < 0.9 else data[: int(len(data) * cut)])
                time.sleep(seconds)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_until_idle()
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_client_that_does_not_read_is_disconnected_and_slows_no_other(
    serve: Serve, tries: Callable[..., None]
) -> None:
    tries(lambda: read_nothing(serve))


def read_nothing(serve: Serve) -> dict[str, bool]:
    """Asks for much and reads none of it; whether others were answered meanwhile."""
    server = serve("--stall-timeout", "1")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    connection.connect(server.address)
    # Tens of megabytes of chunks, if they were all made.
    fields = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 64, "logprobs": 20, "stream": True}
    connection.sendall(request_bytes(fields))
    start_time = time.monotonic()
    with server.http() as http:
        for _ in range(10):
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
            assert answer.status_code == 200
    seconds = time.monotonic() - start_time
    server.wait_until_idle()
    idle = time.monotonic()
    eventually(lambda: server.metric("octavo_http_open_requests") == 1)  # the one that reads the metrics
    cut_off = time.monotonic() - idle
    # What the buffers hold can still be read; then it ends, without the end of the stream.
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    assert b"[DONE]" not in received
    connection.close()
    return {
        f"others were answered within 20 s, not {seconds} s": seconds < 20,
        f"the reader was cut off within 2.5 s, not {cut_off} s": cut_off < 2.5,
    }


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


class Reader(threading.Thread):
    """Reads a streamed answer to its end; ``begun`` is set when there is something of it."""

    def __init__(self, server: Running, fields: dict[str, Any]) -> None:
        super().__init__()
        self.text = ""
        self.begun = threading.Event()
        self._server = server
        self._fields = {**fields, "stream": True}
        self.start()

    def run(self) -> None:
        with self._server.http() as http, http.stream("POST", "/v1/completions", json=self._fields) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()


def post(server: Running, fields: dict[str, Any]) -> httpx.Response:
    with server.http() as http:
        return http.post("/v1/completions", json=fields)


def last_error(text: str) -> dict[str, Any]:
    assert "[DONE]" not in text
    error: dict[str, Any] = json.loads(text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]
    return error


def test_when_the_engine_dies_open_requests_end_at_once_and_the_server_with_code_70(
    serve: Serve, tries: Callable[..., None]
) -> None:
    tries(lambda: kill_the_engine(serve))


def kill_the_engine(serve: Serve) -> dict[str, bool]:
    """Kills the engine under two requests; whether they ended at once."""
    server = serve(*ONE_AT_A_TIME, "--engine-restarts", "0")
    streaming = Reader(server, SLOW)
    assert streaming.begun.wait(PATIENCE)
    waiting, whole = in_background(lambda: post(server, SLOW))
    eventually(lambda: server.metric("octavo_http_open_requests") == 3)  # with the one that reads the metrics
    killed = time.monotonic()
    os.kill(server.core_pid(), signal.SIGKILL)
    streaming.join(PATIENCE)
    waiting.join(PATIENCE)
    seconds = time.monotonic() - killed
    assert last_error(streaming.text)["code"] == "engine_dead"
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
    with server.http() as http:
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/metrics").status_code == 200
    assert server.process.wait(PATIENCE) == 70
    exited = time.monotonic() - killed
    return {
        f"ended within 1.5 s, not {seconds} s": seconds < 1.5,
        f"the server within 10 s, not {exited} s": exited < 10,
    }


@pytest.mark.slow
def test_when_the_engine_hangs_it_is_as_if_it_had_died(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--step-timeout", "2", "--engine-restarts", "0")
    streaming = Reader(server, SLOW)
    assert streaming.begun.wait(PATIENCE)
    waiting, whole = in_background(lambda: post(server, SLOW))
    eventually(lambda: server.metric("octavo_http_open_requests") == 3)  # with the one that reads the metrics
    core = psutil.Process(server.core_pid())
    core.suspend()
    streaming.join(PATIENCE)
    waiting.join(PATIENCE)
    assert last_error(streaming.text)["code"] == "engine_dead"
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "engine_dead"
    with server.http() as http:
        assert http.get("/health").status_code == 503
    assert server.process.wait(PATIENCE) == 70
    assert not core.is_running()
    server.wait_for_log("no step for 2 s")


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ([], signal.SIGKILL),
        # By default tests of the engine say so of a core that hangs, and of one in reserve.
        pytest.param(["--step-timeout", "2"], signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(["--standby-engines", "1"], signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped", "killed beside a standby"],
)
def test_a_lost_engine_is_a_pause_in_the_answers(options: list[str], number: int, serve: Serve) -> None:
    """A stream that has begun, a request that waits, and one that comes while there is no engine."""
    server = serve(*ONE_AT_A_TIME, *options)
    fields = {**SLOW, "prompt": ["x"] * 3, "max_tokens": 120, "temperature": 1, "seed": 5, "logprobs": 2}
    right = post(server, fields).json()
    core = psutil.Process(server.core_pid())
    if "--standby-engines" in options:
        server.wait_for_log("ready in reserve")
    streaming = Reader(server, fields)
    assert streaming.begun.wait(PATIENCE)
    waiting, whole = in_background(lambda: post(server, fields))
    core.send_signal(number)
    with server.http() as http:
        eventually(lambda: http.get("/health").status_code == 503 or server.metric(RESTARTS) == 1)
        if "--standby-engines" not in options:
            answer = http.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_starting")
            assert int(answer.headers["Retry-After"]) >= 1
            assert server.metric("octavo_replica_up") == 0
            eventually(lambda: server.metric(RESTARTS) == 1)
        late = post(server, fields).json()
        streaming.join(PATIENCE)
        waiting.join(PATIENCE)
        assert http.get("/health").status_code == 200
    for choice in right["choices"]:
        pieces = [c for chunk in events(streaming.text) for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [t for p in pieces for t in (p["logprobs"] or NOTHING)["token_logprobs"]] == choice["logprobs"][
            "token_logprobs"
        ]
    for answer in (whole[0].json(), late):
        assert (answer["choices"], answer["usage"]) == (right["choices"], right["usage"])
    assert server.metric(RESTARTS) == 1
    assert server.metric("octavo_requests_resumed_total") >= 1
    eventually(lambda: not core.is_running())
    assert server.stop() == 0


@pytest.mark.slow
def test_a_core_that_dies_in_reserve_leaves_nothing_behind(serve: Serve) -> None:
    server = serve("--standby-engines", "1")
    server.wait_for_log("ready in reserve")
    before = open_descriptors(server.process.pid)
    serving = server.core_pid()
    [reserve] = [p for role, p in server_processes(server.process.pid) if role == "core" and p.pid != serving]
    reserve.kill()
    server.wait_for_log("in reserve has ended")
    eventually(lambda: server.log.read_text().count("ready in reserve") == 2)
    eventually(lambda: not (open_descriptors(server.process.pid) - before))
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_open_requests_finish_and_exits_with_0(serve: Serve, number: int) -> None:
    server = serve()
    core = server.core_pid()
    fields = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 8}
    streaming = Reader(server, fields)
    assert streaming.begun.wait(PATIENCE)
    assert server.stop(number) == 0
    streaming.join(PATIENCE)
    chunks = events(streaming.text)
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 8
    with pytest.raises(httpx.ConnectError):
        post(server, fields)
    assert not Path(f"/proc/{core}").exists()


def test_requests_open_after_the_shutdown_timeout_end_with_an_error(serve: Serve) -> None:
    server = serve(*ONE_AT_A_TIME, "--shutdown-timeout", "0.5")
    streaming = Reader(server, SLOW)
    assert streaming.begun.wait(PATIENCE)
    assert server.stop() == 0
    streaming.join(PATIENCE)
    assert last_error(streaming.text)["code"] in ("aborted", "engine_dead")


def test_told_twice_it_ends_at_once(serve: Serve, tries: Callable[..., None]) -> None:
    tries(lambda: tell_twice(serve))


def tell_twice(serve: Serve) -> dict[str, bool]:
    """Ends a server that waits for a long request; whether that was at once."""
    server = serve(*ONE_AT_A_TIME)
    core = server.core_pid()
    thread, _ = in_background(lambda: post(server, SLOW))
    server.wait_until_running()
    os.kill(core, signal.SIGSTOP)  # on any machine the request lasts until the end
    server.process.send_signal(signal.SIGINT)
    server.wait_for_log("shutting down")
    server.process.send_signal(signal.SIGTERM)  # says nothing new
    time.sleep(0.3)
    assert server.process.poll() is None
    told = time.monotonic()
    assert server.stop(signal.SIGINT) == 130
    seconds = time.monotonic() - told
    thread.join(PATIENCE)
    assert not Path(f"/proc/{core}").exists()
    return {f"ended within 3 s, not {seconds} s": seconds < 3}


def test_a_full_disk_for_the_log_holds_up_nothing(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "log").symlink_to("/dev/full")
    command = [sys.executable, "-m", "octavo", "serve", str(tiny_model), "--port", "0"]
    process = subprocess.Popen([*command, "--log-file", str(tmp_path / "log"), *TINY])
    try:
        server = Running(process, f"http://127.0.0.1:{port_of(process)}", tmp_path / "none", str(tiny_model))
        with server.http() as http:
            eventually(lambda: http.get("/health").status_code == 200)
        assert post(server, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert server.metric("octavo_log_lines_dropped_total") > 0
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


def port_of(process: subprocess.Popen[bytes]) -> int:
    """Where a server listens whose log does not say so."""
    ports: list[int] = []

    def listens() -> bool:
        assert process.poll() is None
        sockets = psutil.Process(process.pid).net_connections("tcp")
        ports.extend(socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN)
        return bool(ports)

    eventually(listens)
    return ports[0]


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded(
    tiny_server: Running, tiny_model: Path, tmp_path: Path
) -> None:
    port = str(tiny_server.address[1])
    with pytest.raises(AssertionError, match=r"cannot listen on 127\.0\.0\.1"):
        start(tiny_model, tmp_path / "log", "--port", port)


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
