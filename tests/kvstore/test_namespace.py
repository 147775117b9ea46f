"""Namespaces, keys, and digests of models' files."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.kvstore import namespace as module
from octavo.kvstore.namespace import model_digest, namespace, namespace_name, start_model_digest, store_key
from octavo.kvstore.store import KEY_BYTES

FACTS: dict[str, Any] = {"model": "ab", "dtype": "bfloat16", "rank": [0, 2], "layout": {"block": 16, "x": b"\1"}}


def test_a_namespace_is_of_all_facts_in_any_order() -> None:
    first = namespace(FACTS)
    assert len(first) == KEY_BYTES
    assert namespace(dict(reversed(FACTS.items()))) == first
    assert first == namespace({**FACTS, "rank": (0, 2)})
    changed = [
        {**FACTS, "rank": [2, 0]},
        {**FACTS, "rank": [0, 2.0]},
        {**FACTS, "rank": "[0, 2]"},
        {**FACTS, "model": "abc"},
        {**FACTS, "more": None},
        {**FACTS, "layout": {"block": 16, "x": "01"}},
        {**FACTS, "layout": {"block": 16, "x": {"bytes": "01"}}},
        {name: value for name, value in FACTS.items() if name != "dtype"},
    ]
    assert len({first, *map(namespace, changed)}) == 1 + len(changed)


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), object(), {1: 2}])
def test_a_fact_whose_text_is_not_its_value_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        namespace({"fact": [value]})


def test_keys_name_their_namespace_and_differ_in_group_and_content() -> None:
    one, other = namespace(FACTS), namespace({})
    keys = [
        store_key(ns, group, digest) for ns in (one, other) for group in (0, 1) for digest in (b"a" * 16, b"b" * 16)
    ]
    assert len(set(keys)) == 8 and {len(key) for key in keys} == {KEY_BYTES}
    assert [namespace_name(key) for key in keys] == [namespace_name(one)] * 4 + [namespace_name(other)] * 4
    # Two namespaces with one name have keys of their own.
    assert store_key(one[:8] + other[8:], 0, b"a" * 16) not in keys


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors", "tokenizer.json", "README.md", "old.bin", "code.py"):
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read; files count as settled."""
    names: list[str] = []
    file_digest = hashlib.file_digest

    def noted(stream: Any, name: str) -> Any:
        names.append(Path(stream.name).name)
        return file_digest(stream, name)

    monkeypatch.setattr(module.hashlib, "file_digest", noted)
    monkeypatch.setattr(module, "_SETTLED_SECONDS", -1.0)
    return names


def test_weights_and_configuration_are_read_once(model: Path, tmp_path: Path, reads: list[str]) -> None:
    digest = model_digest([model], tmp_path / "notes")
    assert len(bytes.fromhex(digest)) == 32
    assert reads == ["a.safetensors", "b.safetensors", "code.py", "config.json"]
    assert model_digest([str(model)], tmp_path / "notes") == digest and len(reads) == 4
    assert start_model_digest([model], tmp_path / "notes").result(30) == digest and len(reads) == 4
    for path in [tmp_path / "notes", *(tmp_path / "notes").iterdir()]:
        assert path.stat().st_mode & 0o77 == 0
    (model / "tokenizer.json").write_text("changed")
    (model / "README.md").unlink()
    assert model_digest([model], tmp_path / "notes") == digest and len(reads) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "b.safetensors").write_text("content of B.safetensors"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "c.safetensors").write_text("more"),
        lambda folder: (folder / "a.safetensors").rename(folder / "z.safetensors"),
    ],
)
def test_changes_are_noticed(model: Path, tmp_path: Path, reads: list[str], change: Callable[[Path], object]) -> None:
    before = model_digest([model], tmp_path / "notes")
    times = os.stat(model / "b.safetensors")
    change(model)
    # Times that are set back do not hide it.
    os.utime(model / "b.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_digest([model], tmp_path / "notes") != before


def test_a_copy_has_the_same_digest_and_a_file_by_any_name(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_digest([copy], tmp_path / "notes") == model_digest([model], tmp_path / "notes")
    (copy / "x.gguf").write_text("weights")
    (copy / "y.gguf").write_text("weights")
    one, two = (model_digest([copy / name, copy / "config.json"], tmp_path / "notes") for name in ("x.gguf", "y.gguf"))
    assert one == two != model_digest([copy / "x.gguf"], tmp_path / "notes")


def test_files_that_change_now_are_not_remembered(model: Path, tmp_path: Path) -> None:
    """A change within the resolution of a file's times would not be noticed."""
    model_digest([model], tmp_path / "notes")
    (note,) = (tmp_path / "notes").iterdir()
    assert note.read_bytes() == b""


def test_a_broken_note_is_made_again(model: Path, tmp_path: Path, reads: list[str]) -> None:
    digest = model_digest([model], tmp_path / "notes")
    (note,) = (tmp_path / "notes").iterdir()
    note.write_bytes(note.read_bytes()[:40])
    assert model_digest([model], tmp_path / "notes") == digest and len(reads) == 8
    assert model_digest([model], tmp_path / "notes") == digest and len(reads) == 8


def test_who_asks_at_once_waits_for_the_one_that_reads(model: Path, tmp_path: Path, reads: list[str]) -> None:
    digests: list[str] = []
    threads = [
        threading.Thread(target=lambda: digests.append(model_digest([model], tmp_path / "notes"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4 and len(set(digests)) == 1 and len(reads) == 4


def test_without_a_folder_for_notes_it_is_read_each_time(model: Path, tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "notes").touch()
    assert model_digest([model], tmp_path / "notes") == model_digest([model], tmp_path / "notes")
    assert len(reads) == 8


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read: No such file"):
        model_digest([tmp_path / "none.gguf"], tmp_path / "notes")
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be read"):
        start_model_digest([tmp_path / "none.gguf"], tmp_path / "notes").result(30)
