"""Layers for multi-token prediction of a checkpoint: found, complete or not, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.engine_config import make_config
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.engine.memory_needs import size_model
from octavo.kernels.weight_rows import to_values
from octavo.loader.gguf_file import GGUFCheckpoint
from octavo.loader.mtp import find_mtp, require_mtp
from octavo.loader.weights import check_headers, read_safetensors
from octavo.models.checkpoint import Pairs
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, weight_bytes
from tests.loader import test_gguf_architectures as files
from tests.loader.conftest import write_folder
from tests.models.mtp_models import save_mtp
from tests.models.zoo import edit_config, rename_tensors


def test_checkpoints_without_such_layers_or_with_some_of_their_tensors(tmp_path: Path) -> None:
    save_mtp("deepseek", tmp_path)
    config, options = read_model_config(tmp_path), make_config(model=str(tmp_path))
    rename_tensors(tmp_path, lambda name: None if name.endswith("hnorm.weight") else name)
    found = require_mtp(tmp_path, config, options)
    with pytest.raises(WeightError, match=r"lacks the tensors? .*hnorm"):
        check_headers(tmp_path, found)
    rename_tensors(tmp_path, lambda name: None if "layers.3." in name else name)
    assert find_mtp(tmp_path, config, None) is None
    with pytest.raises(ConfigError, match="method 'mtp' needs layers"):
        require_mtp(tmp_path, config, options)


def _tensors(folder: Path, file: Path | None) -> dict[str, Any]:
    """What the modules of a checkpoint are given."""
    found = require_mtp(folder, read_model_config(folder), make_config(model=str(file or folder)))
    check_headers(folder, found, file)
    network = build_without_weights(found, "float32")
    shapes = network.tensor_shapes()
    pairs: Pairs = read_safetensors(folder) if file is None else []
    if file is not None:
        pairs = GGUFCheckpoint(file, found, shapes).read(shapes, network.entries(), DType.FLOAT32)
    for entry in network.entries():
        pairs = entry.apply(pairs, shapes)
    tensors = {name: np.asarray(to_values(tensor), np.float32) for name, tensor in pairs}
    assert tensors.keys() == shapes.keys()
    return tensors


def test_a_gguf_file_has_the_same_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, name, settings = files.CASES["glm4moe"]
    layers, width = settings["num_hidden_layers"], settings["hidden_size"]
    longer = {**settings, "num_hidden_layers": layers + 1, "num_nextn_predict_layers": 1}
    monkeypatch.setitem(files.CASES, "mtp", (arch, name, longer))
    generator = np.random.default_rng(0)
    parts = {"eh_proj": generator.random((width, 2 * width), np.float32)}
    parts |= {part: generator.random(width, np.float32) for part in ("enorm", "hnorm", "shared_head.norm")}

    def add(tensors: dict[str, np.ndarray]) -> None:
        for part, values in parts.items():
            tensors[f"blk.{layers}.nextn.{part.replace('.', '_')}.weight"] = values
        tensors[f"blk.{layers}.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]

    model = files.write(tmp_path / "m.gguf", "mtp", edit=add)
    model.save_pretrained(tmp_path / "hub")
    edit_config(tmp_path / "hub", num_hidden_layers=layers)
    file = tmp_path / "hub" / "model.safetensors"
    own = {f"model.layers.{layers}.{part}.weight": torch.from_numpy(values) for part, values in parts.items()}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
    wanted = _tensors(tmp_path / "hub", None)
    got = _tensors(write_folder(tmp_path / "m.gguf"), tmp_path / "m.gguf")
    assert wanted.keys() == got.keys() and len(got) > 10
    for key, value in wanted.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-7, atol=2e-7, err_msg=key)


def test_a_gguf_file_beside_recurrent_states(tmp_path: Path) -> None:
    """Norms of such files are 1 + w. The module's layer is a copy of the one with attention."""
    _, _, settings = files.CASES["qwen35"]
    layers, width = settings["num_hidden_layers"], settings["hidden_size"]
    full = settings["layer_types"].index("full_attention")
    generator = np.random.default_rng(0)
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    names["shared_head_norm"] = "norm"
    parts = {part: generator.random(width, np.float32) for part in names}
    parts["eh_proj"] = generator.random((width, 2 * width), np.float32)

    def add(tensors: dict[str, np.ndarray]) -> None:
        for key in [key for key in tensors if key.startswith(f"blk.{full}.")]:
            tensors[key.replace(f"blk.{full}.", f"blk.{layers}.")] = tensors[key]
        for part, values in parts.items():
            tensors[f"blk.{layers}.nextn.{part}.weight"] = values + np.float32(values.ndim == 1)

    model = files.write(tmp_path / "m.gguf", "qwen35", edit=add)
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = load_file(file)
    old = f"model.layers.{full}."
    block = {key.replace(old, "mtp.layers.0."): each.clone() for key, each in tensors.items() if key.startswith(old)}
    own = {f"mtp.{names[part]}.weight": torch.from_numpy(values) for part, values in parts.items()}
    save_file({**tensors, **block, **own}, file, metadata={"format": "pt"})
    wanted = _tensors(tmp_path / "hub", None)
    got = _tensors(write_folder(tmp_path / "m.gguf"), tmp_path / "m.gguf")
    assert wanted.keys() == got.keys() and len(got) > 10
    for key, value in wanted.items():
        np.testing.assert_allclose(got[key], value, rtol=2e-7, atol=3e-7, err_msg=key)


def test_the_layers_alone_are_no_model(tmp_path: Path) -> None:
    save_mtp("deepseek", tmp_path)
    edit_config(tmp_path, architectures=["MTPModel"])
    with pytest.raises(UnsupportedModelError, match="'MTPModel' is not supported"):
        read_model_config(tmp_path)


def test_the_memory_of_a_model_counts_them(tmp_path: Path) -> None:
    save_mtp("deepseek", tmp_path)
    config, options = read_model_config(tmp_path), make_config(model=str(tmp_path), device="cpu", kernels="cpu")
    found = find_mtp(tmp_path, config, None)
    assert found is not None
    alone = size_model(
        make_config(model=str(tmp_path), device="cpu", kernels="cpu", speculative_config="none"), 1 << 30
    )
    more = size_model(options, 1 << 30).need.weights - alone.need.weights
    assert more == weight_bytes(build_without_weights(found, config.checkpoint_dtype)) > 0
