"""Where should KV cache blocks lie on disk: files, segments of several values, LMDB or SQLite?

    pip install lmdb
    python scripts/research/compare_disk_stores.py --folder /path/on/the/disk

Every store gets the same random values with frames, in batches, and marks what it reads as used, so that it can evict
the least recently used ones. Nothing is synced. Columns, for each store and size of values:

write, read    GB/s; the values are in the page cache. A read copies to the caller's memory and checks the CRC-32.
marked         us for each value of a read, without copying and checking: finding it and marking it as used
evict          us for each value that goes, least recently used first
open           ms until the first of all values is read, by a new process' object
two writing    GB/s of two processes that write to one store at once, together
killed         after kill -9 of a writer, five times: damaged values of those that are there; ms of the next opening

files is ``DiskStore`` as it is; --many N measures opening and evicting with N values of 1 KiB, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.kvstore import frames
from octavo.kvstore.disk import DiskStore
from octavo.kvstore.namespace import store_key

BATCH = 16
LARGE = 1 << 40
SIZES = (24 << 10, 368 << 10, 2 << 20)


def key_of(seed: int, number: int) -> bytes:
    return store_key(bytes(32), 0, f"{seed} {number}".encode())


class Store(ABC):
    """A candidate; ``checks``: whether reads copy and check values."""

    checks = True

    @abstractmethod
    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int: ...

    @abstractmethod
    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int: ...

    @abstractmethod
    def evict(self, count: int) -> int:
        """Removes about ``count`` values; returns how many."""

    def take(self, stored: Any, key: bytes, value: memoryview) -> bool:
        """Copies a stored value and checks it."""
        if not self.checks:
            return True
        view = memoryview(stored)
        value[:] = view[frames.FRAME_BYTES :]
        return frames.check(view[: frames.FRAME_BYTES], key, value)


class Files(Store):
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, DiskStore(folder, LARGE)

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        return self.store.write(keys, values)

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        if self.checks:
            return self.store.read(keys, values)
        for key in keys:
            path = self.store._value_path(key)
            file = os.open(path, os.O_RDONLY)
            os.fstat(file)
            os.utime(file)
            os.close(file)
        return len(keys)

    def evict(self, count: int) -> int:
        held = self.store.stats().held_bytes
        evicted = 0
        store = DiskStore(self.folder, held // 2)  # it visits as it opens
        while (evicted := store.stats().evicted) < count:
            before = evicted
            store._visit(0)
            if store.stats().evicted == before:
                break
        return store.stats().evicted


class Segments(Store):
    """A file for each batch, which begins with its keys; found by an index in memory, and evicted as a whole."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.index, self.count = folder, dict[bytes, tuple[str, int]](), 0
        self.known = set[str]()
        self.look()

    def look(self) -> None:
        for name in os.listdir(self.folder):
            if name not in self.known and not name.endswith(".new"):
                self.known.add(name)
                with open(self.folder / name, "rb") as file:
                    count, size = (int.from_bytes(file.read(8), "little") for _ in range(2))
                    offset = 16 + 32 * count
                    for number in range(count):
                        self.index[file.read(32)] = name, offset + number * size

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        size = frames.FRAME_BYTES + values[0].nbytes
        self.count += 1
        name = f"{os.getpid()}-{self.count}"
        head = len(keys).to_bytes(8, "little") + size.to_bytes(8, "little") + b"".join(keys)
        parts = [
            head,
            *(part for key, value in zip(keys, values, strict=True) for part in (frames.pack(key, value), value)),
        ]
        file = os.open(self.folder / f"{name}.new", os.O_WRONLY | os.O_CREAT)
        os.writev(file, parts)
        os.close(file)
        os.rename(self.folder / f"{name}.new", self.folder / name)
        self.known.add(name)
        for number, key in enumerate(keys):
            self.index[key] = name, len(head) + number * size
        return len(keys)

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        files: dict[str, int] = {}
        frame = bytearray(frames.FRAME_BYTES)
        found = 0
        for key, value in zip(keys, values, strict=True):
            name, offset = self.index[key]
            if name not in files:
                files[name] = os.open(self.folder / name, os.O_RDONLY)
                os.utime(files[name])
            if self.checks:
                os.preadv(files[name], [frame, value], offset)
                found += frames.check(frame, key, value)
            else:
                found += 1
        for file in files.values():
            os.close(file)
        return found

    def evict(self, count: int) -> int:
        with os.scandir(self.folder) as entries:
            names = [name for _, name in sorted((entry.stat().st_mtime_ns, entry.name) for entry in entries)]
        evicted = 0
        for name in names:
            if evicted >= count:
                break
            os.unlink(self.folder / name)
            evicted += BATCH
        return evicted


