"""Checkpoints of several files: all tensors, once; and on a GPU the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model, read_safetensors
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
    found = list(read_safetensors(tmp_path))
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all(np.array_equal(tensor, expected[name].numpy()) for name, tensor in found)


def test_a_broken_file_among_several_is_named(tmp_path: Path) -> None:
    write(tmp_path, 6, 3)
    (tmp_path / "model-4.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightError, match=r"model-4\.safetensors is truncated or no safetensors file"):
        list(read_safetensors(tmp_path))


@pytest.mark.gpu
def test_a_network_is_loaded_straight_to_the_gpu(tiny_model: Path) -> None:
    config = read_model_config(tiny_model)
    here: Any = load_model(tiny_model, config, LayerContext(ReferenceKernels(), DType.FLOAT32))
    there: Any = load_model(tiny_model, config, LayerContext(ReferenceKernels("cuda"), DType.FLOAT32))
    ids = np.arange(config.vocab_size)
    ours, theirs = (network.embed(network.kernels.wrap(ids)) for network in (here, there))
    assert theirs.is_cuda
    assert theirs.cpu().equal(ours)
    for ours, theirs in zip(here.layers, there.layers, strict=True):
        assert theirs.mlp.down.packed.weight.is_cuda
        assert theirs.mlp.down.packed.weight.cpu().equal(ours.mlp.down.packed.weight)
