"""``DiskStore``: KV cache blocks in a folder of a local disk, which several engines share, and which outlives them.

    FOLDER/octavo-kv-store             marks the folder
    FOLDER/writing/<writer>            locked by a writer as long as it lives
    FOLDER/about/<namespace>.json      label of a namespace
    FOLDER/<2 digits of the key>/<key> a frame (``octavo.kvstore.frames``) and its value
    ...                /<writer>-<n>   a value that is being written

A value is one file. It is written under another name, renamed, and never changed. So no reader sees half of it, no
process waits for another, and a process that is killed at any moment leaves nothing but a temporary file, which the
next start removes. Nothing is synced: what a power failure tears, the checksum finds.

The least recently used values go first; the modification time of a file is its last use. No process knows what others
write, so each one visits the 256 subfolders in turn, some at a time, and trims them to their share of 7/8 of the bound.
Every writer comes round each time that it has written 1/16 of the bound; so two writers never exceed it, and each
further one may by 1/16, if all come round at the same time. A visit takes some 10 ms whatever the store holds.

Why files (``scripts/research/compare_disk_stores.py``)? Medians of five runs on two shared, busy cores and ext4,
without syncing, values in the page cache; GB/s written and read, us to evict a value:

                24 KiB               368 KiB              2 MiB
    files       0.04  0.41    68     0.36  0.86   160     0.15  0.67   280
    segments    0.37  0.75     7     0.19  1.06    16     0.44  0.64    88    16 values a file, index in memory
    LMDB        0.47  0.61    13     0.29  0.89     6     0.28  0.60    18
    SQLite      0.15  0.25   160     0.15  0.31  2400     0.14  0.26 12000

Reads, which requests wait for, are about equal. Writes are beside the steps: of 368 KiB, a block of a small model, no
store is faster, of 2 MiB LMDB is by two. Small values cost the creation of a file, which ext4 does in 5 us, or in
hundreds where many files have been removed in the last minutes. LMDB and SQLite make writers wait for each other, also
for one that is stopped; without syncing, a power failure may cost all values; and their files do not shrink. Segments
need an index that processes share.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded
from octavo.core.stats import StoreTierStats
from octavo.kvstore import frames
from octavo.kvstore.breaker import Breaker
from octavo.kvstore.contents import StoreContents, StoredNamespace
from octavo.kvstore.namespace import namespace_name
from octavo.kvstore.store import KVStore

_MARK = "octavo-kv-store"
_WRITING, _ABOUT = "writing", "about"
_SHARDS = [f"{number:02x}" for number in range(256)]
_VALUE = re.compile(r"[0-9a-f]{64}")
_WRITER = re.compile(r"[0-9a-f]{16}")
#: A visit ends with the subfolder in which it has seen this many values.
_VISIT_VALUES = 2000
#: What file systems allocate.
_PAGE = 4096
#: An engine that only reads looks this often at what there is.
_LOOK_SECONDS = 30.0
_MAX_ABOUT = 1 << 16
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
#: Not blocking, as something else than a file may have its name.
_READ = os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW


class DiskStore(KVStore):
    """A store in a folder, of any number of namespaces, models and processes.

    Args:
        path: a folder, made with mode 0700 if it is missing; files have mode 0600.
        max_bytes: of all values, as they lie on the disk.
        namespace, about: label of a namespace for ``octavo cache``, without text of prompts.

    Raises:
        ConfigError: the folder cannot be made or used, belongs to another user, may be written by others, holds
            symbolic links in place of its own folders, or holds files that are no store's.
    """

    name = "disk"

    def __init__(
        self, path: str | Path, max_bytes: int, namespace: bytes = b"", about: Mapping[str, str] | None = None
    ) -> None:
        self._path = str(path)
        self._max_bytes = max_bytes
        self._namespace, self._about = namespace_name(namespace), dict(about or {})
        self._root = _open_folder(self._path, create=True)
        self._reads = Breaker(f"reading from the KV store {self._root}")
        self._writes = Breaker(f"writing to the KV store {self._root}")
        self._closed = False
        self._writer, self._num_temporary = f"{random.SystemRandom().getrandbits(64):016x}", 0
        self._presence: IO[bytes] | None = None
        #: Of the statistics.
        self._lock = threading.Lock()
        self._stats = StoreTierStats(tier=self.name, max_bytes=max_bytes)
        #: Of everything below, as several threads may write.
        self._trimming = threading.Lock()
        self._next_shard = random.randrange(len(_SHARDS))
        self._since_visit = self._until_visit = 0
        self._next_look = 0.0
        with suppress(OSError):  # it is tried again at the first write
            self._presence = _register(self._root, self._writer)
            _remove_leftovers(self._root)
            self._visit(0)

    def contains(self, keys: Sequence[bytes]) -> int:
        if self._closed or not self._reads.allows():
            return 0
        for number, key in enumerate(keys):
            try:
                os.lstat(self._value_path(key))
            except FileNotFoundError:
                return number
            except OSError as e:
                self._fail(self._reads, e)
                return number
        return len(keys)

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        if self._closed or not keys or not self._reads.allows():
            return 0
        began, now = time.monotonic(), time.time_ns()
        found = 0
        missing = damaged = False
        try:
            for key, value in zip(keys, values, strict=True):
                path = self._value_path(key)
                try:
                    # Later blocks of a chain are of no use without earlier ones, so they count as used earlier.
                    damaged = not _read(path, key, value, now - 1000 * found)
                except FileNotFoundError:
                    missing = True
                if damaged:
                    with suppress(OSError):
                        os.unlink(path)
                if missing or damaged:
                    break
                found += 1
            self._reads.succeeded()
        except OSError as e:
            self._fail(self._reads, e)
        with self._lock:
            self._stats.asked += found + (found < len(keys))
            self._stats.found += found
            self._stats.damaged += damaged
            self._stats.bytes_read += sum(value.nbytes for value in values[:found])
            self._stats.read_seconds += time.monotonic() - began
        return found

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        if self._closed or not keys:
            return 0
        began, now = time.monotonic(), time.time_ns()
        stored = written = num_bytes = 0
        if self._writes.allows():
            try:
                if self._writes.trouble:
                    self._root = _open_folder(self._path, create=True)
                    self._presence = _register(self._root, self._writer)
                for key, value in zip(keys, values, strict=True):
                    path, used = self._value_path(key), now - 1000 * stored
                    try:
                        os.utime(path, ns=(used, used), follow_symlinks=False)
                    except FileNotFoundError:
                        size = -(-(frames.FRAME_BYTES + value.nbytes) // _PAGE) * _PAGE
                        if size > self._max_bytes:
                            break
                        self._make_room(size)
                        self._write(path, key, value, used)
                        written += 1
                        num_bytes += value.nbytes
                    stored += 1
                self._writes.succeeded()
            except (OSError, ConfigError) as e:
                self._fail(self._writes, e)
        with self._lock:
            self._stats.written += written
            self._stats.dropped += len(keys) - stored
            self._stats.bytes_written += num_bytes
            self._stats.write_seconds += time.monotonic() - began
        return stored

    def stats(self) -> StoreTierStats:
        """``held_bytes`` is an estimate: what the last visit saw, and what this object has written since."""
        if not self._closed and time.monotonic() > self._next_look:
            with suppress(OSError), self._trimming:
                self._visit(0)
        with self._lock:
            trouble = self._reads.trouble or self._writes.trouble
            return msgspec.structs.replace(
                self._stats, held_bytes=self._stats.held_bytes + self._since_visit, trouble=trouble
            )

    def close(self) -> None:
        """Values must not be being written."""
        self._closed = True
        if self._presence is not None:
            with suppress(OSError):
                os.unlink(f"{self._root}/{_WRITING}/{self._writer}")
            self._presence.close()
            self._presence = None

    def _value_path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/{_shard(name)}/{name}"

    def _fail(self, breaker: Breaker, error: Exception) -> None:
        with self._lock:
            self._stats.errors += 1
        breaker.failed((error.strerror if isinstance(error, OSError) else None) or str(error))

    def _write(self, path: str, key: bytes, value: memoryview, used: int) -> None:
        folder = os.path.dirname(path)
        with self._trimming:
            self._num_temporary += 1
            temporary = f"{folder}/{self._writer}-{self._num_temporary}"
        try:
            file = os.open(temporary, _CREATE, 0o600)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another writer was faster
                os.mkdir(folder, 0o700)
            file = os.open(temporary, _CREATE, 0o600)
        try:
            frame = frames.pack(key, value)
            if os.writev(file, [frame, value]) < len(frame) + value.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.utime(file, ns=(used, used))
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(file)

    def _make_room(self, size: int) -> None:
        """Visits subfolders if it is time to, before ``size`` more bytes are written."""
        with self._trimming:
            if self._since_visit + size > self._until_visit:
                self._visit(size)
            self._since_visit += size

    def _visit(self, coming: int) -> None:
        """Trims the next subfolders, so that ``coming`` bytes fit, and sets when to visit more."""
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if self._about:
            with suppress(OSError):
                _write_about(self._root, self._namespace, self._about)  # it may have been cleared
        values: list[_Value] = []
        visited = 0
        while visited < len(_SHARDS) and len(values) < _VISIT_VALUES:
            values += _values_in(self._root, _SHARDS[(self._next_shard + visited) % len(_SHARDS)])
            visited += 1
        self._next_shard = (self._next_shard + visited) % len(_SHARDS)
        share = min(self._max_bytes * 7 // 8, self._max_bytes - coming) * visited // len(_SHARDS)
        seen = sum(value.bytes for value in values)
        evicted = 0
        values.sort()
        for value in values:
            if seen <= share:
                break
            with suppress(FileNotFoundError):  # another process has removed it
                os.unlink(value.path)
                evicted += 1
            seen -= value.bytes
        held = seen * len(_SHARDS) // visited
        lap = max(self._max_bytes // 16, (self._max_bytes - held) // 4)
        self._since_visit, self._until_visit = 0, lap * visited // len(_SHARDS)
        with self._lock:
            self._stats.evicted += evicted
            self._stats.held_bytes = held


def _shard(name: str) -> str:
    """The subfolder of a value: digits behind those of the namespace."""
    return name[16:18]


class _Value(NamedTuple):
    """In the order in which values are evicted."""

    #: Nanoseconds of the time of the last use.
    used: int
    bytes: int
    path: str

    @property
    def namespace(self) -> str:
        return os.path.basename(self.path)[:16]


def _values_in(root: str, shard: str) -> Iterator[_Value]:
    with suppress(FileNotFoundError), os.scandir(f"{root}/{shard}") as entries:
        for entry in entries:
            if _VALUE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    size = max(state.st_size, 512 * state.st_blocks)
                    yield _Value(state.st_mtime_ns, size, entry.path)


def _read(path: str, key: bytes, value: memoryview, used: int) -> bool:
    """Reads a value and marks it as used; whether it is whole. Raises FileNotFoundError, and OSError of the disk."""
    try:
        file = os.open(path, _READ)
    except OSError as e:
        if e.errno == errno.ELOOP:  # a symbolic link
            return False
        raise
    try:
        frame = bytearray(frames.FRAME_BYTES)
        size = len(frame) + value.nbytes
        if os.fstat(file).st_size != size or os.readv(file, [frame, value]) != size:
            return False
        if not frames.check(frame, key, value):
            return False
        with suppress(OSError):  # a disk that may only be read
            os.utime(file, ns=(used, used))
        return True
    finally:
        os.close(file)


def _open_folder(path: str, *, create: bool) -> str:
    """The real path of a store's folder, checked, and made if it is missing."""
    root = os.path.realpath(os.path.expanduser(path))
    try:
        if create:
            os.makedirs(root, 0o700, exist_ok=True)
        state = os.lstat(root)
        if state.st_uid != os.geteuid():
            raise ConfigError("belongs to another user: a KV store needs a folder of its engine's user", file=root)
        if state.st_mode & 0o022:
            mode = f"{state.st_mode & 0o777:o}"
            raise ConfigError(f"may be written by others (mode {mode}): a KV store needs mode 700", file=root)
        with os.scandir(root) as entries:
            links = {entry.name: entry.is_symlink() for entry in entries if entry.name != "lost+found"}
        if _MARK not in links and (links or not create):
            why = ": a store is only made in a new or empty folder" if create else ""
            raise ConfigError(f"holds no KV store{why}", file=root)
        for name in links.keys() & {_MARK, _WRITING, _ABOUT, *_SHARDS}:
            if links[name]:
                raise ConfigError("is a symbolic link, which a KV store does not follow", file=f"{root}/{name}")
        if create:
            os.close(os.open(f"{root}/{_MARK}", os.O_WRONLY | os.O_CREAT | _NO_FOLLOW, 0o600))
            for name in (_WRITING, _ABOUT):
                os.makedirs(f"{root}/{name}", 0o700, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot be used as a KV store: {e.strerror}", file=root) from None
    return root


def _register(root: str, writer: str) -> IO[bytes]:
    """A file that is locked until it is closed or the process ends."""
    path = f"{root}/{_WRITING}/{writer}"
    file = open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | _NO_FOLLOW, 0o600), "wb")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(f"{path}.new", path)
    return file


