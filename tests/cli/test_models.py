"""``octavo list`` and ``octavo rm``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import Capture, Run
from tests.ollama_store import LIBRARY, Store

DIGEST = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with three entries of two models, and with things that are no entries."""
    cache = tmp_path / "cache"
    sizes = {
        f"builtin/tiny-{DIGEST}": 1000,
        f"models/tiny-bfloat16-{DIGEST}": 3000,
        f"models/my-bf-float32-{DIGEST}": 5,
    }
    for name, size in sizes.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "model.safetensors").write_bytes(b"x" * size)
    for other in (f"models/begun-bfloat16-{DIGEST}.partial", "models/notes", f"elsewhere/tiny-{DIGEST}"):
        (cache / other).mkdir(parents=True)
    (cache / "models" / f"tiny-bfloat16-{DIGEST}.lock").touch()
    (cache / "models" / f"link-bfloat16-{DIGEST}").symlink_to(tmp_path)
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return cache


def listed(octavo: Run, capsys: Capture) -> list[dict[str, Any]]:
    assert octavo("list", "--json", "-") == 0
    models: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["models"]
    return models


def test_list_shows_each_model_of_the_cache_with_its_size(octavo: Run, capsys: Capture, cache: Path) -> None:
    assert listed(octavo, capsys) == [
        {
            "name": "my-bf",
            "kind": "converted",
            "dtype": "float32",
            "base_model": False,
            "size_bytes": 5,
            "folder": str(cache / "models" / f"my-bf-float32-{DIGEST}"),
        },
        {
            "name": "tiny",
            "kind": "downloaded",
            "dtype": None,
            "base_model": False,
            "size_bytes": 1000,
            "folder": str(cache / "builtin" / f"tiny-{DIGEST}"),
        },
        {
            "name": "tiny",
            "kind": "converted",
            "dtype": "bfloat16",
            "base_model": False,
            "size_bytes": 3000,
            "folder": str(cache / "models" / f"tiny-bfloat16-{DIGEST}"),
        },
    ]
    assert octavo("list") == 0
    out = capsys.readouterr().out
    assert "2.93 KiB" in out
    assert out.splitlines()[-1].startswith("3.911 KiB in 3 folders")


def test_a_base_model_is_said_to_be_one(
    octavo: Run, capsys: Capture, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / f"models/gemma3-270m-bfloat16-{DIGEST}").mkdir()
    assert octavo("list") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gemma3-270m")]
    assert "converted (bfloat16), base model" in line
    monkeypatch.setattr("octavo.loader.resolve.resolve_model", lambda name: cache)
    assert octavo("pull", "gemma3-270m") == 0
    assert "gemma3-270m is a base model" in capsys.readouterr().err
    # A conversation is refused before anything is fetched.
    assert octavo("chat", "gemma3-270m") == 2
    said = capsys.readouterr().err
    assert "gemma3-270m is a base model" in said and "such as smollm2-135m" in said


def test_models_of_ollama_are_listed_and_never_removed(
    octavo: Run, capsys: Capture, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "ollama")
    monkeypatch.setenv("OLLAMA_MODELS", str(store.root))
    gguf = tmp_path / "weights"
    gguf.write_bytes(b"GGUF")
    store.add(f"{LIBRARY}/llama3.2/latest", gguf)
    [entry] = [model for model in listed(octavo, capsys) if model["kind"] == "ollama"]
    assert (entry["name"], entry["size_bytes"]) == ("llama3.2:latest", 4)
    assert octavo("list") == 0
    out = capsys.readouterr().out
    assert "llama3.2:latest" in out and out.splitlines()[-1].startswith("3.911 KiB in 3 folders")  # of our own
    before = sorted(store.root.rglob("*"))
    for name in ("llama3.2", "ollama:llama3.2"):
        assert octavo("rm", name) == 2
        assert "is a model of Ollama, which is only read" in capsys.readouterr().err
    assert sorted(store.root.rglob("*")) == before


def test_an_empty_cache_is_no_error(octavo: Run, capsys: Capture, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert listed(octavo, capsys) == []
    assert octavo("list") == 0
    assert not (tmp_path / "none").exists()


def test_rm_removes_all_of_a_model_and_nothing_else(octavo: Run, capsys: Capture, cache: Path) -> None:
    assert octavo("rm", "tiny") == 0
    assert "3.906 KiB freed" in capsys.readouterr().out
    assert [model["name"] for model in listed(octavo, capsys)] == ["my-bf"]
    left = sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.parent != cache)
    assert left == [
        f"elsewhere/tiny-{DIGEST}",
        f"models/begun-bfloat16-{DIGEST}.partial",
        f"models/link-bfloat16-{DIGEST}",
        f"models/my-bf-float32-{DIGEST}",
        f"models/my-bf-float32-{DIGEST}/model.safetensors",
        "models/notes",
    ]


def test_rm_of_one_folder_by_its_name_leaves_the_others(octavo: Run, capsys: Capture, cache: Path) -> None:
    assert octavo("rm", f"tiny-bfloat16-{DIGEST}", "my-bf", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["freed_bytes"] == 3005
    assert [model["kind"] for model in report["removed"]] == ["converted", "converted"]
    assert [model["kind"] for model in listed(octavo, capsys)] == ["downloaded"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["tiny", "tin"], "no model 'tin' is in the cache; did you mean 'tiny'?"),
        (["notes"], "no model 'notes' is in the cache"),
        (["link"], "no model 'link' is in the cache"),
        ([".."], "no model '..' is in the cache"),
        ([""], "no model '' is in the cache"),
        ([], "octavo rm takes the NAME of a model"),
    ],
)
def test_rm_of_what_is_no_model_of_the_cache_removes_nothing(
    octavo: Run, capsys: Capture, cache: Path, names: list[str], said: str
) -> None:
    before = sorted(cache.rglob("*"))
    assert octavo("rm", *names) == 2
    assert said in capsys.readouterr().err
    assert sorted(cache.rglob("*")) == before
    assert octavo("rm", str(cache / "models" / f"tiny-bfloat16-{DIGEST}")) == 2, "a path is no name"
    assert sorted(cache.rglob("*")) == before


def test_what_pull_made_is_listed_and_removed(
    octavo: Run, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert octavo("pull", "llama-3.1-8b-shape") == 0
    folder = Path(capsys.readouterr().out.strip())
    [model] = listed(octavo, capsys)
    assert (model["name"], model["kind"], model["folder"]) == ("llama-3.1-8b-shape", "shape", str(folder))
    assert octavo("rm", "llama-3.1-8b-shape") == 0
    assert list((tmp_path / "shapes").iterdir()) == []
