from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from octavo.cli import chat_lines
from octavo.cli.chat_lines import HistoryFile, default_path


def test_what_is_typed_is_there_in_the_next_conversation_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "octavo" / "history"
    first, second = HistoryFile(path), HistoryFile(path)
    assert first.load() == []
    first.append("one")
    second.append("two\nlines 'é' \x1b")
    assert HistoryFile(path).load() == ["one", "two\nlines 'é' \x1b"]
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    first.append("three")
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    path.write_text("".join(json.dumps(f"text {i}") + "\n" for i in range(1500)))
    assert HistoryFile(path).load() == [f"text {i}" for i in range(500, 1500)]
    assert path.read_bytes().count(b"\n") == 1000
    HistoryFile(path).append("x" * 20_001)
    assert path.read_bytes().count(b"\n") == 1000
    monkeypatch.setattr(chat_lines, "_MAX_BYTES", 100)
    texts = HistoryFile(path).load()
    assert texts == [f"text {i}" for i in range(1500 - len(texts), 1500)] and 5 < len(texts) < 10
    assert path.stat().st_size <= 100


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"a"\n{"b": 1}\n\xff\xfe\n\n"c\n"d"\n')
    history = HistoryFile(path)
    assert history.load() == ["a", "d"]
    assert history.failure is None


def test_a_file_that_cannot_be_used_is_said_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = HistoryFile(tmp_path / "file" / "history")
    assert history.load() == []
    assert history.failure is not None and "are not remembered" in history.failure
    history.append("a")


def test_it_is_where_programs_keep_their_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chat_lines.sys, "platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "octavo" / "chat_history.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_path() == Path(os.path.expanduser("~/.local/state/octavo/chat_history.jsonl"))
