"""Checkpoints that load, and every way in which one can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.torch_backend import torch_dtype
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model, read_safetensors
from octavo.models.llama import LlamaForCausalLM
from octavo.models.registry import make_network
from tests.busy_machine import PATIENCE

CONFIG = ModelConfig("LlamaForCausalLM", 20, 8, 12, 2, 2, 1, 4, 16)
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def context(dtype: DType = DType.FLOAT32, kernels: ReferenceKernels | None = None) -> LayerContext:
    return LayerContext(kernels or ReferenceKernels(), dtype)


def checkpoint(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors under every name that the network expects."""
    network = make_network(config, context())
    return {name: torch.randn(layer.expected[shard]).to(dtype) for name, layer, shard in network.tensors()}


def save_split(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> dict[str, Any]:
    """Several files, tensors dealt out in turn so that a layer's tensors lie in different files."""
    weight_map = {}
    for i in range(files):
        part = dict(list(tensors.items())[i::files])
        save_file(part, folder / f"model-{i + 1:05}-of-{files:05}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{i + 1:05}-of-{files:05}.safetensors"))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def load(folder: Path, dtype: DType = DType.FLOAT32, config: ModelConfig = CONFIG) -> LlamaForCausalLM:
    network = load_model(folder, config, context(dtype))
    assert isinstance(network, LlamaForCausalLM)
    return network


def assert_holds(network: Any, tensors: dict[str, Tensor], dtype: DType) -> None:
    def same(ours: Tensor | None, *names: str) -> None:
        assert ours is not None and ours.dtype == torch_dtype(dtype)
        assert torch.equal(ours, torch.cat([tensors[name] for name in names]).to(ours.dtype))

    assert not list(network.tensors())
    is_tied = "lm_head.weight" not in tensors
    assert (network.embed_tokens.table is None) == is_tied  # a tied head's matrix serves as the table
    same(network.head.packed.weight if is_tied else network.embed_tokens.table, "model.embed_tokens.weight")
    same(network.norm.weight, "model.norm.weight")
    same(network.head.packed.weight, "model.embed_tokens.weight" if is_tied else "lm_head.weight")
    for i, layer in enumerate(network.layers):
        at = f"model.layers.{i}."
        same(layer.attention.qkv.packed.weight, *(f"{at}self_attn.{n}_proj.weight" for n in "qkv"))
        same(layer.attention.out.packed.weight, f"{at}self_attn.o_proj.weight")
        same(layer.mlp.gate_up.packed.weight, f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        same(layer.mlp.down.packed.weight, f"{at}mlp.down_proj.weight")
        same(layer.attention_norm.weight, f"{at}input_layernorm.weight")
        same(layer.mlp_norm.weight, f"{at}post_attention_layernorm.weight")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [DType.BFLOAT16, DType.FLOAT32])
def test_values_are_converted_once(stored: torch.dtype, wanted: DType, tmp_path: Path) -> None:
    tensors = checkpoint(dtype=stored)
    save_file(tensors, tmp_path / ONE)
    assert_holds(load(tmp_path, wanted), tensors, wanted)


@pytest.mark.parametrize("files", [1, 2, 5])
def test_tensors_may_be_spread_over_files(files: int, tmp_path: Path) -> None:
    tensors = checkpoint()
    save_split(tmp_path, tensors, files)
    assert_holds(load(tmp_path), tensors, DType.FLOAT32)


def test_files_may_be_links(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    tensors = checkpoint()
    save_file(tensors, blobs / "1f3a")
    (folder / ONE).symlink_to("../blobs/1f3a")
    assert_holds(load(folder), tensors, DType.FLOAT32)


def test_tied_head_needs_no_tensor_and_shares_one_with_the_same_values(tmp_path: Path) -> None:
    config = replace(CONFIG, tie_word_embeddings=True)
    tensors = checkpoint(config)
    assert "lm_head.weight" not in tensors
    for head in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}):
        save_file({**tensors, **head}, tmp_path / ONE)
        assert_holds(load(tmp_path, config=config), tensors, DType.FLOAT32)


def test_saved_rotary_tables_are_passed_over(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / ONE)
    assert_holds(load(tmp_path), tensors, DType.FLOAT32)


def test_weights_stay_when_the_file_is_deleted(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / ONE)
    network = load(tmp_path)
    with (tmp_path / ONE).open("r+b") as stream:
        stream.write(b"\0" * (tmp_path / ONE).stat().st_size)
    assert_holds(network, tensors, DType.FLOAT32)


