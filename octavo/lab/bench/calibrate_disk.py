"""What reads and writes of a KV store on a disk cost: measured with values of a model's block size."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.kvstore.disk import DiskStore
from octavo.lab.simulate.step_profile import StoreCosts

#: Bytes of the blocks that are written and read at once, at most so many blocks and at least two.
_BYTES, _MOST_BLOCKS = 64 << 20, 256


def calibrate_disk(folder: str, block_bytes: int, *, rounds: int = 3) -> StoreCosts:
    """Writes and reads values in a store of its own in ``folder``, which is removed.

    Values are written as an engine does, without syncing, so the system writes them to the disk later. They are read
    from the disk: before, they are synced, and the system is asked to drop its copies in memory, which Linux does.

    Raises:
        ConfigError: the folder cannot be used.
    """
    count = max(2, min(_MOST_BLOCKS, _BYTES // block_bytes))
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="calibrate-", dir=folder) as place:
            store = DiskStore(place, 4 * (count + 1) * (rounds + 1) * (block_bytes + (1 << 16)))
            measured = [_measure(store, Path(place), number, count, block_bytes) for number in range(rounds + 1)]
            store.close()
    except OSError as e:
        raise ConfigError(f"cannot be used to measure a disk: {e.strerror}", file=folder) from None
    write, one, many = (
        statistics.median(seconds) for seconds in zip(*measured[1:], strict=True)
    )  # the first is warm-up
    read = max(0.0, (many - one) / ((count - 1) * block_bytes))
    call = max(0.0, one - read * block_bytes)
    return StoreCosts(call=call, read=read, write=max(0.0, write / count - call) / block_bytes)


def _measure(store: DiskStore, place: Path, number: int, count: int, block_bytes: int) -> tuple[float, float, float]:
    """Seconds to write ``count`` values, to read one, and to read ``count`` others."""
    keys = [bytes([number]) * 8 + index.to_bytes(24, "little") for index in range(count + 1)]
    blocks = [memoryview(bytearray(os.urandom(block_bytes))) for _ in keys]
    start = time.perf_counter()
    if store.write(keys[1:], blocks[1:]) < count:
        raise ConfigError(f"could not be written: {store.stats().trouble or 'it is full'}", file=str(place))
    write = time.perf_counter() - start
    store.write(keys[:1], blocks[:1])
    for file in place.glob("??/*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return write, _seconds_to_read(store, keys[:1], blocks[:1]), _seconds_to_read(store, keys[1:], blocks[1:])


def _seconds_to_read(store: DiskStore, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> float:
    start = time.perf_counter()
    found = store.contains(keys)
    if store.read(keys[:found], blocks[:found]) < len(keys):
        raise ConfigError(f"values that were written are not there: {store.stats().trouble}")
    return time.perf_counter() - start
