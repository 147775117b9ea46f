"""API keys, limits, origins and TLS."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from octavo.config.server_options import ServerOptions
from octavo.config.sources import resolve_server_options
from octavo.core.errors import ConfigError
from octavo.server.serve import listening_socket, read_api_keys
from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import Running, Serve


def make_options(**values: object) -> ServerOptions:
    return resolve_server_options(values, environ={})


BODY = {"prompt": "hello", "max_tokens": 2}
#: Takes long enough to be caught at it: the tiny model's whole context.
LONG = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "temperature": 0}


def test_requests_without_a_known_key_are_refused(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for the team\nfirst-key\n\n  second-key\n")
    keys.chmod(0o600)
    server = serve(
        "--api-key-file", str(keys), "--allowed-origins", "https://a.example", "--max-body-bytes", "5000",
        "--body-timeout", "1", "--log-prompts", "--max-stored-responses", "2",
        "--served-model-name", "tiny", env={"OCTAVO_API_KEYS": "third-key"},
    )  # fmt: skip
    with server.http() as http:
        for path in ("/health", "/version"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nothing", "//health", "/health/../metrics"):
            answer = http.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for given in ("", "Bearer", "Bearer first", "Bearer first-key2", "Basic first-key", "first-key"):
            assert http.post("/v1/completions", json=BODY, headers={"Authorization": given}).status_code == 401
        # Without a key not even the body is read.
        assert http.post("/v1/completions", content=b"x" * 100_000).status_code == 401
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answer = http.options("/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = http.options("/v1/completions", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in answer.headers
    for key in ("first-key", "second-key", "third-key"):
        with server.client(api_key=key) as client:
            assert client.models.list().data
    with server.client(api_key="fourth-key") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with server.http(headers={"Authorization": "Bearer first-key"}) as http:
        _too_large_a_body(http, server)
        _keys_of_anthropics_clients(server)
        _responses_are_of_the_key_that_made_them(server)
        http.post("/v1/completions", json={"prompt": "a prompt to be logged"})
    environment = Path(f"/proc/{server.core_pid()}/environ").read_bytes()
    assert b"third-key" not in environment
    assert server.stop() == 0  # all that there was to log is logged
    log = server.log.read_text()
    assert "a prompt to be logged" in log
    assert "first-key" not in log


def _keys_of_anthropics_clients(server: Running) -> None:
    """In a header of their own; errors come in their format, also those of keys and sizes."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    client = anthropic.Anthropic(base_url=server.url, api_key="first-key", max_retries=0)
    assert client.messages.create(**body).model == "tiny"
    with pytest.raises(anthropic.AuthenticationError, match="not known"):
        client.with_options(api_key="fourth-key").messages.create(**body)
    with server.http(headers={"X-Api-Key": "second-key"}) as http:
        answer = http.post("/v1/messages", json={**body, "system": "x" * 6000})
    assert answer.status_code == 413
    assert answer.json() == {
        "type": "error",
        "error": {"type": "request_too_large", "message": answer.json()["error"]["message"]},
        "request_id": answer.headers["x-request-id"],
    }


def _responses_are_of_the_key_that_made_them(server: Running) -> None:
    """And the oldest are forgotten."""
    route, body = "/v1/responses", {"input": "a", "max_output_tokens": 2}
    with (
        server.http(headers={"Authorization": "Bearer first-key"}) as http,
        server.http(headers={"X-Api-Key": "second-key"}) as other,
        server.http(headers={"X-Api-Key": "first-key"}) as same,
    ):
        ids = [http.post(route, json=body).json()["id"] for _ in range(2)]
        assert same.get(f"{route}/{ids[0]}").status_code == 200  # and so the newest
        assert other.get(f"{route}/{ids[0]}").status_code == 404 == other.delete(f"{route}/{ids[0]}").status_code
        assert other.post(route, json={**body, "previous_response_id": ids[0]}).status_code == 404
        assert http.post(route, json=body).status_code == 200
        assert [http.get(f"{route}/{i}").status_code for i in ids] == [200, 404]


def _too_large_a_body(http: httpx.Client, server: Running) -> None:
    """With and without a Content-Length."""
    answer = http.post("/v1/completions", json={"prompt": "x" * 6000})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"

    def pieces() -> object:
        for _ in range(100):
            yield b"x" * 100

    answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})  # type: ignore[arg-type]
    assert answer.status_code == 413
    # Whose body does not come is not waited for.
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer first-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    assert http.post("/v1/completions", json=BODY).status_code == 200


