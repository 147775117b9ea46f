"""Images at URLs: what is fetched, and that nobody makes a server fetch within its own network, or wait for ever."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.images.image_sources import ImageFetcher, UrlRules, decode_base64, is_public, read_data_url

HERE = ipaddress.ip_network("127.0.0.1/32")
LOCAL = UrlRules(is_allowed=True, networks=(HERE,), seconds=20)
FILE = bytes(range(256)) * 300


@given(st.binary(min_size=1, max_size=200))
def test_data_urls_are_read(content: bytes) -> None:
    encoded = base64.b64encode(content).decode()
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:image/webp;charset=x;BASE64,"):
        assert read_data_url(head + encoded) == content
    assert decode_base64("\n".join(encoded[i : i + 7] for i in range(0, len(encoded), 7)) + "\n") == content


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "data:image/png,rawtext",
            r"photo must begin as data:image/png;base64, does, not with 'data:image/png,rawtext'",
        ),
        ("iVBORw0KGgo=", "must begin as data:image/png;base64,"),
        ("data:image/png;base64", "must begin as"),
        ("data:image/png;base64,iVBORw", "photo is not valid base64: Incorrect padding"),
        ("data:image/png;base64,####", "photo is not valid base64"),
        ("data:image/png;base64,é", "photo is not valid base64"),
        ("data:image/png;base64,\ud800", "photo is not valid base64"),
    ],
)
def test_other_texts_are_no_data_urls(url: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_data_url(url, name="photo")


def test_data_urls_have_a_size() -> None:
    assert len(decode_base64(base64.b64encode(bytes(1000)).decode(), 1000)) == 1000
    with pytest.raises(InvalidRequestError, match="has about 28311552 bytes; at most 20971520 are taken"):
        read_data_url("data:image/png;base64," + "A" * (36 << 20))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.100.100.200",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "192.0.2.1",
        "168.63.129.16",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        # Not in the space of global unicast.
        "fec0::1",
        "fe80::1",
        "feff::1",
        "100::1",
        "100:0:0:1::1",
        "5f00::1",
        "4000::1",
        "1fff::1",
        "ffff::1",
        # Of IPv4, in forms of IPv6.
        "::127.0.0.1",
        "::10.0.0.1",
        "::8.8.8.8",
        "::ffff:0:127.0.0.1",
        "::ffff:0:8.8.8.8",
        "::ffff:168.63.129.16",
        "64:ff9b::7f00:1",
        "64:ff9b::a83f:8110",
        "64:ff9b:1::1",
        "64:ff9b:1::7f00:1",
        "64:ff9b:1:ffff::808:808",
        "64:ff9b::1:808:808",
        "2002:808:808::",
        "2002:a00:1::1",
        "2001:0:808:808::",
        "2001:0:808:808:0:0:f5ff:fffe",
        "2606:4700::5efe:10.0.0.1",
        "2606:4700::200:5efe:127.0.0.1",
        # In the registries of special purposes.
        "2001:1::1",
        "2001:2::1",
        "2001:3::1",
        "2001:4:112::1",
        "2001:10::1",
        "2001:20::1",
        "2001:30::1",
        "2001:db8::1",
        "2620:4f:8000::1",
        "3fff::1",
        "192.0.0.1",
        "192.0.0.192",
        "192.31.196.1",
        "192.52.193.1",
        "192.88.99.1",
        "192.175.48.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.1",
        "203.0.113.1",
        "240.0.0.1",
        "239.255.255.255",
    ],
)
def test_addresses_of_networks_within_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "93.184.216.34",
        "192.0.1.1",
        "198.17.255.255",
        "198.20.0.1",
        "223.255.255.255",
        "2606:4700::1111",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2003::1",
        "3ffe::1",
        "2606:4700::5efe:8.8.8.8",
        "::ffff:8.8.8.8",
        "64:ff9b::101:101",
    ],
)
def test_others_are_public(address: str) -> None:
    assert is_public(address)


def test_exceptions_are_networks() -> None:
    networks = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]
    assert is_public("10.1.2.3", networks) and is_public("::ffff:10.1.2.3", networks) and is_public("fd00::1", networks)
    assert not is_public("10.2.2.3", networks) and not is_public("127.0.0.1", networks)
    assert is_public("64:ff9b::10.1.2.3", networks) and not is_public("64:ff9b:1::10.1.2.3", networks)
    assert is_public("64:ff9b:1::10.1.2.3", [ipaddress.ip_network("64:ff9b:1::/48")])


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_does_not_call_global(address: Any) -> None:
    destination = getattr(address, "ipv4_mapped", None) or address
    assert not is_public(str(address)) or (destination.is_global and not destination.is_multicast)


@given(st.ip_addresses(v=4))
def test_an_address_of_ipv4_stays_what_it_is_within_one_of_ipv6(address: ipaddress.IPv4Address) -> None:
    for form in ("::ffff:", "64:ff9b::"):
        assert is_public(f"{form}{address}") == is_public(str(address))
    assert not is_public(f"::{address}") and not is_public(f"64:ff9b:1::{address}")
    assert not is_public(str(ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80))))


Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def web(answer: Answer, **options: Any) -> AsyncIterator[int]:
    """A server; ``answer`` gets the head of each request. Gives its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer((await reader.readuntil(b"\r\n\r\n")).decode(), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, **options)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def answered(body: bytes, head: str = "", status: str = "200 OK") -> Answer:
    async def answer(request: str, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body)
        await writer.drain()

    return answer


