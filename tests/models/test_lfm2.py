"""LFM2 and LFM2-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.core.dtypes import DType
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import ON_GPU, OUTPUT, PARAMS, PROMPTS, SMALL, Zoo, answer_of, answers, prompts_of

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
    options = {"block_size": 4, "state_checkpoint_tokens": 8, "max_num_batched_tokens": 16}
    prompt = PROMPTS[3]
    (wanted,) = answers(zoo.engine(enable_prefix_caching=False), [prompt])
    engine = zoo.engine(**options)
    assert answers(engine, [prompt]) == [wanted]
    (again,) = engine.generate(prompts_of([prompt]), PARAMS, use_tqdm=False)
    assert answer_of(again) == wanted
    assert again.num_cached_tokens == 32, "the last checkpoint before the prompt's last token"
    many = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, n=3)
    (forks,) = engine.generate(prompts_of([prompt]), many, use_tqdm=False)
    assert [list(completion.token_ids) for completion in forks.outputs] == [wanted[0]] * 3
    swapping = zoo.engine(
        num_gpu_blocks_override=24, watermark=0.0, preemption_mode="swap", num_host_blocks_override=64, **options
    )
    outputs = swapping.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0 or ON_GPU
    assert answer_of(outputs[3]) == wanted


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
