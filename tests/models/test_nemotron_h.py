"""Nemotron-H and Nemotron 3."""

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

NEMOTRON = {
    **{name: value for name, value in SMALL.items() if name != "num_hidden_layers"},
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "head_dim": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 3, "topk_group": 2},
    **{"moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 1.7, "pad_token_id": 0},
    # A bound of prompts alone, which the published models' code does not have.
    "time_step_min": 1e-30,
}
TIGHT = {"num_gpu_blocks_override": 12, "block_size": 4, "state_checkpoint_tokens": 8}


def config(**values: Any) -> Any:
    from transformers import NemotronHConfig

    return NemotronHConfig(**{**NEMOTRON, **values})


def test_nemotron_h(zoo: Zoo) -> None:
    zoo(config(), tight=TIGHT)


def test_nemotron_3_with_experts_of_a_latent_and_biases(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(config(moe_latent_size=32, mlp_bias=True, use_bias=True)))


def test_nemotron_h_with_the_names_of_published_files(zoo: Zoo) -> None:
    model = zoo.save(config())
    names = {"layers_block_type": None, "hybrid_override_pattern": "M-*E", "head_dim": None, "attention_head_dim": 8}
    edit_config(zoo.folder, **names)
    zoo.check_network(model)
    edit_config(zoo.folder, hybrid_override_pattern="M-*X")
    with pytest.raises(ConfigError, match=r"hybrid_override_pattern must be a str of M, \*, -, E, not 'M-\*X'"):
        read_model_config(zoo.folder)


@pytest.mark.skipif(ON_GPU, reason="there, experts have no int8")
def test_nemotron_h_from_a_checkpoint_of_its_state_in_int8(zoo: Zoo) -> None:
    zoo.save(config())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
    inner = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128, "moe_latent_size": 64}
    zoo.save(config(**sizes, **inner, mamba_head_dim=32))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)
