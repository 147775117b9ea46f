"""Loading a GGUF file's matrices in its own blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels import weight_rows as gguf_rows
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.torch_backend import to_torch
from octavo.kernels.weight_rows import GGUFRows, dequantize
from octavo.layers.layer import LayerContext
from octavo.loader.gguf_file import SUPPORTED_TYPES
from octavo.loader.resolve import gguf_source
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from tests.loader.conftest import random_blocks, tensors_of, values_of, write_folder


@pytest.fixture(params=[Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.BF16], ids=lambda kind: kind.name)
def file(request: pytest.FixtureRequest, tmp_path: Path, tiny_llama: Any) -> Path:
    path: Path = tiny_llama(tmp_path / "m.gguf", request.param)
    return path


@pytest.fixture
def folder(file: Path, tmp_path: Path) -> Path:
    return write_folder(file)


def test_blocks_have_the_values_that_are_read_without_them(file: Path, folder: Path) -> None:
    """Rows of query and key are put back in order in either way."""
    values, read = tensors_of(folder, file), tensors_of(folder, file, None)
    assert read.keys() == values.keys()
    for name, tensor in read.items():
        assert torch.equal(values_of(tensor), values_of(values[name])), name
    matrix = read["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(matrix, GGUFRows) == (not _is_float(file))


@pytest.mark.parametrize("compiled", [True, False])
def test_values_have_the_bits_of_the_gguf_package(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(gguf_rows, "_compiled", lambda: None)
    rng = np.random.default_rng(0)
    for kind in SUPPORTED_TYPES - {Q.Q1_0}:  # the package has no decoder for that one
        rows = random_blocks(rng, kind, 77, 2048)
        wanted = np.array(gguf.quants.dequantize(rows, kind))
        assert np.array_equal(dequantize(kind.name, rows).view(np.int32), wanted.view(np.int32)), kind.name
        rounded = to_torch(dequantize(kind.name, rows, DType.BFLOAT16))
        assert torch.equal(rounded.view(torch.int16), torch.from_numpy(wanted).bfloat16().view(torch.int16)), kind.name


def _is_float(file: Path) -> bool:
    from gguf import GGUFReader

    kinds = {tensor.tensor_type for tensor in GGUFReader(file).tensors if len(tensor.shape) == 2}
    return Q.BF16 in kinds


def test_a_network_of_blocks_computes_what_one_of_values_does(file: Path, folder: Path) -> None:
    cpu = pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    from octavo.kernels.cpu.backend import CpuKernels

    cpu.set_threads(1)
    kernels = CpuKernels()
    config = read_model_config(folder)
    x = kernels.wrap(np.random.default_rng(0).standard_normal((5, config.hidden_size), np.float32))
    plain: Any = load_model(folder, config, LayerContext(kernels, DType.FLOAT32), file)
    blocks: Any = load_model(folder, config, LayerContext(kernels, DType.FLOAT32, quantization="gguf"), file)
    for pair in (
        (blocks.layers[0].attention.qkv(x), plain.layers[0].attention.qkv(x)),
        (blocks.layers[0].mlp.gate_up(x), plain.layers[0].mlp.gate_up(x)),
        (blocks.logits(x), plain.logits(x)),
    ):
        ours, theirs = map(kernels.to_numpy, pair)
        assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)  # activations in 8 bits


def test_a_layer_whose_parts_are_not_all_quantised_is_not_quantised(tmp_path: Path, tiny_llama: Any) -> None:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    from octavo.kernels.cpu.backend import CpuKernels

    value = np.random.default_rng(5).standard_normal((128, 256), dtype=np.float32)
    path = tiny_llama(tmp_path / "m.gguf", Q.Q4_0, tensors={"blk.0.attn_v.weight": (value, Q.F32)})
    folder = write_folder(path)
    config = read_model_config(folder)
    kernels = CpuKernels()
    x = kernels.wrap(np.random.default_rng(0).standard_normal((5, config.hidden_size), np.float32))
    plain: Any = load_model(folder, config, LayerContext(kernels, DType.FLOAT32), path)
    mixed: Any = load_model(folder, config, LayerContext(kernels, DType.FLOAT32, quantization="gguf"), path)
    ours, theirs = (kernels.to_numpy(network.layers[0].attention.qkv(x)) for network in (mixed, plain))
    assert np.array_equal(ours, theirs)


def test_what_cannot_be_served_is_refused(folder: Path, file: Path) -> None:
    config = read_model_config(folder)
    for quantization in ("int8", "int4"):
        context = LayerContext(ReferenceKernels(), DType.FLOAT32, quantization=quantization)
        with pytest.raises(ConfigError, match="reference backend has no quantised products"):
            load_model(folder, config, context, file)
    with pytest.raises(ConfigError, match="needs a model in a GGUF file"):
        load_model(folder, config, LayerContext(ReferenceKernels(), DType.FLOAT32, quantization="gguf"))


def test_the_source_of_a_model_is_its_file(tmp_path: Path, file: Path, folder: Path) -> None:
    assert gguf_source(str(file)) == file
    assert gguf_source(str(folder)) is None
    assert gguf_source("owner/name") is None


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_K])
def test_columns_in_another_order(kind: Q) -> None:
    """In the file's blocks where the order keeps them, else in 8 bits."""
    rows = GGUFRows(kind.name, random_blocks(np.random.default_rng(0), kind, 5, 1024), 1024, GGML_QUANT_SIZES[kind][0])
    for unit in (256, 128):
        order = np.arange(1024).reshape(-1, 2, unit).swapaxes(0, 1).ravel()
        wanted, got = rows.dequantize()[:, order], rows.reorder_columns(order)
        assert got.shape == (5, 1024)
        if unit >= rows.block:
            assert got.kind == kind.name
            assert np.array_equal(got.dequantize(), wanted)
        else:
            assert got.kind == "Q8_0"
            greatest = np.abs(wanted.reshape(5, -1, 32)).max(2)
            errors = np.abs(got.dequantize() - wanted).reshape(5, -1, 32).max(2)
            assert (errors <= greatest * (0.6 / 127)).all()
