"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    SMALL,
    Zoo,
    edit_config,
    rename_tensors,
)

#: Two value heads for each key head, half of a head rotated, values that are no multiple of a vector.
HYBRID = {
    **{**SMALL, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"num_attention_heads": 4, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 40,
}
TIGHT = {"num_gpu_blocks_override": 11, "block_size": 4, "state_checkpoint_tokens": 8}


def qwen3_5(**values: Any) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**{**HYBRID, "rope_parameters": ROPE, **values})


def test_qwen3_5(zoo: Zoo) -> None:
    zoo(qwen3_5(), tight=TIGHT)


def test_checkpoints_are_a_multiple_of_blocks_apart(zoo: Zoo) -> None:
    zoo.save(qwen3_5())
    with pytest.raises(ConfigError, match=r"multiple of block_size \(5\), not 512"):
        zoo.engine(block_size=5)


def test_qwen3_5_from_a_checkpoint_of_its_state_in_int8(zoo: Zoo) -> None:
    zoo.save(qwen3_5())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "linear_value_head_dim": 64}
    zoo.save(qwen3_5(**sizes))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)


def test_qwen3_5_inside_an_image_model_with_multi_token_prediction(zoo: Zoo) -> None:
    model = zoo.save(qwen3_5())
    rename_tensors(zoo.folder, lambda name: name.replace("model.", "model.language_model."))
    file = zoo.folder / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(48, 96)}, file, metadata={"format": "pt"})
    text = json.loads((zoo.folder / "config.json").read_text())
    edit_config(zoo.folder, architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=text)
    zoo.check_network(model)


def test_qwen3_next(zoo: Zoo) -> None:
    from transformers import Qwen3NextConfig

    zoo(Qwen3NextConfig(**HYBRID, **EXPERTS, rope_parameters=ROPE, mlp_only_layers=[1]), tight=TIGHT)


def test_qwen3_5_moe(zoo: Zoo) -> None:
    from transformers import Qwen3_5MoeTextConfig

    values = {name: value for name, value in HYBRID.items() if name != "intermediate_size"}
    model = zoo.save(Qwen3_5MoeTextConfig(**values, **EXPERTS, rope_parameters=ROPE))
    zoo.check_network(model)
