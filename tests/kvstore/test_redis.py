"""``RedisStore`` beside a real server that fails in every way, and servers that answer nonsense."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis

from octavo.config.engine_config import make_config
from octavo.config.options import store_location
from octavo.core.errors import ConfigError
from octavo.kvstore import breaker, frames
from octavo.kvstore.contents import open_contents
from octavo.kvstore.redis import PASSWORD_VARIABLE, PREFIX, TIMEOUT, RedisStore
from tests.kvstore.redis_server import RedisServer, answering, make_certificates, redis_server, tls_relay

SIZE = 20_000
#: A call on a busy machine, beyond its own time.
SLACK = 1.5


NAMESPACE = bytes(range(32))


def open_store(url: str, namespace: bytes = NAMESPACE) -> RedisStore:
    return RedisStore(url, namespace, {"model": "a model"})


def name_of(number: int) -> str:
    return f"{PREFIX}{NAMESPACE[:8].hex()}:{key_of(number).hex()}"


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def value_of(number: int, size: int = SIZE) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def write(store: RedisStore, numbers: Sequence[int], size: int = SIZE) -> int:
    return store.write([key_of(n) for n in numbers], [value_of(n, size) for n in numbers])


def read(store: RedisStore, numbers: Sequence[int], size: int = SIZE) -> int:
    """How many of the leading values are found; each must be right."""
    values = [memoryview(bytearray(size)) for _ in numbers]
    found = store.read([key_of(n) for n in numbers], values)
    assert [bytes(value) for value in values[:found]] == [bytes(value_of(n, size)) for n in numbers[:found]]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server(maxmemory="64mb", maxmemory_policy="allkeys-lru") as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    redis.Redis.from_url(server.url).flushall()
    with contextlib.closing(open_store(server.url)) as made:
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.1)


def test_values_are_found_in_order_up_to_the_first_missing_one(store: RedisStore) -> None:
    assert write(store, [0, 1, 2, 4]) == 4
    for get in (read, lambda s, numbers: s.contains([key_of(n) for n in numbers])):
        assert get(store, [0, 1, 2, 3, 4]) == 3
        assert get(store, [4, 0]) == 2
        assert get(store, [3, 0]) == 0
        assert get(store, []) == 0
    stats = store.stats()
    assert (stats.tier, stats.found, stats.written, stats.errors, stats.trouble) == ("shared", 5, 4, 0, "")
    assert stats.bytes_written == 4 * SIZE and stats.bytes_read == 5 * SIZE
    assert stats.max_bytes == 64 << 20 and 0 < stats.held_bytes < stats.max_bytes


def test_values_of_many_sizes_beyond_one_request(store: RedisStore) -> None:
    sizes = [1, 63, 64, 100_000, 3_000_000, 9_000_000, 5_000_000, 5_000_000]
    keys = [key_of(i) for i in range(len(sizes))]
    values = [value_of(i, size) for i, size in enumerate(sizes)]
    assert store.write(keys, values) == len(sizes)
    targets = [memoryview(bytearray(size)) for size in sizes]
    assert store.read(keys, targets) == len(sizes)
    assert targets == values


def test_another_store_finds_the_values_and_does_not_send_them_again(server: RedisServer, store: RedisStore) -> None:
    write(store, [0, 1])
    with contextlib.closing(open_store(server.socket_url)) as other:
        assert read(other, [0, 1]) == 2
        assert write(other, [0, 1, 2]) == 3
        assert other.stats().written == 1
    assert read(store, [0, 1, 2]) == 3


def test_a_full_server_evicts_to_store_more(store: RedisStore) -> None:
    assert write(store, range(100), 1_000_000) == 100
    found = sum(read(store, [n], 1_000_000) for n in range(100))
    assert 20 < found < 68 and not store.stats().trouble


def test_reading_and_storing_again_count_as_use_and_looking_does_not(server: RedisServer, store: RedisStore) -> None:
    client = redis.Redis.from_url(server.url)
    client.config_set("lfu-log-factor", 0)
    client.config_set("maxmemory-policy", "allkeys-lfu")
    try:
        name = name_of(0)
        assert write(store, [0]) == 1
        uses = [client.object("freq", name)]
        for use in (read, write, lambda store, _: store.contains([key_of(0)])):
            assert use(store, [0]) == 1
            uses.append(client.object("freq", name))
        assert uses[0] < uses[1] < uses[2] == uses[3]
    finally:
        client.config_set("maxmemory-policy", "allkeys-lru")


def test_values_expire_after_their_time_unless_stored_again(server: RedisServer) -> None:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    with contextlib.closing(open_store(f"{server.url}?ttl=100")) as store:
        write(store, [0, 1])
        names = [name_of(n) for n in (0, 1)]
        for name in names:
            client.expire(name, 50)
        write(store, [0])
        assert client.ttl(names[0]) > 90 and client.ttl(names[1]) <= 50


def test_keys_are_digests_under_a_prefix_and_a_namespace(server: RedisServer, store: RedisStore) -> None:
    write(store, [0])
    names = {name_of(0).encode(), f"{PREFIX}{NAMESPACE[:8].hex()}:about".encode()}
    assert set(redis.Redis.from_url(server.url).keys()) == names


def test_the_contents_of_a_server_are_listed_and_cleared_by_namespace(server: RedisServer, store: RedisStore) -> None:
    client = redis.Redis.from_url(server.url)
    client.set("another program's", "value")
    client.rpush(name_of(9), "no value")
    contents = open_contents(server.url)
    assert contents.namespaces() == []
    write(store, range(3))
    with contextlib.closing(open_store(server.url, bytes(32))) as other:
        write(other, range(1500), 10)
    first, second = contents.namespaces()
    assert (first.name, first.about, first.values, first.bytes) == ("0" * 16, {"model": "a model"}, 1500, 1500 * 74)
    assert (second.name, second.values) == (NAMESPACE[:8].hex(), 3)
    assert second.oldest is not None and second.newest is not None and 0 <= second.newest <= second.oldest < 60
    assert contents.clear("0" * 16) == (1500, 1500 * 74)
    assert [each.name for each in contents.namespaces()] == [second.name]
    contents.clear()
    assert client.keys() == [b"another program's"]


def test_contents_of_no_server_are_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="does not answer") as caught:
        open_contents(f"redis://:hidden@127.0.0.1:{port}/0").namespaces()
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frame, value: b"",
        lambda frame, value: b"x",
        lambda frame, value: frame + value[:-1],
        lambda frame, value: frame + value + b"0",
        lambda frame, value: frame + value + bytes(5_000_000),
        lambda frame, value: frames.pack(key_of(1), memoryview(value)) + value,
        lambda frame, value: frames.pack(key_of(0), memoryview(value), frames.VERSION + 1) + value,
        lambda frame, value: frame + bytes(len(value)),
    ],
)
def test_other_values_count_as_missing_and_are_removed(
    server: RedisServer, store: RedisStore, spoil: Callable[[bytes, bytes], bytes]
) -> None:
    client = redis.Redis.from_url(server.url)
    value = bytes(value_of(0))
    client.set(name_of(0), spoiled := spoil(frames.pack(key_of(0), memoryview(value)), value))
    assert read(store, [0]) == 0
    if spoiled:
        assert store.stats().damaged == 1 and not client.exists(name_of(0))
        assert write(store, [0]) == 1 and read(store, [0]) == 1


def test_every_changed_byte_is_noticed(server: RedisServer, store: RedisStore) -> None:
    client, chance = redis.Redis.from_url(server.url), random.Random(0)
    name, size = name_of(0), 300
    whole = frames.pack(key_of(0), value_of(0, size)) + value_of(0, size)
    for _ in range(300):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        client.set(name, bytes(changed))
        assert read(store, [0], size) == 0
    assert store.stats().damaged == 300 and not store.stats().trouble


def test_keys_of_other_types_count_as_missing(server: RedisServer, store: RedisStore) -> None:
    client = redis.Redis.from_url(server.url)
    write(store, [0])
    client.rpush(name_of(1), b"a list")
    assert read(store, [0, 1, 0]) == 1
    assert not client.exists(name_of(1)) and not store.stats().trouble


# --- passwords and TLS ---


def test_the_password_comes_from_the_url_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("s3cr/t word\n")
    with redis_server(requirepass="s3cr/t word") as server:
        place = f"127.0.0.1:{server.port}/0"
        monkeypatch.setenv(PASSWORD_VARIABLE, "s3cr/t word")
        urls = [f"redis://{place}"]
        for i, url in enumerate([*urls, f"redis://:s3cr%2Ft%20word@{place}", f"redis://{place}?password_file={file}"]):
            with contextlib.closing(open_store(url)) as store:
                assert write(store, [i]) == 1 and read(store, [i]) == 1
            monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
        for wrong in (f"redis://{place}", f"redis://someone:wr0ng@{place}"):
            with contextlib.closing(open_store(wrong)) as store:
                assert [write(store, [0]) for _ in range(3)] == [0, 0, 0]
                assert store.stats().trouble
                assert "wr0ng" not in f"{store.stats()} {caplog.text}"
    assert caplog.text.count("is not used for now") == 2 and "s3cr" not in caplog.text


def test_tls_checks_the_server_and_shows_a_certificate(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server.pem", made / "server.key")
    context.load_verify_locations(made / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with redis_server() as server, tls_relay(server.port, context) as port:
        trusted = f"rediss://localhost:{port}/0?ssl_ca_certs={made}/ca.pem"
        shown = f"{trusted}&ssl_certfile={made}/client.pem&ssl_keyfile={made}/client.key"
        with contextlib.closing(open_store(shown)) as store:
            assert write(store, range(5), 500_000) == 5 and read(store, range(5), 500_000) == 5
            assert not store.stats().trouble
        for url in (trusted, shown.replace("ssl_ca_certs", "ssl_ca_path"), f"redis://localhost:{port}/0"):
            with contextlib.closing(open_store(url)) as store:
                assert [write(store, [9]), write(store, [9]), read(store, [0], 500_000)] == [0, 0, 0]
                assert store.stats().trouble


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://:hidden@host/0", "redis://HOST:PORT/0"),
        ("redis:///0", "redis://HOST:PORT/0"),
        ("redis://:hid/den@host/0", "percent-encoded"),
        ("redis://:hid#den@host/0", "percent-encoded"),
        ("redis://:hidden@host:port/0", "wrong"),
        ("redis://:hidden@host/0?tll=3", "did you mean 'ttl'"),
        ("redis://:hidden@host/0?ssl_ca_certs=ca.pem", "unknown parameter"),
        ("redis://:hidden@host/0?ttl=-3", "at least 1"),
        ("redis://:hidden@host/0?socket_timeout=soon", "socket_timeout"),
        ("redis://host/0?password_file=/does/not/exist", "/does/not/exist"),
    ],
)
def test_wrong_urls_are_refused_without_their_password(url: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert problem in str(caught.value) and "hid" not in str(caught.value).replace("/does", "")
    assert "hid" not in store_location(url)


def test_reports_of_options_show_the_address_alone() -> None:
    url = "rediss://user:hidden@host:7/0?password_file=secret"
    options = make_config(model="any", kv_store=url)
    assert options.model_dump(exclude_unset=True)["kv_store"] == options.kv_store == url
    assert options.model_dump(mode="json")["kv_store"] == store_location(url) == "rediss://host:7/0"
    assert "hidden" not in repr(options) + options.model_dump_json()
    with pytest.raises(ConfigError) as caught:
        make_config(model="any", kv_store=url, enable_prefix_caching=False)
    assert "kv_store needs enable_prefix_caching" in str(caught.value) and "hidden" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"octavo\[store\]"):
        open_store("redis://localhost/0")


# --- servers that fail ---


def timed(call: Callable[[], int]) -> tuple[int, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_server_costs_nothing_and_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="octavo")
    with redis_server() as server, contextlib.closing(open_store(server.url)) as store:
        assert write(store, [0, 1]) == 2
        server.kill()
        results = [timed(lambda: read(store, [0, 1])), timed(lambda: write(store, [2]))]
        results += [timed(lambda: store.contains([key_of(0)])) for _ in range(50)]
        assert not any(found for found, _ in results)
        assert sum(seconds for _, seconds in results) < 2 * TIMEOUT + SLACK
        assert "refused" in store.stats().trouble
        server.start()  # empty
        wait_until(lambda: write(store, [0, 1]) == 2)
        assert read(store, [0, 1]) == 2 and not store.stats().trouble
    messages = [record.getMessage() for record in caplog.records]
    assert ["not used for now" in messages[0], "is used again" in messages[1], len(messages)] == [True, True, 2]
    assert f"redis://127.0.0.1:{server.port}/0" in messages[0]


def test_a_frozen_server_holds_a_caller_for_its_time_only() -> None:
    with redis_server() as server, contextlib.closing(open_store(f"{server.url}?socket_timeout=0.2")) as store:
        assert write(store, range(3)) == 3
        server.freeze()
        try:
            for call in (lambda: read(store, range(3)), lambda: write(store, [7])):
                found, seconds = timed(call)
                assert found == 0 and seconds < 3 * TIMEOUT + SLACK
            assert store.stats().trouble
            found, seconds = timed(lambda: sum(read(store, [0]) for _ in range(3)))
            assert found == 0 and seconds < 3 * TIMEOUT + SLACK
        finally:
            server.thaw()
        wait_until(lambda: read(store, range(3)) == 3)


def test_a_full_server_is_read_and_not_written(caplog: pytest.LogCaptureFixture) -> None:
    with (
        redis_server(maxmemory="8mb", maxmemory_policy="noeviction") as server,
        contextlib.closing(open_store(server.url)) as store,
    ):
        stored = [n for n in range(20) if write(store, [n], 1_000_000)]
        assert stored and len(stored) < 10
        assert read(store, stored, 1_000_000) == len(stored)
        assert "maxmemory" in store.stats().trouble and store.stats().dropped == 20 - len(stored)
        redis.Redis.from_url(server.url).flushall()
        wait_until(lambda: write(store, [50], 1_000_000))
        assert not store.stats().trouble
    assert caplog.text.count("not used for now") == 1


def drip(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    for byte in b"$" + b"1" * 10_000:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def once(answer: bytes) -> Callable[[socket.socket], None]:
    def reply(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(answer)

    return reply


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


@pytest.mark.parametrize(
    "answer",
    [
        drip,
        echo,
        lambda connection: None,
        once(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        once(b"$1000000000000\r\n"),
        once(b"$-5\r\nabc\r\n:1\r\n"),
        once(b"*100000\r\n"),
        once(b"+OK\r\n" * 50),
        once(b":1\r\n" * 50),
        once(b"-LOADING the data set\r\n" * 50),
        once(b"-MOVED 1 10.0.0.1:6379\r\n" * 50),
        once(b"*1\r\n$3\r\nfoo\r\n" * 50),
        once(b"\x00\xff" * 3000),
    ],
)
def test_nonsense_is_no_value_and_raises_nothing(answer: Callable[[socket.socket], None]) -> None:
    url = "redis://u:hidden@127.0.0.1:{}/0?socket_timeout=0.2"
    with answering(answer) as port, contextlib.closing(open_store(url.format(port))) as store:
        for call in (lambda: read(store, [0, 1, 2]), lambda: write(store, [0]), lambda: read(store, [0])):
            found, seconds = timed(call)
            assert found in (0, 1) and seconds < TIMEOUT + SLACK
        assert read(store, [5]) == 0
        assert "hidden" not in str(store.stats())


def test_under_load_a_server_that_fails_gives_no_wrong_value() -> None:
    """Threads read and write while the server is killed, started empty, and frozen."""
    ends, problems, totals = threading.Event(), [], [0, 0]

    def work(store: RedisStore, seed: int) -> None:
        chance = random.Random(seed)
        while not ends.is_set():
            begin = chance.randrange(30)
            numbers = range(begin, begin + 4)
            try:
                if chance.random() < 0.5:
                    totals[0] += write(store, numbers, 100_000)
                else:
                    totals[1] += read(store, numbers, 100_000)
            except BaseException as e:
                problems.append(e)
                return

    with redis_server(maxmemory="4mb", maxmemory_policy="allkeys-lru") as server:
        stores = [open_store(server.url) for _ in range(2)]
        threads = [threading.Thread(target=work, args=(store, i)) for i in range(2) for store in stores]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.2)
            server.restart()
            time.sleep(0.2)
            server.freeze()
            time.sleep(0.2)
            server.thaw()
        before = list(totals)
        wait_until(lambda: all(now > then for now, then in zip(totals, before, strict=True)))
        ends.set()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()
        for store in stores:
            store.close()
            assert (store.stats().damaged, read(store, [0]), write(store, [0])) == (0, 0, 0)
    assert not problems
