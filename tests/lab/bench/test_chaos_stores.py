"""KV stores of ``octavo bench chaos``: what their faults do, and answers that stay the same."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.core.stats import StoreTierStats
from octavo.kvstore.disk import DiskStore
from octavo.lab.bench.chaos_stores import ChaosStores
from tests.lab.bench.test_bench_chaos import chaos

HAS_SERVER = any(map(shutil.which, ("redis-server", "valkey-server")))
VALUE = bytes(range(256)) * 16


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(count)]


def found(store: DiskStore, count: int = 40) -> int:
    """How many values are there, each of which must be whole."""
    total = 0
    for key in keys(count):
        memory = bytearray(len(VALUE))
        if store.read([key], [memoryview(memory)]):
            assert memory == VALUE
            total += 1
    return total


def stats(store: DiskStore) -> StoreTierStats:
    return store.stats()


def test_damaged_values_are_missing_and_a_full_disk_ends(tmp_path: Path) -> None:
    stores, draw = ChaosStores(tmp_path, ("disk",)), random.Random(1)
    with stores.running() as options:
        disk = DiskStore(options["kv_disk"], options["kv_disk_bytes"], bytes(32))
        disk.write(keys(40), [memoryview(VALUE)] * 40)
        assert found(disk) == 40
        asyncio.run(stores.hit("damage", draw))
        left = found(disk)
        assert left < 40 and stats(disk).damaged > 0
        draw.uniform = lambda low, high: low  # type: ignore[method-assign,assignment]
        asyncio.run(stores.hit("fill", draw))
        assert found(disk) == left
        disk.close()
    assert not (tmp_path / "disk" / "filler").exists()


@pytest.mark.skipif(not HAS_SERVER, reason="needs redis-server")
def test_a_killed_server_is_there_again_and_a_paused_one_goes_on(tmp_path: Path) -> None:
    stores, draw = ChaosStores(tmp_path, ("shared",)), random.Random(1)
    draw.uniform = lambda low, high: low  # type: ignore[method-assign,assignment]
    with stores.running() as options:
        port = int(options["kv_store"].rpartition(":")[2].partition("/")[0])
        for kind in ("store-kill", "store-pause"):
            asyncio.run(stores.hit(kind, draw))
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(b"AUTH chaos\r\nPING\r\n")
                answer = b""
                while answer.count(b"\r\n") < 2:
                    answer += connection.recv(64)
                assert answer == b"+OK\r\n+PONG\r\n"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_other_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ChaosStores(tmp_path, ("tape",))


@pytest.mark.slow
def test_answers_stay_the_same_while_stores_fail(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = "disk,shared" if HAS_SERVER else "disk"
    flags = (
        "--clients",
        "6",
        "--duration",
        "20",
        "--interval",
        "0.5",
        "--stores",
        stores,
        "--faults",
        "kill,damage,fill",
    )
    code, report, printed = chaos(capsys, tiny_model, *flags)
    assert code == 0, printed
    assert report["stores"]["disk"]["written"] and set(report["faults"]) & {"damage disk", "fill disk"}, printed
