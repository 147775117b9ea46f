"""What reading a file of bounded size takes and refuses."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 200_000])
def test_a_file_is_read_whole_up_to_its_bound(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    content = bytes(range(256)) * (size // 256 + 1)
    file.write_bytes(content[:size])
    assert read_bounded(file, size) == content[:size]
    if size:
        with pytest.raises(ConfigError, match=f"{size} bytes; at most {size - 1} are read"):
            read_bounded(file, size - 1)


def test_a_small_file_takes_little_memory_whatever_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_bounded(file, 128 << 20) == b"{}"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing is missing"):
        read_bounded(tmp_path / "missing", 10)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_bounded(tmp_path, 10)
