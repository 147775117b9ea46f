"""Mixtures of experts against transformers, and their bits however requests are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.models.zoo import SMALL, Zoo


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

    return OlmoeConfig(**{**SMALL, "intermediate_size": 32}, num_experts=8, num_experts_per_tok=3)


@pytest.mark.parametrize("family", [mixtral, qwen2_moe, qwen3_moe, olmoe])
def test_mixtures_of_experts(zoo: Zoo, family: Callable[[], Any]) -> None:
    zoo(family())
