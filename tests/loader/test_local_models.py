"""Models in the folders of Ollama and LM Studio."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ModelNotFoundError
from octavo.loader import local_models as room
from octavo.loader.local_models import all_models, find_local_model, local_models
from octavo.loader.resolve import gguf_source, resolve_model
from octavo.models.config_files import default_sampling
from tests.ollama_store import LIBRARY, Store

PARAMETERS = {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.1, "num_ctx": 4096, "stop": ["<|im_end|>", "###"]}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No model of this machine's user is seen."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(room, "_SERVICE_STORE", str(tmp_path / "service"))
    room._tell.cache_clear()
    return home


@pytest.fixture
def gguf(tmp_path: Path, tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf")


@pytest.fixture
def store(own_home: Path) -> Store:
    return Store(own_home / ".ollama" / "models")


def test_a_model_of_ollama_is_found_by_its_names(store: Store, gguf: Path) -> None:
    manifest = store.add(f"{LIBRARY}/llama3.2/latest", gguf, params=PARAMETERS, system="Be brief.", license="MIT")
    store.add("registry.ollama.ai/someone/tuned/q8", gguf)
    store.add("hf.co/owner/repo-GGUF/Q4_K_M", gguf)
    assert {model.name for model in local_models()} == {
        "llama3.2:latest", "someone/tuned:q8", "hf.co/owner/repo-GGUF:Q4_K_M",
    }  # fmt: skip
    for name in ("llama3.2", "llama3.2:latest", "ollama:llama3.2", "ollama:llama3.2:latest"):
        model = find_local_model(name)
        assert model is not None and model.path.samefile(gguf)
        assert model.digest == hashlib.sha256(manifest.read_bytes()).hexdigest()  # as Ollama's own lists have it
        assert model.sampling == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
        assert (model.stop, model.system, model.license) == (("<|im_end|>", "###"), "Be brief.", "MIT")
        assert model.size == gguf.stat().st_size
    assert find_local_model("llama3.2:1b") is None
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'llama3.2:latest'"):
        find_local_model("ollama:llama3.1")


def test_its_files_are_those_of_the_gguf_file_with_its_defaults(store: Store, gguf: Path) -> None:
    store.add(f"{LIBRARY}/llama3.2/1b", gguf, params=PARAMETERS)
    before = sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*"))
    folder = resolve_model("llama3.2:1b")
    assert default_sampling("auto", folder) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert (folder / "config.json").read_bytes() == (resolve_model(str(gguf)) / "config.json").read_bytes()
    source = gguf_source("ollama:llama3.2:1b")
    assert source is not None and source.samefile(gguf)
    assert sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*")) == before  # nothing is written


def test_names_of_our_own_come_first(store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(f"{LIBRARY}/smollm2-135m/latest", gguf)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    store.add(f"{LIBRARY}/mine/latest", gguf)
    assert resolve_model("mine") == Path("mine")
    source = gguf_source("ollama:smollm2-135m")
    assert source is not None and source.samefile(gguf)
    with pytest.raises(ModelNotFoundError, match="did you mean 'mine'"):
        resolve_model("mime")


def test_the_variable_names_the_only_store(
    store: Store, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(f"{LIBRARY}/hidden/latest", gguf)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other"))
    Store(tmp_path / "other").add(f"{LIBRARY}/seen/latest", gguf)
    assert [model.name for model in local_models()] == ["seen:latest"]


def test_models_of_lm_studio(own_home: Path, gguf: Path) -> None:
    folder = own_home / ".lmstudio" / "models" / "owner" / "Tiny-GGUF"
    folder.mkdir(parents=True)
    os.link(gguf, folder / "Tiny-Q8_0.gguf")
    os.link(gguf, folder / "mmproj-Tiny.gguf")
    older = own_home / ".cache" / "lm-studio" / "models" / "owner" / "Old-GGUF"
    older.mkdir(parents=True)
    for quantization in ("Q4_0", "Q8_0"):
        os.link(gguf, older / f"Old-{quantization}.gguf")
    names = {model.name for model in local_models()}
    assert names == {
        "owner/Tiny-GGUF/Tiny-Q8_0.gguf", "owner/Old-GGUF/Old-Q4_0.gguf", "owner/Old-GGUF/Old-Q8_0.gguf",
    }  # fmt: skip
    for name in ("owner/Tiny-GGUF", "lmstudio:Tiny-GGUF", "owner/Tiny-GGUF/Tiny-Q8_0.gguf"):
        source = gguf_source(name)  # none is in the hub's cache
        assert source is not None and source.samefile(gguf)
    assert find_local_model("owner/Old-GGUF") is None  # which of the two is not said
    assert (resolve_model("lmstudio:owner/Old-GGUF/Old-Q4_0.gguf") / "config.json").is_file()


def layer(digest: object, kind: str = "model", size: object = 5) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": size}


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("{", "no manifest with layers"),
        ("[]", "no manifest with layers"),
        ({"layers": []}, "it has 0 layers of GGUF weights"),
        ({"layers": [layer("sha256:../../../../etc/passwd")]}, "none of sha256"),
        ({"layers": [layer("md5:" + "0" * 64)]}, "none of sha256"),
        ({"layers": [layer(7)]}, "none of sha256"),
        ({"layers": [layer("sha256:" + "0" * 64)]}, "cannot be read"),
        ('{"layers": [' + " " * (1 << 20) + "]}", "more than 1048576 bytes"),
    ],
)
def test_a_damaged_manifest_is_named_and_skipped(
    store: Store, gguf: Path, manifest: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(f"{LIBRARY}/good/latest", gguf)
    store.write(f"{LIBRARY}/bad/latest", manifest)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert [model.name for model in local_models()] == ["good:latest"]
    assert "bad/latest" in caplog.text and reason in caplog.text
    with pytest.raises(ModelNotFoundError):
        resolve_model("ollama:bad")


def test_links_and_wrong_sizes_are_refused(
    store: Store, gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linked = store.add(f"{LIBRARY}/linked/latest", gguf)
    [entry] = json.loads(linked.read_text())["layers"]
    blob = store.root / "blobs" / entry["digest"].replace(":", "-")
    blob.unlink()
    blob.symlink_to(gguf)
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"layers": [entry]}))
    (linked.parent / "other").symlink_to(secret)
    digest, size = store.blob(b"GGUF and more")
    store.write(f"{LIBRARY}/short/latest", {"layers": [layer(digest, size=size + 1)]})
    store.write(f"{LIBRARY}/adapted/latest", {"layers": [layer(digest, size=size), layer(digest, "adapter", size)]})
    with caplog.at_level(logging.WARNING, "octavo"):
        assert local_models() == []
    assert caplog.text.count("links are not followed") == 2
    assert f"has {size} bytes, not {size + 1}" in caplog.text and "adapter" in caplog.text


def test_parameters_that_are_no_numbers_are_left_out(store: Store, gguf: Path) -> None:
    store.add(f"{LIBRARY}/odd/latest", gguf, params={"temperature": "hot", "top_p": True, "min_p": 0.1, "stop": "x"})
    store.add(f"{LIBRARY}/none/latest", gguf, params="[1")
    [model] = local_models()
    assert (model.sampling, model.stop) == ({"min_p": 0.1}, ("x",))


def test_the_list_has_them_with_their_program(store: Store, gguf: Path) -> None:
    store.add(f"{LIBRARY}/llama3.2/latest", gguf)
    [entry] = all_models()
    assert (entry.name, entry.kind, entry.size) == ("llama3.2:latest", "ollama", gguf.stat().st_size)
