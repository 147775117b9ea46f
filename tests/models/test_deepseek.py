"""DeepSeek-V2 and V3 against transformers, and their bits however requests are scheduled."""

from __future__ import annotations

from typing import Any

import pytest

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


def v2_dense() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**LATENT, q_lora_rank=None, first_k_dense_replace=3)


def v3_dense() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**LATENT, q_lora_rank=20, first_k_dense_replace=3, rope_parameters=YARN)


@pytest.mark.parametrize("config", [v2_dense, v3_dense])
def test_deepseek(config: Any, zoo: Zoo) -> None:
    zoo(config())