def change(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    return apply


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (change(DOWN, None), rf"lacks the tensors {DOWN}"),
        (change("lm_head.weight", None), "lacks the tensors lm_head.weight"),
        (change(DOWN, torch.zeros(8, 13)), rf"{DOWN}'.*shape is \[8, 13\], expected \[8, 12\]"),
        (change(DOWN, torch.zeros(96)), r"shape is \[96\], expected \[8, 12\]"),
        (change("model.norm.weight", torch.zeros(1)), r"'model.norm.weight'.*shape is \[1\], expected \[8\]"),
        (change(DOWN, torch.zeros(8, 12, dtype=torch.int8)), rf"{DOWN}' is of type int8; expected float32"),
        (change(DOWN, torch.zeros(8, 12, dtype=torch.float8_e4m3fn)), "is of type float8_e4m3fn"),
        (change("model.layers.2.mlp.down_proj.weight", torch.zeros(8, 12)), r"'model\.layers\.2\..*no layer"),
        (change("model.layers.0.self_attn.q_proj.bias", torch.zeros(8)), r"q_proj\.bias' belongs to no layer"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    edit: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    tensors = checkpoint()
    edit(tensors)
    save_file(tensors, tmp_path / ONE)
    with pytest.raises(WeightError, match=says):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / ONE)
    with pytest.raises(WeightError, match=r"lacks the tensors model\.embed_tokens\.weight, .* and 17 more"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    save_file(checkpoint(), tmp_path / ONE)
    data = (tmp_path / ONE).read_bytes()
    (tmp_path / ONE).write_bytes(data[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors is truncated or no safetensors file"):
        load(tmp_path)


def test_garbage_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / ONE).write_bytes(bytes(range(256)) * 20)
    with pytest.raises(WeightError, match="truncated or no safetensors file"):
        load(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=rf"holds neither {ONE} nor {INDEX}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_never_loaded(name: str, tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / name)
    with pytest.raises(WeightError, match=f"{name} but no safetensors.*never loaded; convert"):
        load(tmp_path)


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    save_split(tmp_path, checkpoint())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path)


def test_index_that_names_a_tensor_its_file_lacks(tmp_path: Path) -> None:
    index = save_split(tmp_path, checkpoint())
    index["weight_map"]["model.absent"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"model-00001-of-00002\.safetensors lacks the tensor 'model\.absent'"):
        load(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_split(tmp_path, tensors)
    second = dict(list(tensors.items())[1::2])
    save_file(
        {**second, "model.embed_tokens.weight": torch.zeros(20, 8)}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(WeightError, match=r"'model\.embed_tokens\.weight' occurs twice"):
        load(tmp_path)


@pytest.mark.parametrize(
    "path", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "..\\x.safetensors", ""]
)
def test_index_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    save_file(checkpoint(), other / ONE)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": path}}))
    with pytest.raises(WeightError, match="expected the name of a file in the same folder"):
        load(folder)


def test_index_that_names_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / "model.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model.bin"}}))
    with pytest.raises(WeightError, match=r"'model\.bin': expected a \.safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(
        WeightError, match=r"model.safetensors.index.json (is no index|is not readable JSON|must hold a JSON object)"
    ):
        load(tmp_path)


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_split(tmp_path, tensors)
    # The second file is opened only when the first is done.
    reader = read_safetensors(tmp_path)
    names = [next(reader)[0]]
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(WeightError, match="00002-of-00002"):
        names.extend(name for name, _ in reader)
    assert sorted(names) == sorted(list(tensors)[::2])


#: Vocabulary, hidden and MLP size, layers, heads, KV heads, head size, positions.
MEASURED_SHAPE = (4000, 512, 1536, 8, 8, 4, 64, 64)
MEASURE = """
import sys
from pathlib import Path
from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model

def own_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

peaks = []

class Copying(ReferenceKernels):
    # Packs into memory of its own, as a backend with a layout of its own does.
    def pack(self, parts, *arguments, **options):
        packed = super().pack(parts, *arguments, **options)
        peaks.append(own_memory())
        return packed

config = ModelConfig("LlamaForCausalLM", *map(int, sys.argv[2:]))
context = LayerContext(Copying(), DType.FLOAT32)
before = own_memory()
network = load_model(Path(sys.argv[1]), config, context)
print(max(peaks) - before, own_memory() - before)
"""


@pytest.mark.slow  # of the compiled kernels: test_loading_memory.py
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_memory_is_little_more_than_the_weights(tmp_path: Path) -> None:
    tensors = checkpoint(ModelConfig("LlamaForCausalLM", *MEASURED_SHAPE), torch.bfloat16)
    weights = 4 * sum(tensor.numel() for tensor in tensors.values())
    save_file(tensors, tmp_path / ONE)
    # A fresh process: in this one, memory that earlier tests have freed would be used again.
    command = [sys.executable, "-c", MEASURE, str(tmp_path), *map(str, MEASURED_SHAPE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    peak, after = map(int, printed.split())
    assert peak < 1.3 * weights
    assert after > 0.9 * weights  # what was measured are the weights
