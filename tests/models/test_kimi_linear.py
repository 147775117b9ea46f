"""Kimi Linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.models.config_files import read_model_config
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import ON_GPU, SMALL, Zoo, edit_config

KIMI = {
    **{**SMALL, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
    **{"linear_num_heads": 2, "linear_head_dim": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "pad_token_id": 0},
}
TIGHT = {"num_gpu_blocks_override": 10, "block_size": 4, "state_checkpoint_tokens": 8}


def config(**values: Any) -> Any:
    from transformers import KimiLinearConfig

    return KimiLinearConfig(**{**KIMI, **values})


def test_kimi_linear(zoo: Zoo) -> None:
    zoo(config(), tight=TIGHT)


def test_kimi_linear_with_a_latent_of_queries_and_the_names_of_its_own_config_json(zoo: Zoo) -> None:
    model = zoo.save(config(q_lora_rank=32, n_group=1, topk_group=1, norm_topk_prob=False))
    linear = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 24}
    names = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    edit_config(zoo.folder, linear_attn_config={**linear, "short_conv_kernel_size": 4}, **dict.fromkeys(names))
    zoo.check_network(model)
    edit_config(zoo.folder, linear_attn_config={**linear, "kda_layers": [1, 2]})
    with pytest.raises(ConfigError, match=r"must have the layers 1 to 3 once each, not \[2\] and \[1, 2\]"):
        read_model_config(zoo.folder)


@pytest.mark.skipif(ON_GPU, reason="there, experts have no int8")
def test_kimi_linear_from_a_checkpoint_of_its_state_in_int8(zoo: Zoo) -> None:
    zoo.save(config())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "v_head_dim": 64, "linear_head_dim": 64}
    zoo.save(config(**sizes, moe_intermediate_size=64))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)
