"""A network whose checkpoint has other names and other tensors than its layers: each kind of entry and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.weight_rows import GGUFRows, GroupQuantizedRows
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.checkpoint import (
    CheckpointEntry,
    Drop,
    Join,
    Only,
    Permute,
    Rename,
    SameAs,
    Split,
    Transform,
    ZerosFor,
    halve_pairs,
    transpose,
    ungroup_heads,
)
from octavo.models.config_files import ConfigReader, common_fields, read_model_config
from octavo.models.llama import LlamaForCausalLM
from octavo.models.network import build_without_weights, weight_bytes
from octavo.models.registry import NETWORKS

ONE = "model.safetensors"
PROMPT = [3, 17, 99, 42, 0, 8, 61, 100, 5]


@dataclass(frozen=True)
class FusedConfig(ModelConfig):
    """A fact that no other family has."""

    num_vocabulary_files: int = 1


class FusedLlama(LlamaForCausalLM):
    """A Llama saved in the manner of GPT-2: other prefixes, fused and transposed matrices, the embedding in pieces."""

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"\.attn\.mask$"),
        Rename(r"^transformer\.h\.", "model.layers."),
        Rename(r"\.attn\.", ".self_attn."),
        Rename(r"\.c_proj\.", ".o_proj."),
        Transform(r"\.(c_attn|o_proj)\.weight$", transpose),
        Split("c_attn", ("q_proj", "k_proj", "v_proj")),
        Split("gate_up_proj", ("gate_proj", "up_proj")),
        Join(("wte_0", "wte_1"), "model.embed_tokens"),
    )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        return FusedConfig(
            architecture=architecture,
            hidden_size=reader.positive("n_embd"),
            intermediate_size=reader.positive("n_inner"),
            num_layers=reader.positive("n_layer"),
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            max_position=64,
            num_vocabulary_files=reader.positive("vocabulary_files"),
            **common_fields(reader),
        )


FUSED = {"model_type": "fused", "vocab_size": 101, "n_embd": 48, "n_inner": 80, "n_layer": 2, "vocabulary_files": 2}


@pytest.fixture
def plain(save_model: Callable[..., Any], tmp_path: Path) -> Path:
    from transformers import LlamaConfig

    shape = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 64}
    save_model(LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2))
    return tmp_path


@pytest.fixture
def fused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(NETWORKS, "FusedLlama", ("fused", __name__, "FusedLlama"))
    folder = plain / "fused"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FUSED))
    save_file(fuse(load_file(plain / ONE)), folder / ONE)
    return folder


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {name: tensors[name] for name in ("model.norm.weight", "lm_head.weight")}
    out["wte_1.weight"], out["wte_0.weight"] = tensors["model.embed_tokens.weight"].split([51, 50])[::-1]
    for i in range(2):
        theirs, ours = f"transformer.h.{i}", f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{theirs}.{norm}.weight"] = tensors[f"{ours}.{norm}.weight"]
        out[f"{theirs}.attn.mask"] = torch.ones(3)
        qkv = torch.cat([tensors[f"{ours}.self_attn.{n}_proj.weight"] for n in "qkv"])
        out[f"{theirs}.attn.c_attn.weight"] = qkv.t()
        out[f"{theirs}.attn.c_proj.weight"] = tensors[f"{ours}.self_attn.o_proj.weight"].t()
        out[f"{theirs}.mlp.gate_up_proj.weight"] = torch.cat(
            [tensors[f"{ours}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
        )
        out[f"{theirs}.mlp.down_proj.weight"] = tensors[f"{ours}.mlp.down_proj.weight"]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def context() -> LayerContext:
    return LayerContext(ReferenceKernels(), DType.FLOAT32)


def test_a_new_architecture_is_a_file_and_a_line_of_the_registry(plain: Path, fused: Path, driver: Any) -> None:
    config = read_model_config(fused)
    assert config.architecture == "FusedLlama"
    assert isinstance(config, FusedConfig) and config.num_vocabulary_files == 2
    network = load_model(fused, config, context())
    assert isinstance(network, FusedLlama)
    expected = driver(load_model(plain, read_model_config(plain), context())).run("s", PROMPT, [5, 1])
    assert torch.equal(driver(network).run("s", PROMPT, [5, 1]), expected)
    assert weight_bytes(build_without_weights(config, "float32")) == sum(
        t.nbytes for t in load_file(plain / ONE).values()
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"transformer.h.0.attn.c_attn.weight": torch.ones(48, 79)},
            r"'model.layers.0.self_attn.c_attn.weight' has 79",
        ),
        ({"transformer.h.2.attn.c_attn.weight": torch.ones(48, 80)}, r"holds 'model.layers.2.self_attn.q_proj.weight'"),
        (
            {"wte_1.weight": torch.ones(50, 47)},
            r"shape \[5\d, 4\d\] has other columns than the other parts of tensor 'model.embed_tokens.weight'",
        ),
        ({"wte_1.weight": None}, "lacks the part 'wte_1' of tensor 'model.embed_tokens.weight'"),
        (
            {"wte_1.weight": torch.ones(49, 48)},
            r"'model.embed_tokens.weight' .*shape is \[100, 48\], expected \[101, 48\]",
        ),
        (
            {"transformer.h.0.mlp.gate_up_proj.weight": None},
            r"lacks the tensors model.layers.0.mlp.gate_proj.weight, m",
        ),
        (
            {"transformer.h.0.attn.extra.weight": torch.ones(3)},
            r"'transformer.h.0.attn.extra.weight' belongs to no",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Tensor | None], says: str, fused: Path) -> None:
    tensors = {**load_file(fused / ONE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, fused / ONE)
    with pytest.raises(WeightError, match=says):
        load_model(fused, read_model_config(fused), context())


def test_a_duplicate_part_is_named() -> None:
    pairs = [("a.weight", np.ones(1)), ("a.weight", np.ones(1))]
    with pytest.raises(WeightError, match=r"'a.weight' occurs twice"):
        list(Join(("a", "b"), "c").apply(pairs, {}))


@pytest.mark.parametrize(
    "entry",
    [
        Drop(r"^x"),
        Rename(r"^x", "y"),
        Split("x", ()),
        Join(("x",), "y"),
        Transform("x", transpose),
        Permute("w", ungroup_heads(3, 1)),  # its order does not fit two rows
    ],
)
def test_other_tensors_pass_unchanged(entry: CheckpointEntry) -> None:
    pairs: list[tuple[str, Any]] = [("a.xx.weight", np.ones((2, 3)))] if not isinstance(entry, Transform) else []
    pairs.append(("weight", np.ones((2, 3))))
    out = list(entry.apply(pairs, {}))
    assert [name for name, _ in out] == [name for name, _ in pairs]
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(out, pairs, strict=True))


def test_rows_are_permuted_in_their_own_bits() -> None:
    """Two KV heads of two dimensions, each with two query heads; then pairs of neighbours in one head of six rows."""
    order = ungroup_heads(4, 2)(16).tolist()
    assert order == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert halve_pairs(1, 4)(6).tolist() == [0, 2, 1, 3, 4, 5]
    numbers = np.random.default_rng(0).integers(0, 60, (16, 34), dtype=np.uint8)
    codes = numbers[:, :32]
    groups = GroupQuantizedRows(8, codes, np.arange(32.0, dtype=np.float32).reshape(16, 2), codes[:, :2])
    for rows in (GGUFRows("Q8_0", numbers, 32, 32), groups):
        ((_, permuted),) = Permute("qkv", ungroup_heads(4, 2)).apply([("qkv", rows)], {})
        assert isinstance(permuted, type(rows))
        assert np.array_equal(permuted.dequantize(), rows.dequantize()[order])


def test_other_model_types_are_refused_with_what_is_supported(fused: Path) -> None:
    (fused / "config.json").write_text(json.dumps({**FUSED, "model_type": "unknown"}))
    with pytest.raises(UnsupportedModelError, match=r"type 'unknown' is not supported; supported: .*FusedLlama, "):
        read_model_config(fused)


def test_entries_for_tensors_that_a_checkpoint_lacks() -> None:
    shapes = {"a.k.bias": (3,), "b.k.bias": (2,), "head": (2, 2), "bias": (4,)}
    table = np.arange(4.0).reshape(2, 2)
    given = [("table", table), ("b.k.bias", np.ones(2)), ("bias", np.ones((1, 4)))]

    def applied(*entries: CheckpointEntry) -> dict[str, Any]:
        pairs: Any = given
        for entry in entries:
            pairs = entry.apply(pairs, shapes)
        listed = list(pairs)
        assert len(dict(listed)) == len(listed)
        return dict(listed)

    found = applied(ZerosFor(r"\.k\.bias$"), SameAs("head", "table"), Only(r"^bias$"))
    assert found["a.k.bias"].tolist() == [0, 0, 0] and found["b.k.bias"].tolist() == [1, 1]
    assert found["head"] is table and found["table"] is table
    assert found["bias"].shape == (4,)
    given.append(("head", table + 1))
    assert applied(SameAs("head", "table"))["head"][0, 0] == 1
    assert "other" not in applied(SameAs("other", "table"))
    given[-2] = ("bias", np.ones((2, 4)))
    assert applied(Only(r"^bias$"))["bias"].shape == (2, 4)  # for the layer to refuse
