"""Mixtures of experts against transformers, and their bits however requests are scheduled."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.lab.simulate.step_costs import layer_weights, weight_bytes_read
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model, make_dummy_model
from octavo.models.config_files import read_model_config
from octavo.models.mixtures import MixtureConfig
from octavo.models.network import build_without_weights, num_active_parameters, num_parameters
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import PROMPT, SMALL, Zoo, assert_same, edit_config, logits_of


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2)


def qwen2_moe() -> Any:
    """With a shared expert of another size, and a layer without experts."""
    from transformers import Qwen2MoeConfig

    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 56}
    return Qwen2MoeConfig(**SMALL, **sizes, num_experts=6, num_experts_per_tok=3, mlp_only_layers=[1])


def qwen3_moe() -> Any:
    """With experts in every other layer."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 2}
    return Qwen3MoeConfig(**SMALL, **experts, moe_intermediate_size=32, head_dim=16)


def olmoe() -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(**{**SMALL, "intermediate_size": 32}, num_experts=8, num_experts_per_tok=3, clip_qkv=0.7)


@pytest.mark.parametrize("family", [mixtral, qwen2_moe, qwen3_moe, olmoe])
def test_mixtures_of_experts(zoo: Zoo, family: Callable[[], Any]) -> None:
    zoo(family())


def stacked(folder: Path) -> None:
    """Writes the checkpoint with the experts of a layer in two tensors, as transformers has them in memory."""
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(tensors):
        match = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if match:
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for layer, parts in found.items():
        count = len(parts) // 3
        gate_up = [torch.cat((parts[index, "gate"], parts[index, "up"])) for index in range(count)]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.experts.down_proj"] = torch.stack([parts[index, "down"] for index in range(count)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_checkpoints_with_stacked_experts(save_model: Callable[..., Any], tmp_path: Path, driver: Any) -> None:
    expected = logits_of(save_model(qwen3_moe()), PROMPT)
    stacked(tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    context = LayerContext(ReferenceKernels(), DType.FLOAT32)
    network = load_model(tmp_path, read_model_config(tmp_path), context)
    assert_same(driver(network).run("s", PROMPT, [len(PROMPT)]), expected)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj"] = tensors["model.layers.1.mlp.experts.down_proj"][:-1]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"lacks the tensors model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight"):
        load_model(tmp_path, read_model_config(tmp_path), context)


@pytest.mark.parametrize("family", [mixtral, qwen2_moe])
def test_1_2_and_4_tensor_parallel_workers_give_the_same_bits(
    family: Callable[[], Any], save_model: Callable[..., Any], tmp_path: Path, driver: Any
) -> None:
    config = family()
    config.update({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 96})
    expected = logits_of(save_model(config), PROMPT)
    alone = tensor_parallel_logits(tmp_path, driver, 1, DType.FLOAT32)
    assert_same(alone, expected)
    for size in (2, 4):
        assert torch.equal(tensor_parallel_logits(tmp_path, driver, size, DType.FLOAT32), alone)


def test_what_a_token_reads_is_counted(save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(qwen2_moe())
    config = read_model_config(tmp_path)
    network = build_without_weights(config, "float32")
    expert, shared, dense, attention = 3 * 48 * 24, 3 * 48 * 56, 3 * 48 * 80, 2 * 48 * 48 + 2 * 48 * 16
    router = 48 * 6 + 48
    layers = 3 * attention + dense + 2 * (router + shared)
    head, vectors = 48 * 101, 3 * (48 + 16 + 16) + 7 * 48
    assert num_parameters(network) == 2 * head + vectors + layers + 2 * 6 * expert
    assert num_active_parameters(network) == 2 * head + vectors + layers + 2 * 3 * expert
    # The inner values of the shared expert, and results and inner values of those that a token chooses.
    assert config.feed_forward_width == 3 * 56 + 3 * (48 + 3 * 24)
    assert layer_weights(network) == layers + 2 * 3 * expert
    assert weight_bytes_read(network) == 4 * (head + layers + 2 * 3 * expert)
    # Two tokens with 3 of 6 experts each miss a quarter of them.
    assert weight_bytes_read(network, 2) == pytest.approx(4 * (head + layers + 2 * 4.5 * expert))


def test_random_weights(save_model: Callable[..., Any], tmp_path: Path, driver: Any) -> None:
    save_model(olmoe())
    network = make_dummy_model(read_model_config(tmp_path), LayerContext(ReferenceKernels(), DType.FLOAT32), seed=1)
    assert driver(network).run("s", PROMPT, [len(PROMPT)]).std() > 0.2


def test_values_that_are_refused(save_model: Callable[..., Any], tmp_path: Path) -> None:
    save_model(olmoe())
    config = read_model_config(tmp_path)
    context = LayerContext(ReferenceKernels("meta"), DType.FLOAT32)
    assert isinstance(config, MixtureConfig)
    mixture = replace(config.mixture, routing=replace(config.mixture.routing, top_k=9))
    with pytest.raises(ConfigError, match="9 experts of a token"):
        load_model(tmp_path, replace(config, mixture=mixture), context)
    edit_config(tmp_path, num_experts_per_tok=9)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok \(9\) is more than the 8 experts"):
        read_model_config(tmp_path)
    edit_config(tmp_path, num_experts_per_tok=3, clip_qkv=-8.0)
    with pytest.raises(ConfigError, match=r"clip_qkv must be a number above 0, not -8\.0"):
        read_model_config(tmp_path)
