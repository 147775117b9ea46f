"""``octavo info`` of models: from folders, files and a hub on loopback, without their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file, save_file

from tests.cli.helpers import Capture, Run
from tests.fake_hub import FakeHub, serving_hub
from tests.loader.conftest import tiny_llama  # noqa: F401  a fixture


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def described(octavo: Run, capsys: Capture, *words: object, code: int = 0) -> dict[str, Any]:
    assert octavo("info", *words, "--json", "-") == code
    model: dict[str, Any] = json.loads(capsys.readouterr().out)["model"]
    return model


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shard(folder: Path) -> None:
    """Writes the weights of a folder anew, in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"{number}.safetensors": sorted(tensors)[number::2] for number in range(2)}
    for name, names in parts.items():
        save_file({each: tensors[each] for each in names}, folder / name)
    places = {each: name for name, names in parts.items() for each in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


#: Facts that depend on where the model is, and on the moment.
_PLACE = ("name", "folder", "memory")


def facts(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in _PLACE}


def test_of_safetensors_of_the_hub_only_headers_are_fetched(
    octavo: Run, capsys: Capture, hub: FakeHub, tiny_model: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    shutil.copytree(tiny_model, local)
    (local / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1]}')
    shard(local)
    hub.add("owner/tiny", files_of(local))
    model = described(octavo, capsys, "owner/tiny")
    assert facts(model) == facts(described(octavo, capsys, local))
    assert model["folder"] is None and model["supported"] is True
    assert model["sampling_defaults"]["temperature"] == 0.6 and model["chat_template"] is True
    assert {path.rpartition("/")[2] for _, path, range_, _ in hub.requests if range_} == {
        "0.safetensors",
        "1.safetensors",
    }
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_of_a_gguf_file_of_the_hub_only_the_header_is_fetched(
    octavo: Run,
    capsys: Capture,
    hub: FakeHub,
    tiny_llama: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    template = '{% for m in messages %}<tool_call> "arguments" <think> </think>{{ m.content }}{% endfor %}'
    keys = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7, "tokenizer.chat_template": template}
    path = tiny_llama(tmp_path / "m-Q8_0.gguf", Q.Q8_0, keys=keys)
    content = path.read_bytes()
    hub.add("owner/m-GGUF", {"m-Q8_0.gguf": content, "m-Q4_K_M.gguf": b"GGUF"})
    model = described(octavo, capsys, "owner/m-GGUF:Q8_0")
    assert facts(model) == facts(described(octavo, capsys, path))
    assert (model["tool_calls"], model["reasoning"], model["chat_template"]) == ("hermes", "qwen3", True)
    assert (model["sampling_defaults"]["temperature"], model["sampling_defaults"]["top_k"]) == (0.25, 7)
    assert (model["quantization"], model["weight_bytes"]) == ("Q8_0", len(content))
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    assert octavo("pull", "owner/m-GGUF:Q8_0") == 0
    capsys.readouterr()
    assert described(octavo, capsys, "owner/m-GGUF:Q8_0")["folder"].endswith("m-Q8_0.gguf"), "it is here now"


def test_a_long_header_is_fetched_piece_by_piece(hub: FakeHub, tmp_path: Path) -> None:
    """Neither more than one piece beyond it, nor less."""
    import gguf

    from octavo.loader.gguf_file import GGUFFile
    from octavo.loader.hub import HubModel, find_files
    from octavo.loader.resolve import write_sketch
    from tests.loader.conftest import finish

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list([f"token {number:040}" for number in range(50_000)])
    writer.add_tensor("a", np.zeros(1_000_000, np.float32))
    finish(writer)
    content = (tmp_path / "m.gguf").read_bytes()
    hub.add("owner/m", {"m.gguf": content})
    sketch = write_sketch(find_files(HubModel("owner/m")), tmp_path / "sketch")
    whole, header = GGUFFile(tmp_path / "m.gguf"), GGUFFile(sketch)
    assert header.metadata == whole.metadata and header.tensors.keys() == whole.tensors.keys()
    pieces = [range_ for range_ in hub.received("m.gguf") if range_]
    assert [piece.partition("-")[0] for piece in pieces] == [f"bytes={start << 20}" for start in range(len(pieces))]
    assert len(pieces) == 3 and sketch.stat().st_size == len(content)


def test_memory_of_the_whole_context_is_told_and_what_fits(
    octavo: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.runner import memory

    monkeypatch.setattr(memory, "available_memory", lambda: 6 << 30)
    whole = ("--gpu-memory-utilization", "1")
    told = described(octavo, capsys, "llama-3.2-1b-shape", *whole)["memory"]
    # 16 layers, 8 heads of 64 numbers, keys and values, bfloat16.
    assert told["kv_cache_bytes"] == 131072 * 16 * 8 * 64 * 2 * 2
    assert told["weights_bytes"] == 2 * (1_235_814_400 + 33 * 2048)  # norms are float32
    assert told["needed_bytes"] == told["kv_cache_bytes"] + told["weights_bytes"]
    assert not told["fits"] and told["sequences"] == 0
    free = (6 << 30) - told["weights_bytes"]
    assert told["longest_context"] == free // (16 * 8 * 64 * 2 * 2) // 16 * 16
    context = told["longest_context"]
    fitting = described(octavo, capsys, "llama-3.2-1b-shape", "--max-model-len", context, *whole)["memory"]
    assert fitting["fits"] and fitting["sequences"] == 1 and fitting["context"] == context
    assert octavo("info", "llama-3.2-1b-shape", *whole) == 0
    assert f"no, 6.0 GiB are free: a context of {context} tokens would" in capsys.readouterr().out
    half = described(octavo, capsys, "llama-3.2-1b-shape")["memory"]["longest_context"]
    assert abs(half - context // 2) <= 16, "as the engine leaves half of the memory free"
    monkeypatch.setattr(memory, "available_memory", lambda: 2 << 30)
    assert octavo("info", "llama-3.2-1b-shape") == 0
    assert "no, 2.0 GiB are free: the weights alone take more" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_what_is_not_supported_is_described_with_the_reason(
    octavo: Run, capsys: Capture, hub: FakeHub, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    config = {"architectures": ["Qwen9ForCausalLM"], "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros((3, 100_000), np.float16)}, folder / "model.safetensors")
    hub.add("owner/new", files_of(folder))
    model = described(octavo, capsys, folder if place == "folder" else "owner/new", code=2)
    assert (model["architecture"], model["supported"], model["context_length"]) == ("Qwen9ForCausalLM", False, 4096)
    assert (model["stored_numbers"], model["tensor_types"]) == (300_000, {"F16": 1})
    assert hub.received(".safetensors") == (["bytes=0-131071"] if place == "hub" else [])
    assert "'Qwen3ForCausalLM'" in model["reason"] and "docs/adding-a-model.md" in model["reason"]
    assert octavo("info", folder) == 2
    assert "supported:           no" in (said := capsys.readouterr()).out and "Qwen9ForCausalLM" in said.err


def test_a_config_that_contradicts_the_weights_names_both(
    octavo: Run, capsys: Capture, hub: FakeHub, tiny_model: Path
) -> None:
    files = files_of(tiny_model)
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"intermediate_size": 96}).encode()
    hub.add("owner/odd", files)
    reason = described(octavo, capsys, "owner/odd", code=2)["reason"]
    assert "mlp" in reason and "config.json has intermediate_size = 96" in reason


@pytest.mark.parametrize(
    ("files", "architecture", "reason"),
    [
        ({"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}, "LlamaForCausalLM", "pickled weights are never"),
        ({"README.md": b""}, None, "has neither config.json nor GGUF files"),
    ],
)
def test_a_repository_without_weights_is_described_as_one(
    octavo: Run, capsys: Capture, hub: FakeHub, files: dict[str, bytes], architecture: str | None, reason: str
) -> None:
    hub.add("owner/name", files | {"pytorch_model.bin": b"x"})
    model = described(octavo, capsys, "owner/name", code=2)
    assert (model["architecture"], model["supported"]) == (architecture, False) and reason in model["reason"]


def test_errors_name_the_repository_and_no_temporary_folder(
    octavo: Run,
    capsys: Capture,
    hub: FakeHub,
    tiny_llama: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    keys = {"general.architecture": "starcoder9", "starcoder9.context_length": 77}
    path = tiny_llama(tmp_path / "m-Q8_0.gguf", Q.Q8_0, keys=keys)
    hub.add("owner/odd-GGUF", {"m-Q8_0.gguf": path.read_bytes()})
    model = described(octavo, capsys, "owner/odd-GGUF", code=2)
    assert (model["architecture"], model["context_length"], model["quantization"]) == ("starcoder9", 77, "Q8_0")
    assert model["reason"].startswith("owner/odd-GGUF/m-Q8_0.gguf: GGUF architecture 'starcoder9' is not supported")
