"""The KV store on disk: damage, kills, several processes, the bound, full disks, and modes of files."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.kvstore import disk, frames
from octavo.kvstore.disk import DiskContents, DiskStore
from octavo.kvstore.namespace import namespace, namespace_name, store_key
from tests.busy_machine import PATIENCE, eventually
from tests.kvstore.disk_writer import key_of, value_of

NAMESPACE = namespace({"model": "a"})
MIB = 1 << 20


def keys(count: int, of: bytes = NAMESPACE) -> list[bytes]:
    return [store_key(of, 0, number.to_bytes(4, "big")) for number in range(count)]


def values(count: int, size: int = 1000, seed: int = 0) -> list[memoryview]:
    draw = random.Random(seed)
    return [memoryview(draw.randbytes(size)) for _ in range(count)]


def empty(count: int, size: int = 1000) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def has(store: DiskStore, key: bytes) -> bool:
    return store.contains([key]) == 1


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*") if len(path.name) == 64)


def temporary_files(folder: Path) -> list[Path]:
    return [*folder.glob("??/*-*")]


def used_bytes(folder: Path) -> int:
    total = 0
    for path in stored_files(folder):
        try:
            total += 512 * path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(folder: Path) -> DiskStore:
    return DiskStore(folder, 64 * MIB)


def test_values_come_back_in_order_until_one_is_missing(store: DiskStore, folder: Path) -> None:
    names, data = keys(5), values(5)
    assert store.contains(names) == store.read(names, empty(5)) == 0
    assert store.write([*names[:3], names[4]], [*data[:3], data[4]]) == 4
    buffers = empty(5)
    assert store.contains(names) == store.read(names, buffers) == 3
    assert buffers[:3] == data[:3]
    again = DiskStore(folder, 64 * MIB)
    assert again.read(names[4:], buffers[4:]) == 1 and buffers[4] == data[4]
    assert again.write(names, data) == 5
    stats = again.stats()
    assert (stats.written, stats.asked, stats.found, stats.damaged, stats.errors) == (1, 1, 1, 0, 0)
    assert (stats.bytes_read, stats.bytes_written, stats.trouble) == (1000, 1000, "")
    assert store.stats().asked == 1 + 4 and store.stats().found == 3
    assert DiskStore(folder, 64 * MIB).stats().held_bytes == used_bytes(folder)


def test_a_closed_store_has_nothing(store: DiskStore) -> None:
    store.write(keys(1), values(1))
    store.close()
    store.close()
    assert store.contains(keys(1)) == store.read(keys(1), empty(1)) == store.write(keys(1), values(1)) == 0


def test_ten_thousand_damaged_values_are_never_used(store: DiskStore, folder: Path) -> None:
    """Torn, cut, lengthened, changed, zeroed, of another key, of another version: missing, and removed."""
    draw = random.Random(5)
    size = 600
    names = keys(64)
    paths = [folder / key.hex()[16:18] / key.hex() for key in names]
    whole = values(64, size)
    assert store.write(names, whole) == 64
    files = [path.read_bytes() for path in paths]
    buffer = memoryview(bytearray(size))
    for number in range(10_000):
        i = draw.randrange(64)
        content = bytearray(files[i])
        kind = number % 7
        if kind == 0:  # flipped bits
            for _ in range(draw.randrange(1, 4)):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[draw.randrange(len(content)) :]
        elif kind == 2:
            content += draw.randbytes(draw.randrange(1, 100))
        elif kind == 3:  # torn: the end has not reached the disk
            begin = draw.randrange(len(content) - 1)
            content[begin:] = bytes(len(content) - begin)
        elif kind == 4:
            content = bytearray(files[(i + draw.randrange(1, 64)) % 64])
        elif kind == 5:
            content[: frames.FRAME_BYTES] = frames.pack(names[i], whole[i], draw.choice([0, 2, 3, 1 << 31]))
        else:  # an older value's end
            begin = draw.randrange(frames.FRAME_BYTES, len(content) - 1)
            content[begin:] = draw.randbytes(len(content) - begin)
        if content == files[i]:
            continue
        paths[i].write_bytes(content)
        assert store.read([names[i]], [buffer]) == 0, (number, kind)
        assert not paths[i].exists()
    stats = store.stats()
    assert stats.damaged > 9_900 and stats.found == stats.errors == 0
    # The place is free again.
    assert store.write(names, whole) == 64 and store.read(names, empty(64, size)) == 64


def test_what_a_living_writer_writes_stays(folder: Path, store: DiskStore) -> None:
    assert store.write(keys(1), values(1)) == 1
    (writer,) = (folder / "writing").iterdir()
    unfinished = next(folder.glob("??")) / f"{writer.name}-7"
    unfinished.touch()
    DiskStore(folder, 64 * MIB).close()
    assert unfinished.exists()
    store.close()
    assert [*(folder / "writing").iterdir()] == []


def test_a_value_of_another_size_is_removed(store: DiskStore) -> None:
    store.write(keys(1), values(1))
    assert store.read(keys(1), empty(1, 999)) == 0
    assert store.stats().damaged == 1 and not has(store, keys(1)[0])


def test_what_is_no_file_is_never_followed_or_opened(store: DiskStore, folder: Path, tmp_path: Path) -> None:
    link, fifo, directory = keys(3)
    secret = tmp_path / "secret"
    secret.write_bytes(frames.pack(link, values(1)[0]) + values(1)[0])
    for key in keys(3):
        (folder / key.hex()[16:18]).mkdir(exist_ok=True)
    (folder / link.hex()[16:18] / link.hex()).symlink_to(secret)
    os.mkfifo(folder / fifo.hex()[16:18] / fifo.hex())
    (folder / directory.hex()[16:18] / directory.hex()).mkdir()
    for key in keys(3):
        assert store.read([key], empty(1)) == 0
    assert secret.stat().st_size == 1064
    assert store.stats().errors == 0


def writer(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvstore.disk_writer", str(folder), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def test_a_writer_killed_in_the_middle_of_a_value_leaves_none(folder: Path) -> None:
    size = 200_000
    process = writer(folder, 64 * MIB, size, 10, 0, "killed-in-write")
    assert process.wait(PATIENCE) == -signal.SIGKILL
    (leftover,) = temporary_files(folder)
    assert 0 < leftover.stat().st_size < size
    store = DiskStore(folder, 64 * MIB)
    assert temporary_files(folder) == []
    assert len([*(folder / "writing").iterdir()]) == 1  # the living one
    assert store.contains([key_of(0, number) for number in range(10)]) == 3
    assert store.read([key_of(0, number) for number in range(10)], empty(10, size)) == 3


def test_kills_at_any_time_leave_whole_values_only(folder: Path) -> None:
    size, draw = 500_000, random.Random(3)
    for seed in range(4):
        process = writer(folder, 1 << 30, size, 100_000, seed)
        eventually(lambda seed=seed: (folder / key_of(seed, 2).hex()[16:18] / key_of(seed, 2).hex()).exists())  # type: ignore[misc]
        time.sleep(draw.random() / 20)
        process.kill()
        process.wait()
    store = DiskStore(folder, 1 << 30)
    assert temporary_files(folder) == []
    buffer = memoryview(bytearray(size))
    found = 0
    for seed in range(4):
        for number in range(store.contains([key_of(seed, number) for number in range(2000)])):
            assert store.read([key_of(seed, number)], [buffer]) == 1
            assert buffer == value_of(key_of(seed, number), size)
            found += 1
    assert found == len(stored_files(folder)) >= 12
    assert store.stats().damaged == 0


def test_two_processes_write_and_evict_within_the_bound(folder: Path) -> None:
    bound, size, count = 4 * MIB, 20_000, 700
    processes = [writer(folder, bound, size, count, seed) for seed in (1, 2)]
    most = 0
    reader = DiskStore(folder, bound)
    buffer = memoryview(bytearray(size))
    while any(process.poll() is None for process in processes):
        most = max(most, used_bytes(folder))
        for path in stored_files(folder)[:20]:  # beside their writers, and while they are evicted
            reader.read([bytes.fromhex(path.name)], [buffer])
    assert reader.stats().damaged == reader.stats().errors == 0
    written = evicted = 0
    for process in processes:
        assert process.stdout is not None
        numbers = [int(word) for word in process.stdout.read().split()]
        assert numbers[2:] == [0, 0] and numbers[0] == count
        written, evicted = written + numbers[0], evicted + numbers[1]
    assert bound // 2 < most <= bound
    left = {bytes.fromhex(path.name) for path in stored_files(folder)}
    assert len(left) >= written - evicted - reader.stats().evicted
    # What the last writer wrote last is there.
    assert any({key_of(seed, count - number) for number in (1, 2, 3)} <= left for seed in (1, 2))


def test_the_least_recently_used_values_go_first(folder: Path) -> None:
    store = DiskStore(folder, MIB)
    names, data = keys(40), values(40, 60_000)  # 15 pages with the frame; 7/8 of the bound have 14 values
    assert store.write(names[:12], data[:12]) == 12
    assert store.read(names[:4], empty(4, 60_000)) == 4
    assert store.write(names[4:6], data[4:6]) == 2
    assert store.write(names[12:18], data[12:18]) == 6
    kept = [number for number in range(18) if has(store, names[number])]
    evicted = store.stats().evicted
    assert 3 <= evicted <= 4
    assert set(range(18)) - {*kept} == {11, 10, 9, 8} - ({8} if evicted == 3 else set())
    assert used_bytes(folder) <= MIB


def test_the_end_of_a_chain_goes_before_its_beginning(folder: Path) -> None:
    store = DiskStore(folder, MIB)
    assert store.write(keys(12), values(12, 60_000)) == 12
    assert store.write(keys(20)[12:], values(8, 60_000)) == 8
    left = [has(store, key) for key in keys(12)]
    assert left == sorted(left, reverse=True) and left[0] and not left[-1]


def test_values_of_all_namespaces_and_small_ones_count(folder: Path) -> None:
    other = namespace({"model": "b"})
    store = DiskStore(folder, MIB)
    store.write(keys(250), values(250, 10))  # a page each
    store.write(keys(250, other), values(250, 10))
    assert used_bytes(folder) <= MIB
    assert not any(has(store, key) for key in keys(100)) and all(has(store, key) for key in keys(250, other)[:100])


@pytest.mark.parametrize("size", [MIB // 2, MIB - 5000])
def test_large_values_fit_and_larger_ones_than_the_bound_are_dropped(folder: Path, size: int) -> None:
    store = DiskStore(folder, MIB)
    for number in range(3):
        assert store.write(keys(3)[number : number + 1], values(1, size)) == 1
        assert used_bytes(folder) <= MIB
    assert store.write(keys(4)[3:], values(1, MIB)) == 0
    assert store.stats().dropped == 1 and store.stats().errors == 0
    assert has(store, keys(3)[2])


def test_a_visit_of_a_large_store_looks_at_some_of_it(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it is trimmed, by one visit after the other."""
    monkeypatch.setattr(disk, "_VISIT_VALUES", 50)
    store.write(keys(800), values(800, 100))
    seen = []
    values_in = disk._values_in

    def counted(root: str, shard: str) -> Iterator[disk._Value]:
        for value in values_in(root, shard):
            seen.append(value)
            yield value

    monkeypatch.setattr(disk, "_values_in", counted)
    opened = DiskStore(folder, 64 * MIB)
    assert 50 <= len(seen) <= 80
    assert opened.stats().held_bytes == pytest.approx(800 * 4096, rel=0.3)
    smaller = DiskStore(folder, MIB)
    smaller.write(keys(1000)[800:], values(200, 100))
    assert used_bytes(folder) <= MIB