class Lmdb(Store):
    def __init__(self, folder: Path) -> None:
        # No dependency of the project.
        self.env = importlib.import_module("lmdb").open(
            str(folder), map_size=8 << 30, max_dbs=3, sync=False, metasync=False
        )
        self.values, self.used, self.order = (self.env.open_db(name) for name in (b"values", b"used", b"order"))

    def _mark(self, txn: Any, keys: Sequence[bytes]) -> None:
        for key in keys:
            before = txn.get(key, db=self.used)
            if before is not None:
                txn.delete(bytes(before) + key, db=self.order)
            stamp = time.time_ns().to_bytes(8, "big")
            txn.put(key, stamp, db=self.used)
            txn.put(stamp + key, b"", db=self.order)

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        with self.env.begin(write=True) as txn:
            for key, value in zip(keys, values, strict=True):
                txn.put(key, frames.pack(key, value) + value, db=self.values)
            self._mark(txn, keys)
        return len(keys)

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        with self.env.begin(buffers=True) as txn:
            found = sum(
                self.take(txn.get(key, db=self.values), key, value) for key, value in zip(keys, values, strict=True)
            )
        with self.env.begin(write=True) as txn:
            self._mark(txn, keys)
        return found

    def evict(self, count: int) -> int:
        evicted = 0
        while evicted < count:
            with self.env.begin(write=True) as txn:
                names = [
                    bytes(name)
                    for name, _ in zip(txn.cursor(db=self.order).iternext(values=False), range(256), strict=False)
                ]
                for name in names[: count - evicted]:
                    txn.delete(name, db=self.order)
                    txn.delete(name[8:], db=self.used)
                    txn.delete(name[8:], db=self.values)
                    evicted += 1
        return evicted


class Sqlite(Store):
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.db = sqlite3.connect(folder / "store.db", timeout=60, isolation_level=None)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=OFF")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS kv (id INTEGER PRIMARY KEY, key BLOB UNIQUE, used INTEGER, value BLOB)"
        )
        self.db.execute("CREATE INDEX IF NOT EXISTS by_use ON kv (used)")

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany(
            "INSERT OR IGNORE INTO kv (key, used, value) VALUES (?, ?, ?)",
            [(key, time.time_ns(), frames.pack(key, value) + value) for key, value in zip(keys, values, strict=True)],
        )
        self.db.execute("COMMIT")
        return len(keys)

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        found, ids = 0, []
        for key, value in zip(keys, values, strict=True):
            (number,) = self.db.execute("SELECT id FROM kv WHERE key = ?", (key,)).fetchone()
            ids.append((time.time_ns(), number))
            if self.checks:
                with self.db.blobopen("kv", "value", number, readonly=True) as blob:
                    found += self.take(blob.read(), key, value)
            else:
                found += 1
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany("UPDATE kv SET used = ? WHERE id = ?", ids)
        self.db.execute("COMMIT")
        return found

    def evict(self, count: int) -> int:
        evicted = 0
        while evicted < count:
            done = self.db.execute(
                "DELETE FROM kv WHERE id IN (SELECT id FROM kv ORDER BY used LIMIT ?)", (min(256, count - evicted),)
            )
            evicted += done.rowcount
        return evicted


STORES: dict[str, type[Any]] = {"files": Files, "segments": Segments, "lmdb": Lmdb, "sqlite": Sqlite}


def batches(seed: int, count: int) -> Iterator[list[bytes]]:
    for begin in range(0, count, BATCH):
        yield [key_of(seed, number) for number in range(begin, begin + BATCH)]


def child(name: str, folder: Path, size: int, count: int, seed: int) -> subprocess.Popen[bytes]:
    words = ["--child", name, str(folder), str(size), str(count), str(seed)]
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def run_child(name: str, folder: str, size: int, count: int, seed: int) -> None:
    store = STORES[name](Path(folder))
    values = [memoryview(random.Random(i).randbytes(size)) for i in range(BATCH)]
    print("ready", flush=True)
    sys.stdin.readline()
    for keys in batches(seed, count):
        store.write(keys, values)


def begin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def count_readable(store: Any, seed: int, buffers: list[memoryview]) -> tuple[int, int]:
    """Values that are there, and the damaged ones of these."""
    there = damaged = number = 0
    while True:
        key = key_of(seed, number)
        try:
            whole = store.read([key], buffers[:1])
        except (KeyError, TypeError):  # not there
            break
        if not whole:
            damaged += isinstance(store, Files) and store.store.stats().damaged
            break
        there, number = there + 1, number + 1
    return there, damaged


