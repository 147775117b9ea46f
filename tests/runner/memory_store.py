"""A KV store in memory, for tests of what uses one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from octavo.core.stats import StoreTierStats
from octavo.kvstore.store import KEY_BYTES, KVStore


class MemoryStore(KVStore):
    """Keeps every value. ``gate`` holds calls up while it is not set."""

    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.counts = StoreTierStats(name)
        self.closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        self.gate.wait()
        return next((i for i, key in enumerate(keys) if key not in self.values), len(keys))

    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        self.gate.wait()
        found = 0
        for key, value in zip(keys, values, strict=True):
            self.counts.asked += 1
            if len(self.values.get(key, b"")) != value.nbytes:
                break
            value[:] = self.values[key]
            found += 1
        self.counts.found += found
        return found

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        self.gate.wait()
        for key, value in zip(keys, values, strict=True):
            assert len(key) == KEY_BYTES
            self.counts.written += key not in self.values
            self.values[key] = bytes(value)
        return len(keys)

    def stats(self) -> StoreTierStats:
        return self.counts

    def close(self) -> None:
        self.closed = True
