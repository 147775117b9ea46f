"""OPT."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.zoo import Zoo

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def config(**values: Any) -> Any:
    from transformers import OPTConfig

    return OPTConfig(**SHAPE, **values)


def test_opt(zoo: Zoo) -> None:
    zoo(config())


@pytest.mark.parametrize(
    "values",
    [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},  # 350m
        {"_remove_final_layer_norm": True},
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},  # Galactica
    ],
)
def test_opt_variants(values: dict[str, Any], zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(**values)))
