"""The models on this machine: what their headers say, downloads and removals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from octavo.core.errors import ModelNotFoundError, OctavoError
from octavo.engine.model_catalog import find_model, list_models, pull, remove
from tests.fake_hub import serving_hub
from tests.loader.conftest import tiny_llama  # noqa: F401  a fixture
from tests.ollama_store import LIBRARY, Store


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_folder_of_safetensors(tiny_model: Path) -> None:
    model = find_model(str(tiny_model))
    assert model is not None and model.size == (tiny_model / "model.safetensors").stat().st_size
    facts = model.facts()
    network = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert (facts.format, facts.family, facts.quantization) == ("safetensors", "llama", "F32")
    assert facts.num_parameters == facts.info["general.parameter_count"] == network.num_parameters()
    config = network.config
    shape = {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size}
    shape |= {"block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads}
    assert {key: facts.info[f"llama.{key}"] for key in shape} == shape
    assert facts.chat_template is not None and "assistant" in facts.chat_template


def test_a_gguf_file(tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:  # noqa: F811
    path = tiny_llama(tmp_path / "tiny.gguf", keys={"tokenizer.chat_template": "{{ messages }}"})
    model = find_model(str(path))
    assert model is not None
    facts = model.facts()
    assert (facts.format, facts.family, facts.quantization) == ("gguf", "llama", "F32")
    assert facts.info["llama.embedding_length"] == 256 and facts.info["tokenizer.ggml.tokens"] is None
    assert facts.chat_template == "{{ messages }}" and "tokenizer.chat_template" not in facts.info
    path.write_bytes(b"GGUF and no more")
    damaged = find_model(str(path))
    assert damaged is not None and damaged.digest != model.digest
    with pytest.raises(OctavoError):
        damaged.facts()


def test_the_list_has_what_can_be_served(tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:  # noqa: F811
    gguf = tiny_llama(tmp_path / "tiny.gguf")
    Store(tmp_path / "ollama").add(f"{LIBRARY}/llama3.2/latest", gguf, system="Be brief.", params={"stop": ["x"]})
    with serving_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        hub.add("owner/m-GGUF", {"m-Q8_0.gguf": gguf.read_bytes()})
        steps = list(pull("owner/m-GGUF:Q8_0", threading.Event()))
    assert (steps[0].status, steps[-1].status) == ("pulling manifest", "success")
    assert steps[-2].completed == steps[-2].total == gguf.stat().st_size
    models = {model.name: model for model in list_models()}
    assert set(models) == {"llama3.2:latest", "owner/m-GGUF:Q8_0"}
    theirs = models["llama3.2:latest"]
    assert (theirs.source, theirs.system, theirs.stop) == ("ollama", "Be brief.", ("x",))
    remove("owner/m-GGUF:Q8_0")
    with pytest.raises(OctavoError, match="another program"):
        remove("llama3.2")
    with pytest.raises(ModelNotFoundError):
        remove("owner/m-GGUF:Q8_0")
    assert [model.name for model in list_models()] == ["llama3.2:latest"]


@pytest.mark.parametrize("name", ["nothing", "../tiny.gguf", "/etc/passwd", ""])
def test_what_is_no_name_of_a_model_is_not_pulled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        list(pull(name, threading.Event()))
