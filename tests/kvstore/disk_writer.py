"""A process that writes to a store on disk until it has written all, or is killed.

    python -m tests.kvstore.disk_writer FOLDER MAX_BYTES VALUE_BYTES COUNT SEED [killed-in-write]

It prints a line when it begins, and at the end what it has written and evicted. With ``killed-in-write`` it kills
itself when half of its fourth value is on the disk.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from octavo.kvstore.disk import DiskStore
from octavo.kvstore.namespace import store_key

NAMESPACE = bytes(range(32))


def key_of(seed: int, number: int) -> bytes:
    return store_key(NAMESPACE, 0, f"{seed} {number}".encode())


def value_of(key: bytes, size: int) -> memoryview:
    return memoryview((key * (size // len(key) + 1))[:size])


def main() -> None:
    folder, *numbers = sys.argv[1:6]
    max_bytes, size, count, seed = map(int, numbers)
    store = DiskStore(folder, max_bytes)
    if sys.argv[6:] == ["killed-in-write"]:
        writev, calls = os.writev, iter(range(count))

        def torn(file: int, parts: Sequence[memoryview]) -> int:
            if next(calls) == 3:
                writev(file, [parts[0], memoryview(parts[1])[: size // 2]])
                os.kill(os.getpid(), signal.SIGKILL)
            return writev(file, parts)

        os.writev = torn  # type: ignore[assignment]
    print("begins", flush=True)
    for number in range(count):
        key = key_of(seed, number)
        store.write([key], [value_of(key, size)])
    stats = store.stats()
    print(stats.written, stats.evicted, stats.dropped, stats.errors, flush=True)


if __name__ == "__main__":
    main()