def test_a_full_disk_is_one_warning_and_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.kvstore.breaker.FIRST_PAUSE", 0.0)
    store = DiskStore(folder, 64 * MIB)
    store.write(keys(2), values(2))
    writev, is_full = os.writev, True

    def full(file: int, parts: Sequence[memoryview]) -> int:
        return writev(file, [parts[0], memoryview(parts[1])[:500]]) if is_full else writev(file, parts)

    monkeypatch.setattr(os, "writev", full)
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(5):
            assert store.write(keys(4), values(4)) == 2
        (record,) = caplog.records
        assert record.levelname == "WARNING" and os.strerror(errno.ENOSPC) in record.message
        stats = store.stats()
        assert (stats.errors, stats.dropped, stats.trouble) == (5, 10, os.strerror(errno.ENOSPC))
        assert temporary_files(folder) == []
        assert store.read(keys(2), empty(2)) == 2
        is_full = False
        assert store.write(keys(4), values(4)) == 4
        assert store.stats().trouble == "" and len(caplog.records) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_is_smaller_than_the_bound(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(small_disk, 64 * MIB)
    with caplog.at_level(logging.INFO, "octavo"):
        stored = sum(store.write([key], [value]) for key, value in zip(keys(30), values(30, 60_000), strict=True))
    assert 10 <= stored <= 17 and len(caplog.records) == 1
    assert store.read(keys(30), empty(30, 60_000)) == stored
    assert temporary_files(small_disk) == []


def test_a_folder_that_vanishes_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kvstore.breaker.FIRST_PAUSE", 0.0)
    store = DiskStore(folder, 64 * MIB)
    store.write(keys(2), values(2))
    shutil.rmtree(folder)
    assert store.read(keys(2), empty(2)) == 0
    eventually(lambda: store.write(keys(2), values(2)) == 2)
    assert store.read(keys(2), empty(2)) == 2
    shutil.rmtree(folder)
    folder.write_text("no folder")
    assert [store.write(keys(2), values(2)) for _ in range(3)] == [0, 0, 0]
    assert store.read(keys(2), empty(2)) == 0
    assert folder.read_text() == "no folder"


def test_a_disk_that_cannot_be_read_is_one_warning(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(keys(2), values(2))

    def broken(file: int, parts: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "readv", broken)
    with caplog.at_level(logging.INFO, "octavo"):
        assert [store.read(keys(2), empty(2)) for _ in range(4)] == [0, 0, 0, 0]
    (record,) = caplog.records
    assert os.strerror(errno.EIO) in record.message
    assert store.stats().trouble == os.strerror(errno.EIO)
    assert store.stats().damaged == 0


def test_nobody_else_may_read_what_is_stored(folder: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(folder, MIB, NAMESPACE, {"model": "m"})
        store.write(keys(3), values(3))
    finally:
        os.umask(before)
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert store.read(keys(3), empty(3)) == 3


def test_folders_that_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskStore(folder, MIB)

    def refused(path: Path, why: str) -> None:
        with pytest.raises(ConfigError, match=why) as caught:
            DiskStore(path, MIB)
        assert str(path.resolve()) in str(caught.value)

    for mode in (0o770, 0o702):
        folder.chmod(mode)
        refused(folder, f"may be written by others .mode {mode:o}.*mode 700")
    folder.chmod(0o755)
    DiskStore(folder, MIB)
    (tmp_path / "documents").mkdir(mode=0o700)
    (tmp_path / "documents" / "letter").touch()
    refused(tmp_path / "documents", "holds no KV store: a store is only made in a new or empty folder")
    assert [path.name for path in (tmp_path / "documents").iterdir()] == ["letter"]
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "cannot be used as a KV store")
    (folder / "ab").symlink_to(tmp_path / "documents")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        DiskStore(folder, MIB)
    (folder / "ab").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(folder, "belongs to another user")


def test_a_link_to_a_folder_is_a_folder(folder: Path, tmp_path: Path) -> None:
    DiskStore(folder, MIB).write(keys(1), values(1))
    (tmp_path / "link").symlink_to(folder)
    assert has(DiskStore(tmp_path / "link", MIB), keys(1)[0])


def test_threads_share_a_store(folder: Path) -> None:
    store = DiskStore(folder, MIB)
    names, data = keys(200), values(200, 9000)
    wrong = []

    def use(seed: int) -> None:
        draw, buffer = random.Random(seed), memoryview(bytearray(9000))
        for _ in range(300):
            i = draw.randrange(200)
            if draw.random() < 0.5:
                store.write([names[i]], [data[i]])
            elif store.read([names[i]], [buffer]) and buffer != data[i]:
                wrong.append(i)
            store.stats()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert not wrong and stats.damaged == stats.dropped == stats.errors == 0
    assert stats.found > 0 and stats.evicted > 0


def test_contents_by_namespace(folder: Path) -> None:
    other = namespace({"model": "b"})
    store = DiskStore(folder, 64 * MIB, NAMESPACE, {"model": "a", "dtype": "bfloat16"})
    store.write(keys(3), values(3))
    store.write(keys(2, other), values(2))
    contents = DiskContents(str(folder))
    one, two = sorted(contents.namespaces(), key=lambda each: each.values, reverse=True)
    assert (one.name, one.about, one.values, one.bytes) == (
        namespace_name(NAMESPACE),
        {"model": "a", "dtype": "bfloat16"},
        3,
        3 * 4096,
    )
    assert (two.name, two.about, two.values) == (namespace_name(other), {}, 2)
    assert one.oldest is not None and one.newest is not None and 0 <= one.newest <= one.oldest < PATIENCE
    (folder / "about" / f"{namespace_name(other)}.json").write_text("{no json")
    assert all(each.about == {} for each in contents.namespaces() if each.name == two.name)
    assert contents.clear(two.name) == (2, 2 * 4096)
    assert [each.name for each in contents.namespaces()] == [one.name]
    assert contents.clear() == (3, 3 * 4096)
    assert contents.namespaces() == [] and list((folder / "about").iterdir()) == []
    assert store.write(keys(3), values(3)) == 3  # in use all the time


def test_contents_of_no_store(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=str(place)):
            DiskContents(str(place))
    assert list(tmp_path.iterdir()) == []
