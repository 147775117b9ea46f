"""DeepSeek-V2 and V3 against transformers, and their bits however requests are scheduled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.zoo import SMALL, Zoo

LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}


MIXTURE = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}


def v2_lite() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**LATENT, **MIXTURE, q_lora_rank=None, n_shared_experts=2)


def v2() -> Any:
    from transformers import DeepseekV2Config

    limited = {**MIXTURE, "topk_method": "group_limited_greedy"}
    return DeepseekV2Config(**LATENT, **limited, q_lora_rank=20, n_shared_experts=1, rope_parameters=YARN)


def v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**LATENT, **MIXTURE, q_lora_rank=20, n_shared_experts=1, rope_parameters=YARN)


def v3_dense() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**LATENT, first_k_dense_replace=3, q_lora_rank=None, rope_interleave=False)


def with_biases(model: Any) -> None:
    """Biases of the experts that change the choice."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)


@pytest.mark.parametrize("config", [v2_lite, v2, v3, v3_dense])
def test_deepseek(config: Any, zoo: Zoo) -> None:
    zoo(config(), change=with_biases)
