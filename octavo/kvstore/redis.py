"""``RedisStore``: KV cache blocks in a Redis or Valkey server, which engines of several machines share.

The server bounds the store and evicts (``maxmemory`` with ``maxmemory-policy allkeys-lru``). Whatever happens to it, a
call ends within its time and finds nothing; a ``Breaker`` spares the next calls the wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from octavo.config.options import store_location
from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.plugins import how_to_install
from octavo.core.stats import StoreTierStats
from octavo.kvstore import frames
from octavo.kvstore.breaker import Breaker
from octavo.kvstore.contents import StoreContents, StoredNamespace
from octavo.kvstore.namespace import namespace_name
from octavo.kvstore.store import KVStore

#: Holds the password if neither the URL nor a file has it.
PASSWORD_VARIABLE = "OCTAVO_KV_STORE_PASSWORD"
#: Before the name of a namespace, ":" and a key in hexadecimal digits, or "about"; the number is that of this scheme.
PREFIX = "octavo:kv:1:"
_ABOUT = "about"
#: Values of a server that are looked at in one request.
_SCANNED = 1000
#: Seconds until a server that does not answer counts as failed, and bytes a second below which it counts as too slow.
TIMEOUT, SLOWEST = 0.5, 16 << 20
#: Most bytes of values in one request, unless one value is larger.
BATCH_BYTES = 8 << 20
#: Seconds between two questions for the server's memory.
MEMORY_INTERVAL = 10.0
#: Seconds that a server may take to answer ``octavo cache``.
_CONTENTS_TIMEOUT = 5.0
#: Errors about one key: it holds another type of value.
_WRONG_TYPE = "WRONGTYPE"
_SCHEMES = ("redis", "rediss", "unix")
#: Parameters of the URL that redis-py takes, beside those of TLS, and those that are read here.
_CLIENT_PARAMETERS = ("username", "password", "db", "client_name", "socket_timeout", "socket_connect_timeout")
_OWN_PARAMETERS = ("password_file", "ttl")
_TLS_PARAMETERS = (
    "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname",
    "ssl_ciphers", "ssl_min_version",
)  # fmt: skip


class RedisStore(KVStore):
    """A ``KVStore`` by the package redis.

    ``url``: ``redis://USER:PASSWORD@HOST:PORT/DATABASE``, ``rediss://`` for TLS or ``unix:///SOCKET``, with redis-py's
    parameters of TLS (``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``), ``password_file``, and ``ttl``: seconds
    after which a value expires that was not stored again.

    Calls take ``TIMEOUT`` seconds and the time of their bytes at most, beside the resolution of the host's name.

    Raises:
        ConfigError: the URL is wrong, the password's file cannot be read, or the package is missing; never that the
            server cannot be reached. No message has a password.
    """

    name = "shared"

    def __init__(self, url: str, namespace: bytes, about: Mapping[str, str] | None = None) -> None:
        """``namespace``: 32 bytes, of which all keys of this object are made; ``about``: its label."""
        self._prefix = f"{PREFIX}{namespace_name(namespace)}:"
        self._about = msgspec.json.encode(dict(about or {}))
        self._is_labelled = False
        self._connection_class, self._options, self._ttl = _connection_options(url)
        self._timeout = float(self._options["socket_timeout"])
        self.location = store_location(url)
        self._server = Breaker(f"the KV store at {self.location}")
        #: Of a server that answers, and refuses to store: it is full, a replica, or cannot save.
        self._writes = Breaker(f"writing to the KV store at {self.location}")
        self._lock = threading.Lock()
        #: Connections that no call uses.
        self._idle: list[Any] = []
        self._stats = StoreTierStats(tier=self.name)
        self._next_memory = 0.0
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        replies = self._call([("EXISTS", self._name(key)) for key in keys], time.monotonic() + self._timeout)
        return next((i for i, reply in enumerate(replies) if reply != 1), len(replies))

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        began = time.monotonic()
        deadline = began + self._seconds(values)
        found, asked, damaged = 0, 0, False
        for batch in _batches(values):
            # A byte more than there may be, so that a longer value is noticed and not read whole.
            replies = self._call(
                [("GETRANGE", self._name(keys[i]), 0, frames.FRAME_BYTES + values[i].nbytes) for i in batch], deadline
            )
            asked += len(replies)
            for i, reply in zip(batch, replies, strict=False):
                damaged = reply != b"" and not _unpack(reply, keys[i], values[i])
                if reply == b"" or damaged:
                    break
                found += 1
            else:
                if len(replies) == len(batch):
                    continue
            break
        if damaged:
            self._call([("UNLINK", self._name(keys[found]))], time.monotonic() + self._timeout)
        with self._lock:
            self._stats.asked += asked
            self._stats.found += found
            self._stats.damaged += damaged
            self._stats.bytes_read += sum(value.nbytes for value in values[:found])
            self._stats.read_seconds += time.monotonic() - began
        return found

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        if not self._writes.allows():
            with self._lock:
                self._stats.dropped += len(keys)
            return 0
        began = time.monotonic()
        deadline = began + self._seconds(values)
        use = ("TOUCH",) if self._ttl is None else ("EXPIRE", self._ttl)
        present = self._call([(use[0], self._name(key), *use[1:]) for key in keys], deadline)
        missing = [i for i, reply in enumerate(present) if reply != 1]
        expiry = () if self._ttl is None else ("EX", self._ttl)
        written = num_bytes = 0
        if missing and not self._is_labelled:
            labelled = self._call([("SET", self._prefix + _ABOUT, self._about)], deadline)
            self._is_labelled = labelled == [b"OK"]
        for batch in _batches([values[i] for i in missing]):
            stored = [missing[i] for i in batch]
            commands = [
                ("SET", self._name(keys[i]), frames.pack(keys[i], values[i]) + values[i], *expiry) for i in stored
            ]
            replies = self._call(commands, deadline)
            for i, reply in zip(stored, replies, strict=False):
                if reply == b"OK":
                    written += 1
                    num_bytes += values[i].nbytes
            refusal = next((reply for reply in replies if reply != b"OK"), None)
            if refusal is not None:
                self._fail(self._writes, refusal)
            if refusal is not None or len(replies) < len(batch):
                break
        else:
            if missing:
                self._writes.succeeded()
        with self._lock:
            self._stats.written += written
            self._stats.dropped += len(keys) - len(present) + len(missing) - written
            self._stats.bytes_written += num_bytes
            self._stats.write_seconds += time.monotonic() - began
        return len(present) - len(missing) + written

    def stats(self) -> StoreTierStats:
        with self._lock:
            return msgspec.structs.replace(self._stats, trouble=self._server.trouble or self._writes.trouble)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _seconds(self, values: Sequence[memoryview]) -> float:
        return self._timeout + sum(value.nbytes for value in values) / SLOWEST

    def _call(self, commands: list[tuple[Any, ...]], deadline: float) -> list[Any]:
        """The server's replies: bytes and integers, and exceptions for keys of other types and for refused writes.

        Empty if the server does not answer in time, or refuses to read.
        """
        if not commands or self._closed or not self._server.allows():
            return []
        asks_memory = time.monotonic() >= self._next_memory
        if asks_memory:
            self._next_memory = time.monotonic() + MEMORY_INTERVAL
            commands = [*commands, ("INFO", "memory")]
        try:
            replies = self._exchange(commands, deadline)
        except Exception as e:  # anything that a broken server makes the client raise
            if not self._closed:
                self._fail(self._server, e)
            return []
        if asks_memory:
            self._note_memory(replies.pop())
        if commands[0][0] != "SET":
            for reply in replies:
                if isinstance(reply, Exception) and not str(reply).startswith(_WRONG_TYPE):
                    self._fail(self._server, reply)
                    return []
        self._server.succeeded()
        return replies

    def _exchange(self, commands: list[tuple[Any, ...]], deadline: float) -> list[Any]:
        with self._lock:
            connection = self._idle.pop() if self._idle else self._connection_class(**self._options)
        done = threading.Event()
        threading.Thread(target=_cut_off, args=(connection, deadline, done), daemon=True).start()
        try:
            _connect(connection)
            replies = _exchange(connection, commands)
        except Exception as e:
            connection.disconnect()
            if time.monotonic() >= deadline:
                raise TimeoutError("the server is too slow") from e
            raise
        finally:
            done.set()
        with self._lock:
            self._idle.append(connection)
        if self._closed:
            self.close()
        return replies

    def _fail(self, breaker: Breaker, error: object) -> None:
        with self._lock:
            self._stats.errors += 1
        why = f"{error}" or type(error).__name__
        password = self._options.get("password")
        breaker.failed((why.replace(password, "...") if password else why)[:200])

    def _note_memory(self, reply: object) -> None:
        if not isinstance(reply, bytes):  # not permitted
            return
        fields = dict(line.split(b":", 1) for line in reply.splitlines() if b":" in line)
        used, most = fields.get(b"used_memory", b""), fields.get(b"maxmemory", b"")
        with self._lock:
            if used.isdigit() and most.isdigit():
                self._stats.held_bytes, self._stats.max_bytes = int(used), int(most)


class RedisContents(StoreContents):
    """All engines' values in a server, without an engine. Methods take as long as the server takes."""

    def __init__(self, url: str) -> None:
        kind, options, _ = _connection_options(url)
        self._location = store_location(url)
        self._connection = kind(**{**options, "socket_timeout": _CONTENTS_TIMEOUT})

    def namespaces(self) -> list[StoredNamespace]:
        sizes: dict[str, list[int]] = {}
        idle: dict[str, list[int]] = {}
        abouts: dict[str, dict[str, str]] = {}
        for names in self._scan(PREFIX + "*"):
            commands = [command for name in names for command in (("STRLEN", name), ("OBJECT", "IDLETIME", name))]
            replies = self._call(commands)
            for name, size, seconds in zip(names, replies[::2], replies[1::2], strict=True):
                namespace, is_label = _namespace_of(name)
                if is_label:
                    abouts[namespace] = _read_about(self._call([("GET", name)])[0])
                elif isinstance(size, int) and size:
                    sizes.setdefault(namespace, []).append(size)
                    idle.setdefault(namespace, []).extend([seconds] if isinstance(seconds, int) else [])
        return [
            StoredNamespace(
                name,
                abouts.get(name, {}),
                len(each),
                sum(each),
                max(idle[name], default=None),
                min(idle[name], default=None),
            )
            for name, each in sorted(sizes.items())
        ]

    def clear(self, name: str | None = None) -> tuple[int, int]:
        removed = num_bytes = 0
        for names in self._scan(f"{PREFIX}{'' if name is None else name + ':'}*"):
            replies = self._call([(command, each) for each in names for command in ("STRLEN", "UNLINK")])
            for each, size, was_there in zip(names, replies[::2], replies[1::2], strict=True):
                if was_there == 1 and not _namespace_of(each)[1]:
                    removed += 1
                    num_bytes += size if isinstance(size, int) else 0
        return removed, num_bytes

    def _scan(self, pattern: str) -> Iterator[list[bytes]]:
        cursor = b"0"
        while True:
            (reply,) = self._call([("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED)])
            if isinstance(reply, Exception):
                raise ConfigError(f"{self._location}: {reply}")
            cursor, names = reply
            if names:
                yield [*dict.fromkeys(names)]
            if cursor == b"0":
                return

    def _call(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        try:
            return _exchange(self._connection, commands)
        except Exception as e:  # see RedisStore
            raise ConfigError(f"{self._location} does not answer: {e}") from None


def open_contents(place: str) -> StoreContents:
    """The store at a URL; raises ConfigError if the URL is wrong."""
    return RedisContents(place)


def _namespace_of(name: bytes) -> tuple[str, bool]:
    """The namespace in the name of a value or a label, and whether it is a label."""
    namespace, _, rest = name.decode("utf-8", "replace").removeprefix(PREFIX).partition(":")
    return namespace, rest == _ABOUT


def _read_about(label: object) -> dict[str, str]:
    try:
        return msgspec.json.decode(label if isinstance(label, bytes) else b"", type=dict[str, str])
    except msgspec.DecodeError:
        return {}


def _exchange(connection: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
    """The replies to commands; errors of single commands are among them."""
    from redis.exceptions import ResponseError

    connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except ResponseError as e:
            replies.append(e)
    return replies


def _connect(connection: Any) -> None:
    """Connects, again if the server has closed the connection since its last use."""
    connection.connect()
    try:
        is_clean = not connection.can_read()
    except Exception:  # closed; which error says so depends on the version of redis-py
        is_clean = False
    if not is_clean:
        connection.disconnect()
        connection.connect()


def _cut_off(connection: Any, deadline: float, done: threading.Event) -> None:
    """Closes a connection at a time, unless its call is done; the client's timeouts are for each part of a reply."""
    while not done.wait(max(0.05, deadline - time.monotonic())):
        connection.disconnect()


def _unpack(stored: object, key: bytes, value: memoryview) -> bool:
    """Copies a stored value to ``value`` if it is whole, and the one of this key."""
    if not isinstance(stored, bytes) or len(stored) != frames.FRAME_BYTES + value.nbytes:
        return False
    view = memoryview(stored)
    content = view[frames.FRAME_BYTES :]
    if not frames.check(view[: frames.FRAME_BYTES], key, content):
        return False
    value.cast("B")[:] = content
    return True


def _batches(values: Sequence[memoryview]) -> Iterator[range]:
    """Ranges of at most ``BATCH_BYTES``, or of one value."""
    begin = size = 0
    for i, value in enumerate(values):
        if i > begin and size + value.nbytes > BATCH_BYTES:
            yield range(begin, i)
            begin, size = i, 0
        size += value.nbytes
    if begin < len(values):
        yield range(begin, len(values))


def _connection_options(url: str) -> tuple[Any, dict[str, Any], int | None]:
    """redis-py's class of connections to a URL, its keywords, and the ``ttl`` of the URL."""
    try:
        from redis.backoff import NoBackoff
        from redis.connection import Connection, parse_url
        from redis.retry import Retry
    except ImportError as e:
        raise ConfigError(f"kv_store needs the package redis ({e}): {how_to_install('store')}") from None
    parts = urlsplit(url)
    if "@" in parts.path or "@" in parts.fragment:
        raise ConfigError("kv_store: '/', '?', '#' and '@' in user and password must be percent-encoded, as in %2F")
    if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.netloc):
        raise ConfigError(
            "kv_store must be redis://HOST:PORT/0, rediss://HOST:PORT/0 (TLS) or unix:///SOCKET, not "
            f"{store_location(url)!r}"
        )
    parameters = dict(parse_qsl(parts.query))
    known = [*_OWN_PARAMETERS, *_CLIENT_PARAMETERS, *(_TLS_PARAMETERS if parts.scheme == "rediss" else ())]
    for name in parameters:
        if name not in known:
            raise ConfigError(f"kv_store has the unknown parameter {name!r}; {did_you_mean(name, known)}")
    ttl, file = parameters.pop("ttl", None), parameters.pop("password_file", None)
    if ttl is not None and not (ttl.isascii() and ttl.isdigit() and int(ttl) > 0):
        raise ConfigError(f"kv_store: ttl must be seconds, at least 1, not {ttl!r}")
    password = os.environ.get(PASSWORD_VARIABLE)
    if file is not None:
        try:
            password = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot be read as kv_store's password: {e}", file=file) from None
    try:
        options = {
            **({"password": password} if password else {}),
            "socket_timeout": TIMEOUT,
            "socket_connect_timeout": TIMEOUT,
            "socket_read_size": 1 << 18,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **parse_url(f"{url.partition('#')[0].partition('?')[0]}?{urlencode(parameters)}"),
        }
        kind = options.pop("connection_class", Connection)
        kind(**options)  # wrong parameters are noticed here
    except (ValueError, TypeError) as e:
        raise ConfigError(f"kv_store {store_location(url)} is wrong: {e}") from None
    return kind, options, None if ttl is None else int(ttl)