def _remove_leftovers(root: str) -> None:
    """Removes the temporary files of writers that have ended without closing their store."""
    ended = set()
    for name in os.listdir(f"{root}/{_WRITING}"):
        if _WRITER.fullmatch(name):
            with suppress(OSError):  # it is locked, or another process has removed it
                file = os.open(f"{root}/{_WRITING}/{name}", _READ)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    ended.add(name)
                finally:
                    os.close(file)
    for shard in _SHARDS if ended else ():
        with suppress(FileNotFoundError):
            for name in os.listdir(f"{root}/{shard}"):
                if name.partition("-")[0] in ended:
                    os.unlink(f"{root}/{shard}/{name}")
    for name in ended:
        with suppress(FileNotFoundError):
            os.unlink(f"{root}/{_WRITING}/{name}")


def _write_about(root: str, namespace: str, about: Mapping[str, str]) -> None:
    path = f"{root}/{_ABOUT}/{namespace}.json"
    if not os.path.lexists(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_FOLLOW
        with open(os.open(f"{path}.new", flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(about))
        os.rename(f"{path}.new", path)


def _read_about(root: str, namespace: str) -> dict[str, str]:
    path = Path(root, _ABOUT, f"{namespace}.json")
    with suppress(ConfigError, msgspec.DecodeError, UnicodeError):
        return msgspec.json.decode(read_bounded(path, _MAX_ABOUT), type=dict[str, str])
    return {}


class DiskContents(StoreContents):
    """A store's folder, without an engine."""

    def __init__(self, path: str) -> None:
        self._root = _open_folder(path, create=False)

    def namespaces(self) -> list[StoredNamespace]:
        values: dict[str, list[_Value]] = {}
        for value in self._values():
            values.setdefault(value.namespace, []).append(value)
        now = time.time_ns()
        return [
            StoredNamespace(
                name,
                _read_about(self._root, name),
                len(each),
                sum(value.bytes for value in each),
                oldest=max(0, now - min(value.used for value in each)) / 1e9,
                newest=max(0, now - max(value.used for value in each)) / 1e9,
            )
            for name, each in sorted(values.items())
        ]

    def clear(self, name: str | None = None) -> tuple[int, int]:
        removed = num_bytes = 0
        try:
            for value in self._values():
                if name in (None, value.namespace):
                    with suppress(FileNotFoundError):
                        os.unlink(value.path)
                        removed += 1
                        num_bytes += value.bytes
            _remove_leftovers(self._root)
            labels = os.listdir(f"{self._root}/{_ABOUT}")
            for label in labels:
                if name in (None, label.removesuffix(".json")):
                    with suppress(FileNotFoundError):
                        os.unlink(f"{self._root}/{_ABOUT}/{label}")
        except OSError as e:
            raise ConfigError(f"cannot be cleared: {e.strerror}", file=self._root) from None
        return removed, num_bytes

    def _values(self) -> Iterator[_Value]:
        try:
            for shard in _SHARDS:
                yield from list(_values_in(self._root, shard))
        except OSError as e:
            raise ConfigError(f"cannot be read: {e.strerror}", file=self._root) from None


def open_contents(place: str) -> StoreContents:
    """The store in a folder; raises ConfigError if there is none."""
    return DiskContents(place)