def measure(name: str, size: int, total: int, folder: Path) -> dict[str, float]:
    count = max(BATCH, total // size // BATCH * BATCH)
    values = [memoryview(random.Random(i).randbytes(size)) for i in range(BATCH)]
    buffers = [memoryview(bytearray(size)) for _ in range(BATCH)]
    store = STORES[name](folder / "one")
    keys = list(batches(0, count))
    figures: dict[str, float] = {}

    began = time.perf_counter()
    for batch in keys:
        store.write(batch, values)
    figures["write"] = count * size / (time.perf_counter() - began) / 1e9
    for _ in range(2):
        began = time.perf_counter()
        for batch in keys:
            assert store.read(batch, buffers) == BATCH
        figures["read"] = count * size / (time.perf_counter() - began) / 1e9
    store.checks = False
    began = time.perf_counter()
    for batch in keys:
        store.read(batch, buffers)
    figures["marked"] = 1e6 * (time.perf_counter() - began) / count
    if name != "lmdb":  # it cannot be opened twice by a process
        began = time.perf_counter()
        other = STORES[name](folder / "one")
        assert other.read(keys[0], buffers) == BATCH
        figures["open"] = 1e3 * (time.perf_counter() - began)
    else:
        store.env.close()
        began = time.perf_counter()
        store = STORES[name](folder / "one")
        assert store.read(keys[0], buffers) == BATCH
        figures["open"] = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    evicted = store.evict(count // 4)
    figures["evict"] = 1e6 * (time.perf_counter() - began) / max(1, evicted)

    shutil.rmtree(folder / "one")
    pair = [child(name, folder / "two", size, count // 2 // BATCH * BATCH, seed) for seed in (1, 2)]
    began = time.perf_counter()
    for process in pair:
        begin(process)
    for process in pair:
        assert process.wait() == 0
    figures["two writing"] = 2 * (count // 2 // BATCH * BATCH) * size / (time.perf_counter() - began) / 1e9
    shutil.rmtree(folder / "two")

    damaged = there = 0
    for seed in range(5):
        process = child(name, folder / "killed", size, (2 << 30) // size, seed)
        begin(process)
        time.sleep(0.05 + random.Random(seed).random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
    began = time.perf_counter()
    store = STORES[name](folder / "killed")
    figures["reopened"] = 1e3 * (time.perf_counter() - began)
    for seed in range(5):
        found, broken = count_readable(store, seed, buffers)
        there, damaged = there + found, damaged + broken
    figures["there"], figures["damaged"] = there, damaged
    shutil.rmtree(folder / "killed")
    return figures


def measure_many(count: int, folder: Path) -> dict[str, float]:
    """Opening a store of many values, and evicting from it."""
    store = DiskStore(folder / "many", LARGE)
    value = memoryview(bytes(1024))
    for keys in batches(0, count):
        store.write(keys, [value] * BATCH)
    began = time.perf_counter()
    opened = DiskStore(folder / "many", LARGE)
    figures = {"open": 1e3 * (time.perf_counter() - began)}
    began = time.perf_counter()
    assert opened.read([key_of(0, 0)], [memoryview(bytearray(1024))]) == 1
    figures["first read"] = 1e3 * (time.perf_counter() - began)
    smaller = DiskStore(folder / "many", count * 4096)
    began = time.perf_counter()
    for keys in batches(1, count // 8):
        smaller.write(keys, [value] * BATCH)
    figures["written when full"] = 1e6 * (time.perf_counter() - began) / (count // 8)
    figures["evicted"] = smaller.stats().evicted
    return figures


def main() -> None:
    """Measures, and prints a table."""
    if sys.argv[1:2] == ["--child"]:
        name, folder, *numbers = sys.argv[2:]
        run_child(name, folder, *map(int, numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--total", type=int, default=256, help="MiB of values of each size")
    parser.add_argument("--many", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        columns = ("write", "read", "marked", "evict", "open", "two writing", "there", "damaged", "reopened")
        print(f"{'':17}" + "".join(f"{column:>12}" for column in columns))
        for size in SIZES:
            for name in arguments.stores.split(","):
                figures = measure(name, size, arguments.total << 20, Path(folder))
                rows.append({"store": name, "size": size, **figures})
                print(
                    f"{name:9}{size >> 10:4} KiB" + "".join(f"{figures[column]:12.4g}" for column in columns),
                    flush=True,
                )
        if arguments.many:
            rows.append({"many": arguments.many, **measure_many(arguments.many, Path(folder))})
            print(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
