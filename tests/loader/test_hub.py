from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from octavo.core.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.loader.resolve import resolve_model


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


def test_only_harmless_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_text("")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("owner/name", revision="main") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("owner/name", "main")
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
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
    taken = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(taken) == files[:5]


def test_a_repository_of_pickles_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="pickled weights are never"):
        resolve_model("owner/name")


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
