"""``octavo cache`` of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.kvstore.disk import DiskStore
from octavo.kvstore.namespace import namespace, namespace_name, store_key
from tests.cli.helpers import Capture, Run

NAMESPACES = [namespace({"model": name}) for name in ("a", "b")]
NAMES = [namespace_name(each) for each in NAMESPACES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path / "kv", 1 << 20, NAMESPACES[0], {"model": "tiny", "dtype": "float32\x1b[2J"})
    for each, count in zip(NAMESPACES, (3, 1), strict=True):
        store.write([store_key(each, 0, bytes([i])) for i in range(count)], [memoryview(bytes(5000))] * count)
    return tmp_path / "kv"


def test_ls_has_a_line_for_each_namespace(octavo: Run, capsys: Capture, folder: Path) -> None:
    assert octavo("cache", "ls", folder) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {"namespace", *NAMES}
    assert (
        lines[NAMES[0]].split()[1:4] == ["3", "24", "KiB"] and " ago  model tiny, dtype float32?[2J" in lines[NAMES[0]]
    )
    assert octavo("cache", "ls", folder, "--json", "-") == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)["namespaces"]}
    assert listed[NAMES[0]]["about"]["model"] == "tiny" and listed[NAMES[1]]["about"] == {}
    assert (listed[NAMES[1]]["values"], listed[NAMES[1]]["bytes"]) == (1, 8192)


def test_stat_sums(octavo: Run, capsys: Capture, folder: Path) -> None:
    assert octavo("cache", "stat", folder) == 0
    assert capsys.readouterr().out.startswith("4 blocks in 2 namespaces, 32 KiB, used ")
    assert octavo("cache", "stat", folder, "--namespace", NAMES[1], "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["values"], figures["bytes"]) == (1, 8192) and 0 <= figures["newest"] <= figures["oldest"]


def test_clear_removes_one_namespace_or_all(octavo: Run, capsys: Capture, folder: Path) -> None:
    assert octavo("cache", "clear", folder, "--namespace", NAMES[0]) == 0
    assert capsys.readouterr().out == "3 blocks removed, 24 KiB freed\n"
    assert octavo("cache", "clear", folder, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 1, "freed_bytes": 8192}
    assert octavo("cache", "ls", folder, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == {"namespaces": []}
    assert octavo("cache", "stat", folder) == 0
    assert capsys.readouterr().out == "0 blocks in 0 namespaces, 0 B\n"


def test_wrong_calls_change_nothing(octavo: Run, capsys: Capture, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for words, said in (
        (["ls"], "takes one of ls, stat, clear, and a folder or URL"),
        (["drop", folder], "takes one of ls, stat, clear"),
        (["clear", tmp_path / "other"], "holds no KV store"),
        (["ls", tmp_path / "none"], "No such file"),
        (["clear", "s3://user:secret@bucket"], "s3:// is no scheme of KV stores"),
        (["clear", folder, "--namespace", NAMES[0][:-1]], f"did you mean '{NAMES[0]}'?"),
    ):
        assert octavo("cache", *words) == 2
        error = capsys.readouterr().err
        assert said in error and "secret" not in error and error.count("\n") == 1
    assert len([*folder.glob("??/*")]) == 4 and list((tmp_path / "other").iterdir()) == []
