"""Falcon-H1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import SMALL, Zoo, edit_config

FALCON = {
    **{**SMALL, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24},
    **{"mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 8, "pad_token_id": 0},
    **{"embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.8, "mlp_multipliers": [0.7, 0.4]},
    **{"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.45, "ssm_in_multiplier": 0.9},
    **{"ssm_out_multiplier": 0.35, "ssm_multipliers": [0.6, 1.2, 0.7, 1.4, 0.8]},
}
TIGHT = {"num_gpu_blocks_override": 12, "block_size": 4, "state_checkpoint_tokens": 8}


def config(**values: Any) -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(**{**FALCON, **values})


def test_falcon_h1(zoo: Zoo) -> None:
    zoo(config(), tight=TIGHT)


@pytest.mark.parametrize("first", [False, True])
def test_falcon_h1_with_norms_in_its_mixers(zoo: Zoo, first: bool) -> None:
    zoo.check_network(zoo.save(config(mamba_rms_norm=True, mamba_norm_before_gate=first)))


def test_falcon_h1_from_a_checkpoint_of_its_state_in_int8(zoo: Zoo) -> None:
    zoo.save(config())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "mamba_d_ssm": 128, "mamba_d_head": 32}
    zoo.save(config(**heads, hidden_size=256, intermediate_size=384))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)


def test_values_that_are_not_computed(zoo: Zoo) -> None:
    zoo.save(config())
    edit_config(zoo.folder, mlp_bias=True)
    with pytest.raises(UnsupportedModelError, match="mlp_bias=true is not supported"):
        read_model_config(zoo.folder)
    edit_config(zoo.folder, mlp_bias=False, ssm_multipliers=[1.0, 1.0, -1.0, 1.0, 1.0])
    with pytest.raises(ConfigError, match=r"ssm_multipliers\[2\] must be a number above 0, not -1.0"):
        read_model_config(zoo.folder)
    edit_config(zoo.folder, ssm_multipliers=[1.0])
    with pytest.raises(ConfigError, match=r"ssm_multipliers must be a list of 5 numbers, not \[1.0\]"):
        read_model_config(zoo.folder)
