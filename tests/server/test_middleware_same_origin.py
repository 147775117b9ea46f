"""Which hosts a server answers to, and which pages of a browser may change something."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from octavo.config.sources import resolve_server_options
from octavo.server.http.middleware import SameOriginMiddleware, host_rule
from tests.busy_machine import PATIENCE
from tests.server.running_server import Serve

OWN = [
    "localhost", "localhost:8000", "LocalHost:1", "localhost.", "LOCALHOST.:80", "localhost:", "127.0.0.1",
    "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]:8000",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "EVIL.EXAMPLE.", "localhost.evil.example", "evil-localhost", "localhost..",
    "127.0.0.1.evil.example", "127.0.0.1.nip.io:8000", "127.1", "2130706433", "0x7f.0.0.1", "10.0.0.1", "0.0.0.0",
    "[::]", "[fe80::1]:8000", "::1", "[::1", "::1]", "[::1]evil.example", "localhost@evil.example", "localhost:80:80",
    "localhost:x", "evil.example/localhost", "localhost,evil.example", "a localhost", "", ":8000", "[]",
]  # fmt: skip


def answer(
    headers: list[tuple[str, str]],
    path: str = "/v1/models",
    method: str = "GET",
    scheme: str = "http",
    has_keys: bool = False,
    server: str = "127.0.0.1",
    **options: Any,
) -> tuple[int, str]:
    """Status of a request at a server with these options, and the path and the host that the routes see."""
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"] + " " + dict(scope["headers"]).get(b"host", b"").decode())
        await PlainTextResponse("")(scope, receive, send)

    given_options = resolve_server_options(options, environ={})
    guarded = SameOriginMiddleware(
        app,
        is_own_host=host_rule(given_options, has_keys=has_keys),
        origins=given_options.origins,
        operator_paths=["/sleep"],
    )
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        raise AssertionError("no body is read here")

    scope = {
        "type": "http",
        "method": method,
        "scheme": scheme,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        "server": (server, 8000),
    }
    asyncio.run(guarded(scope, receive, send))
    assert len(statuses) == 1 and len(seen) == (statuses[0] == 200)
    return statuses[0], "".join(seen)


def status(headers: dict[str, str], **options: Any) -> int:
    return answer([*{"Host": "localhost:8000", **headers}.items()], **options)[0]


# --- hosts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", OWN)
def test_a_loopback_server_answers_to_the_names_of_loopback(host: str) -> None:
    assert status({"Host": host}) == 200 == status({"Host": host}, host="::1", server="::1")


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
def test_a_loopback_server_answers_to_no_other(host: str, method: str) -> None:
    assert status({"Host": host}, method=method) == 403
    assert status({"Host": host}, method=method, host="localhost") == 403


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30))
def test_no_other_text_is_a_name_of_loopback(host: str) -> None:
    if not any(host.lower().startswith(name) for name in ("localhost", "127.", "[")):
        assert status({"Host": host}) == 403


def test_a_request_names_exactly_one_host() -> None:
    assert answer([])[0] == 403
    assert answer([("Host", "localhost"), ("Host", "evil.example")])[0] == 403


@pytest.mark.parametrize("host", FOREIGN)
def test_servers_of_networks_and_with_keys_answer_to_all(host: str) -> None:
    for options in ({"host": "0.0.0.0"}, {"host": "::"}, {"host": "10.0.0.1"}, {"has_keys": True}):
        assert status({"Host": host}, **options) == 200
    assert status({"Host": host}, allowed_hosts="*") == 200


@pytest.mark.parametrize("options", [{}, {"host": "0.0.0.0"}, {"has_keys": True}])
def test_allowed_hosts_are_answered_to(options: dict[str, Any]) -> None:
    options = {**options, "allowed_hosts": "Octavo.example., *.lab.example, 10.0.0.9, [fd00::1]"}
    for host in (
        "octavo.example",
        "OCTAVO.EXAMPLE.:443",
        "a.lab.example",
        "a.b.lab.example:1",
        "10.0.0.9",
        "[FD00::1]:1",
    ):
        assert status({"Host": host}, **options) == 200
    for host in ("localhost:1", "127.0.0.1"):
        assert status({"Host": host}, **options) == 200
    for host in ("lab.example", "evillab.example", "octavo.example.evil.example", "10.0.0.10", "[fd00::2]", ""):
        assert status({"Host": host}, **options) == 403
    # Probes of load balancers name the address; no page can have a name that is one.
    assert status({"Host": "10.0.0.7:8000"}, server="10.0.0.7", **options) == 200


def test_the_authority_of_a_target_in_absolute_form_is_the_host() -> None:
    for target in (
        "http://evil.example/v1/models",
        "HTTP://evil.example:80/v1/models",
        "https://evil.example",
        "http:///a",
    ):
        assert answer([("Host", "localhost")], path=target)[0] in (400, 403)
    for target, seen in (
        ("http://localhost:8000/v1/models", "/v1/models localhost:8000"),
        ("http://127.0.0.1", "/ 127.0.0.1"),
    ):
        assert answer([("Host", "localhost")], path=target) == (200, seen)
    assert answer([("Host", "evil.example")], path="http://localhost/v1/models") == (200, "/v1/models localhost")
    assert answer([("Host", "a")], path="http://b/v1/models", has_keys=True) == (200, "/v1/models b")


# --- origins --------------------------------------------------------------------------------------------------------

CHANGES = ["POST", "DELETE", "PUT", "PATCH"]


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:3000"},
        {"Origin": "http://localhost"},
        {"Origin": "http://localhost:8000.evil.example"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Origin": "file://"},
        {"Origin": "localhost:8000"},
        {"Origin": "ftp://localhost:8000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "Cross-Site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "null"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},
    ],
)
def test_pages_of_other_origins_change_nothing(headers: dict[str, str], method: str) -> None:
    assert status(headers, method=method) == 403 == status(headers, method=method, has_keys=True)
    assert status(headers, method=method, host="0.0.0.0") == 403
    assert status(headers) == 200  # browsers let them send it, but not read what is answered


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://localhost:8000"},
        {"Origin": "http://localhost", "Host": "LOCALHOST:80"},
        {"Origin": "http://localhost:80", "Host": "localhost"},
        {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"},
        {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_programs_and_pages_of_the_server_change_what_they_may(headers: dict[str, str], method: str) -> None:
    assert status(headers, method=method) == 200 == status(headers, method=method, path="/sleep")


def test_a_proxy_may_speak_https_for_the_server_and_replace_the_host() -> None:
    public = {"Origin": "https://chat.example"}
    options: dict[str, Any] = {"method": "POST", "has_keys": True}
    assert status({**public, "Host": "chat.example"}, **options) == 200
    assert status({**public, "Host": "chat.example:443"}, **options) == 200
    assert status({**public, "Host": "127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, **options) == 200
    assert status({**public, "Host": "127.0.0.1:8000"}, **options) == 403
    assert status({"Origin": "http://chat.example", "Host": "chat.example"}, scheme="https", **options) == 403


def test_allowed_origins_may_change_something() -> None:
    named, page = {"allowed_origins": "https://a.example, null"}, {"Origin": "https://a.example"}
    assert status(page, method="POST", **named) == 200
    assert status({**page, "Sec-Fetch-Site": "cross-site"}, method="POST", path="/sleep", **named) == 200
    assert status({"Origin": "null"}, method="POST", **named) == 200
    assert status({"Origin": "https://b.example"}, method="POST", **named) == 403
    # All origins are those that use the model; who changes the server is named.
    assert status(page, method="POST", allowed_origins="*") == 200
    assert status(page, method="POST", path="/sleep", allowed_origins="*") == 403


# --- a server -------------------------------------------------------------------------------------------------------

TEXT = b'{"prompt": "x", "max_tokens": 2}'
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'


@pytest.fixture(scope="module")
def admin_http(tiny_model: Path, start_module_server: Serve) -> Iterator[httpx.Client]:
    with start_module_server(tiny_model, "--enable-admin-routes").http() as http:
        yield http


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("/v1/completions", "text/plain", TEXT),
        ("/v1/completions", "text/plain; x=application/json", TEXT),
        ("/v1/completions", "multipart/form-data; boundary=json", TEXT),
        ("/v1/completions", "application/x-www-form-urlencoded", TEXT),
        ("/v1/completions", "application/json", TEXT),
        ("/v1/completions", "", TEXT),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=b", FORM),
        ("/v1/audio/translations", "multipart/form-data; boundary=b", FORM),
        ("/reset_prefix_cache", "", b""),
        ("/sleep?level=1", "", b""),
        ("/wake_up", "", b""),
        ("/admin/drain?replica=0", "", b""),
        ("/admin/restart", "", b""),
        ("/v1/responses/resp_x/cancel", "", b""),
        ("/tokenize", "text/plain; x=application/json", TEXT),
        ("/nothing", "", b""),
    ],
)
def test_no_route_takes_what_a_page_of_another_origin_sends(
    admin_http: httpx.Client, path: str, content_type: str, body: bytes
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    for foreign in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = admin_http.post(path, content=body, headers={**headers, **foreign})
        assert refused.status_code == 403, refused.text
        assert refused.json()["error"]["code"] == "origin_not_allowed"
    assert admin_http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_rebound_name_reads_and_changes_nothing(admin_http: httpx.Client) -> None:
    for path in ("/", "/ui/main.js", "/engine/events", "/metrics", "/v1/models", "/is_sleeping", "/health", "/docs"):
        refused = admin_http.get(path, headers={"Host": "evil.example:8102", "Accept": "text/html"})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "host_not_allowed", path
    own = {"Host": "evil.example:8102", "Origin": "http://evil.example:8102", "Sec-Fetch-Site": "same-origin"}
    for path in ("/v1/completions", "/sleep", "/v1/messages", "/reset_prefix_cache"):
        assert admin_http.post(path, content=TEXT, headers=own).status_code == 403
    preflight = {**own, "Access-Control-Request-Method": "POST"}
    assert admin_http.options("/v1/completions", headers=preflight).status_code == 403
    assert admin_http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_targets_in_absolute_form_are_answered_over_a_socket(admin_http: httpx.Client) -> None:
    def asked(head: str) -> bytes:
        with socket.create_connection((admin_http.base_url.host, admin_http.base_url.port), PATIENCE) as connection:
            connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(1 << 16).split(b" ", 2)[1]

    assert asked("GET http://localhost/version HTTP/1.1\r\nHost: localhost") == b"200"
    assert asked("GET http://evil.example/version HTTP/1.1\r\nHost: localhost") == b"403"
    assert asked("GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example") == b"400"
    assert asked("GET /version HTTP/1.1") == b"400"
    assert asked("GET /version HTTP/1.0") == b"403"
    assert asked("GET /version HTTP/1.0\r\nHost: localhost") == b"200"