def test_without_keys_and_origins_no_page_of_another_origin_may_read(tiny_server: Running) -> None:
    with tiny_server.http() as http:
        answer = http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_server_listens_on_this_machine_only_unless_told_otherwise(tiny_server: Running) -> None:
    assert tiny_server.address[0] == "127.0.0.1"


def test_a_request_that_outgrows_all_memory_is_the_clients_mistake(tiny_server: Running) -> None:
    """It would need some 900 blocks of 400."""
    with tiny_server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "hello", "n": 60, "max_tokens": 240, "ignore_eos": True})
        assert answer.status_code == 400 and "KV cache" in answer.json()["error"]["message"]
    tiny_server.wait_until_idle()


def test_a_full_queue_answers_429_and_says_when_to_come_again(serve: Serve) -> None:
    server = serve("--max-num-seqs", "1", "--max-queued-requests", "2", "--max-queued-tokens", "50")
    statuses: list[int] = []
    answers: list[httpx.Response] = []
    lock = threading.Lock()

    def ask() -> None:
        with server.http() as http:
            answer = http.post("/v1/completions", json=LONG)
        with lock:
            statuses.append(answer.status_code)
            answers.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    # The engine holds still until all have come, so none ends before the queue is full.
    core = server.core_pid()
    os.kill(core, signal.SIGSTOP)
    try:
        for thread in threads:
            thread.start()
        eventually(lambda: len(statuses) == 10, lambda: f"answers: {statuses}")
    finally:
        os.kill(core, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert statuses == [429] * 10 + [200] * 2
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "rate_limit_error"
        else:
            assert answer.json()["usage"]["completion_tokens"] == 250
    assert server.metric("octavo_http_rejected_total") == statuses.count(429)
    server.wait_until_idle()
    # An empty queue accepts a single large request; a second one is refused.
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "x" * 60, "max_tokens": 1}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": ["a"] * 5, "max_tokens": 1}).status_code == 200
    server.wait_until_idle()


def test_requests_that_take_too_long_are_ended(serve: Serve) -> None:
    """A whole one, one whose stream has not begun, and one whose stream has: it ends with an error."""
    server = serve("--request-timeout", "3", "--max-num-seqs", "1")
    core = server.core_pid()
    body = {**LONG, "prompt": ["x"] * 200, "stream": True}  # is not done before the first piece is read
    with (
        ThreadPoolExecutor(2) as pool,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        pieces = answer.iter_text()
        text = next(pieces)
        os.kill(core, signal.SIGSTOP)  # no machine is so quick that an answer comes before the deadline
        try:
            waiting = [pool.submit(http.post, "/v1/completions", json={**LONG, "stream": s}) for s in (False, True)]
            text += "".join(pieces)
            refused = [future.result() for future in waiting]
        finally:
            os.kill(core, signal.SIGCONT)
    for response in refused:
        assert response.status_code == 503 and response.json()["error"]["code"] == "request_timeout"
    assert '"request_timeout"' in text.rstrip().split("\n\n")[-1] and "[DONE]" not in text
    server.wait_until_idle()


def test_tls_files_make_the_server_speak_https(serve: Serve, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = serve("--tls-cert", str(cert), "--tls-key", str(key))
    assert server.url.startswith("https://")
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(cert))) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_accepted_connections_send_at_once() -> None:
    with listening_socket(ServerOptions(port=0)) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), contextlib.closing(sock.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_wrong_options_are_refused_before_a_model_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="port"):
        make_options(port="x")
    with pytest.raises(ConfigError, match="tls_key"):
        make_options(tls_cert=tmp_path / "cert")
    (tmp_path / "cert").write_text("no certificate")
    wrong = make_options(tls_cert=tmp_path / "cert", tls_key=tmp_path / "cert", port=0)
    with pytest.raises(ConfigError, match="tls_cert"), listening_socket(wrong):
        pass
    with pytest.raises(ConfigError, match="cannot read api_key_file"):
        read_api_keys(make_options(api_key_file=tmp_path / "none"), {})
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    keys.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        read_api_keys(make_options(api_key_file=keys), {})
    keys.write_text("a\n")
    keys.chmod(0o644)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert read_api_keys(make_options(api_key_file=keys), {}) == ["a"]
    assert "every user" in caplog.text
    assert read_api_keys(make_options(api_key_file=keys), {"OCTAVO_API_KEYS": "b, c"}) == ["b", "c", "a"]
    assert read_api_keys(make_options(api_key="d, e"), {}) == ["d", "e"]
    with pytest.raises(ConfigError, match="visible ASCII"):
        read_api_keys(make_options(), {"OCTAVO_API_KEYS": "ä"})
