"""Checkpoints read file by file in threads, as for a GPU: all tensors, once; errors as when they are read in order."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.core.errors import WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.context import LayerContext
from octavo.loader.model import load_model
from octavo.loader.weights import read_safetensors, read_safetensors_to
from octavo.models.config_files import read_model_config


def write(folder: Path, files: int, each: int) -> dict[str, Tensor]:
    """So many files with so many tensors each, and their index."""
    torch.manual_seed(files)
    everything: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    for i in range(files):
        name = f"model-{i}.safetensors"
        tensors = {f"layer.{i}.{j}": torch.randn(j + 1, 7) for j in range(each)}
        save_file(tensors, folder / name)
        everything |= tensors
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return everything


@pytest.mark.parametrize(("files", "each"), [(1, 1), (1, 9), (3, 2), (11, 5)])
def test_every_tensor_is_read_once(tmp_path: Path, files: int, each: int) -> None:
    expected = write(tmp_path, files, each)
    found = list(read_safetensors_to(tmp_path, "cpu"))
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all(tensor.equal(expected[name]) for name, tensor in found)
    assert sorted(name for name, _ in read_safetensors(tmp_path)) == sorted(expected)


def test_a_broken_file_among_several_is_named_and_no_thread_stays(tmp_path: Path) -> None:
    write(tmp_path, 6, 3)
    (tmp_path / "model-4.safetensors").write_bytes(b"no tensors")
    before = threading.active_count()
    with pytest.raises(WeightError, match=r"model-4\.safetensors is truncated or no safetensors file"):
        list(read_safetensors_to(tmp_path, "cpu"))
    assert threading.active_count() == before


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    write(tmp_path, 2, 2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-1.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(WeightError, match="lacks the tensor 'ghost'"):
        list(read_safetensors_to(tmp_path, "cpu"))


def test_closing_the_reader_early_ends_its_threads(tmp_path: Path) -> None:
    write(tmp_path, 8, 6)
    before = threading.active_count()
    with closing(read_safetensors_to(tmp_path, "cpu")) as tensors:
        next(tensors)
    assert threading.active_count() == before


def test_what_a_device_refuses_is_an_error_of_the_weights(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    write(tmp_path, 2, 2)
    with pytest.raises(WeightError, match=r"could not be copied to cuda"):
        list(read_safetensors_to(tmp_path, "cuda"))


@pytest.mark.gpu
def test_a_network_is_loaded_straight_to_the_gpu(tiny_model: Path) -> None:
    config = read_model_config(tiny_model)
    here: Any = load_model(tiny_model, config, LayerContext(ReferenceKernels(), torch.float32))
    there: Any = load_model(tiny_model, config, LayerContext(ReferenceKernels("cuda"), torch.float32, "cuda"))
    assert there.embed_tokens.table.is_cuda
    assert there.embed_tokens.table.cpu().equal(here.embed_tokens.table)
    for ours, theirs in zip(here.layers, there.layers, strict=True):
        assert theirs.mlp.down.packed.weight.cpu().equal(ours.mlp.down.packed.weight)
