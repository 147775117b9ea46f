"""The cache of models."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from octavo.loader.files import publish


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def test_what_killed_processes_left_of_any_model_is_removed_when_the_next_is_made(tmp_path: Path) -> None:
    for name in ("begun-bfloat16-1.partial", "rested-2.partial"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name)
    for name in ("begun-bfloat16-1.lock", "ended-3.lock"):
        (tmp_path / name).touch()
    (tmp_path / "whole-4").mkdir()
    publish(tmp_path / "new-5", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new-5", "whole-4"]


def test_what_another_process_is_filling_stays(tmp_path: Path) -> None:
    (tmp_path / "busy-1.partial").mkdir()
    with FileLock(tmp_path / "busy-1.lock"):
        publish(tmp_path / "new-2", fill)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["busy-1.lock", "busy-1.partial", "new-2"]
