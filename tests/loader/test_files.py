"""The cache of models, and downloads from the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub import errors

from octavo.core.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.loader.files import publish
from octavo.loader.resolve import resolve_model


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


def answer(kind: type[Exception]) -> Exception:
    """An error of huggingface_hub without the HTTP response its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub's own words")
    return error


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (errors.RepositoryNotFoundError, ModelNotFoundError, "no model 'owner/name'.*HF_TOKEN"),
        (errors.RevisionNotFoundError, ModelNotFoundError, "no revision 'v9'"),
        (errors.GatedRepoError, DownloadError, "consent.*HF_TOKEN"),
        (errors.LocalEntryNotFoundError, DownloadError, "not on this machine.*HF_HUB_OFFLINE"),
        (errors.HFValidationError, ModelNotFoundError, "no valid hub id"),
        (ConnectionError, DownloadError, "could not be fetched: ConnectionError: the hub's own words"),
    ],
)
def test_the_hubs_errors_become_ours(
    monkeypatch: pytest.MonkeyPatch, theirs: type[Exception], ours: type[Exception], words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise answer(theirs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ours, match=words):
        resolve_model("owner/name", revision="v9")


class Hub:
    """Stands in for ``snapshot_download``: writes, into a folder, those of a repository's files that are asked for."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.files = files
        self.asked: tuple[str, str | None] | None = None
        self.taken: list[str] = []

    def __call__(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked = (repo, revision)
        self.taken = [
            *huggingface_hub.utils.filter_repo_objects(
                self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        ]
        for file in self.taken:
            (self.folder / file).parent.mkdir(exist_ok=True)
            (self.folder / file).write_text("{}")
        return str(self.folder)


def test_only_harmless_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "pytorch_model.bin",
        "model.pt",
        "model.pkl",
        "modeling_custom.py",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
        "model.gguf",
    ]
    hub = Hub(tmp_path, files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model("owner/name", revision="main") == tmp_path
    assert hub.asked == ("owner/name", "main")
    assert hub.taken == files[:6]


def test_without_weights_only_descriptions_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    described = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors", "model.safetensors.index.json"]
    hub = Hub(tmp_path, described + weights)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model("owner/name", weights=False) == tmp_path
    assert hub.taken == described
    # Offline, what was fetched then is all there is.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="not fetched when the hub could be reached"):
        resolve_model("owner/name")


def test_a_repository_of_pickles_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="pickled weights are never"):
        resolve_model("owner/name")


def test_a_repository_of_gguf_files_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"hf download owner/name .* give the path of the file"):
        resolve_model("owner/name")

    def unreachable(*args: object, **options: object) -> str:
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(DownloadError, match=r"cannot be reached.*hf download owner/name-GGUF"):
        resolve_model("owner/name-GGUF")


def offline(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    code = "from octavo.loader.resolve import resolve_model; print(resolve_model('owner/name'))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_offline_a_model_that_was_never_fetched_is_an_error(tmp_path: Path) -> None:
    result = offline(tmp_path)
    assert "DownloadError: the hub model 'owner/name' is not on this machine" in result.stderr


def test_offline_a_snapshot_from_before_is_used(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_text("")
    result = offline(tmp_path)
    assert result.stdout.strip() == str(snapshot), result.stderr
