"""Errors of a configuration that contradicts the weights name the field, the tensor and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from tests.loader import test_gguf_architectures as gguf_files
from tests.loader.conftest import write_folder
from tests.loader.test_weights_head import save
from tests.models.test_encoders import save as save_encoder
from tests.models.zoo import edit_config


def refusal(folder: Path, gguf: Path | None = None) -> str:
    with pytest.raises(WeightError) as raised:
        load_model(folder, read_model_config(folder), LayerContext(ReferenceKernels(), DType.FLOAT32), gguf)
    return str(raised.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "tensor", "says"),
    [
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 3},
            "model.layers.0.self_attn.k_proj.weight",
            "its shape is [16, 48], expected [24, 48]: config.json has num_key_value_heads * head_dim = 3 * 8 = 24, "
            "the tensor 16",
        ),
        (
            "LlamaForCausalLM",
            {"hidden_size": 32, "vocab_size": 99, "head_dim": 8},
            "model.embed_tokens.weight",
            "expected [99, 32]: config.json has vocab_size = 99, the tensor 101; config.json has hidden_size = 32, "
            "the tensor 48",
        ),
        (
            "MixtralForCausalLM",
            {"intermediate_size": 96},
            "model.layers.0.block_sparse_moe.experts.0.w1.weight",
            "config.json has intermediate_size = 96, the tensor 80",
        ),
        (
            "GPT2LMHeadModel",
            {"n_positions": 64},
            "transformer.wpe.weight",
            "config.json has n_positions = 64, the tensor 96",
        ),
        (
            "GPT2LMHeadModel",
            {"n_inner": 64},
            "transformer.h.0.mlp.c_fc.bias",
            "config.json has n_inner = 64, the tensor 80",
        ),
        ("GPT2LMHeadModel", {"n_layer": 3}, None, "config.json has n_layer = 3, but the checkpoint has 2 layers"),
        ("GPT2LMHeadModel", {"n_layer": 1}, None, "config.json has n_layer = 1, but the checkpoint has 2 layers"),
        (
            "Phi3ForCausalLM",
            {"num_hidden_layers": 1},
            None,
            "config.json has num_hidden_layers = 1, but the checkpoint has 2",
        ),
        (
            "Phi3ForCausalLM",
            {"num_key_value_heads": 3},
            "model.layers.0.self_attn.qkv_proj.weight",
            "has 80 rows, expected 96 = 48 (q_proj) + 24 (k_proj) + 24 (v_proj): config.json has num_attention_heads * "
            "head_dim = 6 * 8 = 48, num_key_value_heads * head_dim = 3 * 8 = 24",
        ),
        (
            "OlmoHybridForCausalLM",
            {"linear_key_head_dim": 8, "linear_value_head_dim": 16},
            "model.layers.0.linear_attn.k_proj.weight",
            "its shape is [32, 48], expected [16, 48]: config.json has linear_num_key_heads * linear_key_head_dim = "
            "2 * 8 = 16, the tensor 32",
        ),
        (
            "Mamba2ForCausalLM",
            {"num_heads": 2, "head_dim": 48},
            "backbone.layers.0.mixer.A_log",
            "its shape is [4], expected [2]: config.json has num_heads = 2, the tensor 4",
        ),
        (
            "JambaForCausalLM",
            {"mamba_dt_rank": 5},
            "model.layers.0.mamba.dt_layernorm.weight",
            "its shape is [3], expected [5]: config.json has mamba_dt_rank = 5, the tensor 3",
        ),
    ],
)
def test_a_field_and_the_tensor_that_contradicts_it(
    architecture: str, changes: dict[str, Any], tensor: str | None, says: str, tmp_path: Path
) -> None:
    save(tmp_path, architecture)
    edit_config(tmp_path, **changes)
    problem = refusal(tmp_path)
    assert says in problem
    assert tensor is None or f"tensor {tensor!r}" in problem


def test_fields_of_encoders(tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert", "ForSequenceClassification")
    edit_config(tmp_path, type_vocab_size=1)
    assert "config.json has type_vocab_size = 1, the tensor 2" in refusal(tmp_path)
    edit_config(tmp_path, type_vocab_size=2, id2label={"0": "a", "1": "b"})
    assert "tensor 'classifier.weight'" in refusal(tmp_path) or "tensor 'classifier.bias'" in refusal(tmp_path)
    assert "config.json has id2label = 2, the tensor 3" in refusal(tmp_path)


def test_a_tensor_of_another_architecture(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3ForCausalLM")
    edit_config(tmp_path, architectures=["Qwen2ForCausalLM"])
    problem = refusal(tmp_path)
    assert "self_attn.k_norm.weight' belongs to no layer" in problem
    assert "config.json says is Qwen2ForCausalLM (architectures)" in problem


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "olmo2")
    folder = write_folder(path)
    edit_config(folder, intermediate_size=64)
    problem = refusal(folder, path)
    assert "tensor 'blk.0.ffn_gate.weight' has shape [96, 64], not [64, 64]: its metadata has " in problem
    assert "olmo2.feed_forward_length = 64, the tensor 96" in problem
    edit_config(folder, num_hidden_layers=3)
    assert "its metadata has olmo2.block_count = 3, but the checkpoint has 2 layers" in refusal(folder, path)
