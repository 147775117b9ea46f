"""LFM2 and LFM2-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from tests.models.hybrid import check_continues_from_checkpoints
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import PROMPTS, SMALL, Zoo, answers

LFM2 = {**SMALL, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
TIGHT = {"num_gpu_blocks_override": 24, "block_size": 4, "state_checkpoint_tokens": 8}


def test_lfm2(zoo: Zoo) -> None:
    from transformers import Lfm2Config

    config = Lfm2Config(**LFM2, conv_bias=True, block_multiple_of=16)
    zoo(config, tight=TIGHT)


def test_lfm2_moe(zoo: Zoo) -> None:
    from transformers import Lfm2MoeConfig

    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1}
    zoo(Lfm2MoeConfig(**LFM2, **sizes), tight=TIGHT)


def test_prefix_hits_continue_from_a_checkpoint(tmp_path: Path, zoo: Zoo) -> None:
    from transformers import Lfm2Config

    zoo.save(Lfm2Config(**LFM2))
    check_continues_from_checkpoints(zoo, TIGHT)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_1_and_2_tensor_parallel_workers_give_the_same_bits(zoo: Zoo, driver: Any, dtype: DType) -> None:
    from transformers import Lfm2Config

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    zoo.save(Lfm2Config(**{**LFM2, **heads, "hidden_size": 256, "intermediate_size": 384}, conv_bias=True))
    one, two = (tensor_parallel_logits(zoo.folder, driver, size, dtype) for size in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_projections_give_the_same_answers_in_company(zoo: Zoo, quantization: str) -> None:
    from transformers import Lfm2Config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    zoo.save(Lfm2Config(**{**LFM2, **heads, "hidden_size": 64, "intermediate_size": 96}))
    engine = zoo.engine(quantization=quantization, **TIGHT)
    assert answers(engine, PROMPTS) == [answer for prompt in PROMPTS for answer in answers(engine, [prompt])]
    assert answers(engine, PROMPTS) != answers(zoo.engine(**TIGHT), PROMPTS)
