"""Bamba, Granite 4 and Jamba."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_mamba import DTYPES
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import ON_GPU, SMALL, Zoo, edit_config

#: Two groups of heads; heads that are no multiple of a vector; attention in the middle.
MIXER = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 8}
GRANITE = {
    **{**SMALL, **MIXER, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "shared_intermediate_size": 40},
    **{"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
}
TIGHT = {"num_gpu_blocks_override": 11, "block_size": 4, "state_checkpoint_tokens": 8}


def granite4(**values: Any) -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(**{**GRANITE, **values})


def test_bamba(zoo: Zoo) -> None:
    from transformers import BambaConfig

    biases = {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}
    zoo(BambaConfig(**SMALL, **MIXER, attn_layer_indices=[1], **biases), tight=TIGHT)


def test_granite4(zoo: Zoo) -> None:
    zoo(granite4(), tight=TIGHT)


def test_granite4_without_experts_in_a_published_file(zoo: Zoo) -> None:
    model = zoo.save(granite4(num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope"))
    edit_config(zoo.folder, layer_types=["mamba", "attention", "mamba"])
    zoo.check_network(model)


def test_jamba(zoo: Zoo) -> None:
    from transformers import JambaConfig

    periods = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    zoo(JambaConfig(**SMALL, **periods, num_experts=4, num_experts_per_tok=2), tight=TIGHT)


@pytest.mark.skipif(ON_GPU, reason="there, experts have no int8")
def test_granite4_from_a_checkpoint_of_its_state(zoo: Zoo) -> None:
    zoo.save(granite4())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_2_tensor_parallel_workers_that_share_a_group_give_the_bits_of_1(zoo: Zoo, driver: Any, dtype: DType) -> None:
    heads = {"num_attention_heads": 4, "hidden_size": 64, "mamba_d_head": 32, "intermediate_size": 64}
    zoo.save(granite4(**heads, shared_intermediate_size=64, mamba_n_groups=1))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)