def fetched(answer: Answer, url: str = "http://127.0.0.1:{}/a.png", rules: UrlRules = LOCAL, **options: Any) -> bytes:
    async def run() -> bytes:
        async with web(answer) as port:
            return await ImageFetcher(rules, **options).fetch(url.format(port), "photo")

    return asyncio.run(run())


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        fetched(*arguments, **options)
    return str(raised.value)


def test_files_are_fetched() -> None:
    assert fetched(answered(FILE)) == FILE


def test_urls_are_off_by_default() -> None:
    message = refusal(answered(FILE), rules=UrlRules())
    assert message.startswith("photo is a URL, from which this server does not fetch (allow_image_urls is off)")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "0.0.0.0",
     "[fec0::1]", "[64:ff9b:1::7f00:1]", "[::127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]"],
)  # fmt: skip
def test_nothing_is_fetched_from_within(host: str) -> None:
    async def answer(request: str, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("a connection was made")

    message = refusal(answer, f"http://{host}:{{}}/a.png", UrlRules(is_allowed=True))
    assert message.startswith("photo: the host ") and "has an address that is not public" in message


def test_redirects_are_followed_and_checked_each() -> None:
    def to(location: str) -> Answer:
        async def answer(request: str, writer: asyncio.StreamWriter) -> None:
            if request.startswith("GET /b.png?x=1 "):
                await answered(FILE)(request, writer)
            else:
                await answered(b"", f"Location: {location}\r\n", "302 Found")(request, writer)

        return answer

    assert fetched(to("b.png?x=1")) == FILE
    for location in ("http://127.0.0.2/", "http://169.254.169.254/latest/meta-data", "http://[::1]/", "//10.0.0.1/"):
        assert "has an address that is not public" in refusal(to(location))
    assert "begins with http://, https:// or data:" in refusal(to("file:///etc/passwd"))
    assert "Invalid URL in location header" in refusal(to("http://[::1"))
    assert refusal(to("/again")) == "photo is redirected more than 3 times"


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is looked up once; a second look might give another address. The server gets the name all the same."""
    heads, looked_up = [], []

    async def found(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if len(looked_up) == 1 else "10.0.0.1", port))]

    async def answer(request: str, writer: asyncio.StreamWriter) -> None:
        heads.append(request)
        await answered(FILE)(request, writer)

    async def run() -> int:
        async with web(answer) as port:
            monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
            assert await ImageFetcher(LOCAL).fetch(f"http://images.example:{port}/a.png#part") == FILE
            return port

    port = asyncio.run(run())
    assert looked_up.count("images.example") == 1
    assert f"\r\nHost: images.example:{port}\r\n" in heads[0] and heads[0].startswith("GET /a.png HTTP")
    assert "Cookie" not in heads[0] and "Authorization" not in heads[0]


def test_a_host_with_one_address_within_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, port)) for address in ("1.1.1.1", "10.0.0.1")]

    async def run() -> None:
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
        with pytest.raises(InvalidRequestError, match=r"'both\.example' has an address that is not public"):
            await ImageFetcher(UrlRules(is_allowed=True)).fetch("http://both.example/")

    asyncio.run(run())


def test_a_second_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    async def run() -> None:
        async with web(answered(FILE)) as port:
            monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
            rules = UrlRules(is_allowed=True, networks=(ipaddress.ip_network("127.0.0.0/8"),))
            assert await ImageFetcher(rules).fetch(f"http://two.example:{port}/") == FILE

    asyncio.run(run())


def test_the_first_fetch_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificates are read once, in a thread, for all that come at once; one that leaves takes nothing along."""
    read_in: list[str] = []
    make = httpx.create_ssl_context

    def slow(**options: Any) -> ssl.SSLContext:
        read_in.append(threading.current_thread().name)
        time.sleep(0.5)
        return make(**options)

    monkeypatch.setattr(httpx, "create_ssl_context", slow)

    async def run() -> None:
        async with web(answered(FILE)) as port:
            fetcher, ticks = ImageFetcher(LOCAL), 0
            first = [asyncio.ensure_future(fetcher.fetch(f"http://127.0.0.1:{port}/a.png")) for _ in range(3)]
            while not read_in:
                await asyncio.sleep(0.01)
            first.pop().cancel()
            while not all(task.done() for task in first):
                await asyncio.sleep(0.01)
                ticks += 1
            assert [task.result() for task in first] == [FILE, FILE] and ticks >= 5
            assert await fetcher.fetch(f"http://127.0.0.1:{port}/a.png") == FILE

    asyncio.run(run())
    assert len(read_in) == 1 and read_in[0] != threading.current_thread().name


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.2:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.2:1")
    assert fetched(answered(FILE)) == FILE


def test_only_named_hosts_are_fetched_from() -> None:
    rules = UrlRules(is_allowed=True, domains=("images.example",), networks=(HERE,))
    message = refusal(answered(FILE), rules=rules)
    assert message == (
        "photo: this server does not fetch from '127.0.0.1', only from images.example (allowed_media_domains)"
    )
    assert fetched(answered(FILE), rules=UrlRules(True, ("127.0.0.1",), (HERE,))) == FILE


def test_slow_and_endless_answers_end() -> None:
    async def silent(request: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def dripping(request: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def endless(request: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    async def endless_head(request: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X-Y: " + b"z" * 4000 + b"\r\n")
            await writer.drain()

    brief = UrlRules(is_allowed=True, networks=(HERE,), seconds=0.5)
    assert refusal(silent, rules=brief) == refusal(dripping, rules=brief) == "photo was not sent within 0.5 seconds"
    assert refusal(endless, max_bytes=1 << 20) == "photo has more than the 1048576 bytes that are taken"
    assert "photo cannot be fetched from 127.0.0.1" in refusal(endless_head)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answered(b"", status="404 Not Found"), "photo: 127.0.0.1 answers with status 404"),
        (answered(b"", status="302 Found"), "photo: 127.0.0.1 answers with status 302"),
        (answered(FILE, "Content-Encoding: gzip\r\n"), "sends it compressed, which was not asked for"),
        (answered(b"", "Content-Length: 9\r\n"), "photo cannot be fetched from 127.0.0.1"),
    ],
)
def test_answers_without_a_file_are_errors(answer: Answer, message: str) -> None:
    assert message in refusal(answer)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://127.0.0.1/a.png", "begins with http://, https:// or data:, not 'ftp://127.0.0.1/a.png'"),
        ("file:///etc/passwd", "begins with http://"),
        ("/etc/passwd", "begins with http://"),
        ("http://", "begins with http://"),
        ("http://user:secret@127.0.0.1:{}/", "a URL with a user's name or password"),
        ("http://127.0.0.1:99999/", "is not a valid URL"),
        ("http://no-such-host.invalid/", "the host 'no-such-host.invalid' is not found"),
        ("http://" + "a" * 300 + ".example/", "is not found"),
        ("http://127.0.0.1:1/", "photo: there is no connection to 127.0.0.1"),
    ],
)
def test_urls_that_lead_nowhere_are_errors(url: str, message: str) -> None:
    assert message in refusal(answered(FILE), url)


def test_certificates_are_checked_for_the_name_of_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the connection is made to an address."""
    if shutil.which("openssl") is None:
        pytest.skip("it makes the certificate with the program openssl")
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ],
            *("-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def found(self: Any, host: str, port: int, **options: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    async def run() -> None:
        async with web(answered(FILE), ssl=context) as port:
            monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found)
            with pytest.raises(InvalidRequestError, match=r"no connection to images\.example: .*CERTIFICATE_VER"):
                await ImageFetcher(LOCAL).fetch(f"https://images.example:{port}/")
            trusting = ImageFetcher(LOCAL, certificates=ssl.create_default_context(cafile=str(certificate)))
            assert await trusting.fetch(f"https://images.example:{port}/") == FILE
            with pytest.raises(InvalidRequestError, match=r"no connection to other\.example: .*[Hh]ostname"):
                await trusting.fetch(f"https://other.example:{port}/")

    asyncio.run(run())
