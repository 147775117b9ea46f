"""OLMo-hybrid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import SMALL, Zoo

OLMO = {
    **{**SMALL, "num_attention_heads": 6, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    "pad_token_id": 0,
}
TIGHT = {"num_gpu_blocks_override": 12, "block_size": 4, "state_checkpoint_tokens": 8}


def config(**values: Any) -> Any:
    from transformers import OlmoHybridConfig

    return OlmoHybridConfig(**{**OLMO, **values})


def test_olmo_hybrid(zoo: Zoo) -> None:
    zoo(config(rope_parameters={"rope_type": "default", "rope_theta": None}), tight=TIGHT)


def test_olmo_hybrid_with_rotated_heads_and_positive_eigenvalues(zoo: Zoo) -> None:
    model = zoo.save(
        config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, linear_allow_neg_eigval=False)
    )
    zoo.check_network(model)


def test_olmo_hybrid_from_a_checkpoint_of_its_state_in_int8(zoo: Zoo) -> None:
    zoo.save(config())
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_value_head_dim": 64}
    zoo.save(config(**heads, hidden_size=256, intermediate_size=384))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)
