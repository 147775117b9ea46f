"""DeepSeek-V2 and V3 against transformers, and their bits however requests are scheduled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, OctavoError, WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.deepseek import DeepseekConfig
from octavo.models.network import build_without_weights
from tests.models.test_network import tensor_parallel_logits
from tests.models.zoo import (
    PARAMS,
    PROMPT,
    PROMPTS,
    SMALL,
    Zoo,
    answer_of,
    answers,
    assert_same,
    edit_config,
    logits_of,
    prompts_of,
)

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


def v32() -> Any:
    """Every token attends to all of a context that its indexer would choose."""
    from transformers import DeepseekV32Config

    indexer = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
    return DeepseekV32Config(**LATENT, **MIXTURE, **indexer, q_lora_rank=20, n_shared_experts=1, rope_parameters=YARN)


def glm_dsa() -> Any:
    from transformers import GlmMoeDsaConfig

    indexer = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
    return GlmMoeDsaConfig(**LATENT, **MIXTURE, **indexer, q_lora_rank=20, n_shared_experts=1)


def glm_lite() -> Any:
    from transformers import Glm4MoeLiteConfig

    layers = ["dense", "sparse", "dense"]
    mixture = {name: value for name, value in MIXTURE.items() if name != "first_k_dense_replace"}
    return Glm4MoeLiteConfig(**LATENT, **mixture, q_lora_rank=20, mlp_layer_types=layers)


def v3_dense() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**LATENT, first_k_dense_replace=3, q_lora_rank=None, rope_interleave=False)


def with_biases(model: Any) -> None:
    """Biases of the experts that change the choice."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)


@pytest.mark.parametrize("config", [v2_lite, v2, v3, v3_dense, v32, glm_lite])
def test_deepseek(config: Any, zoo: Zoo) -> None:
    zoo(config(), change=with_biases)


def test_latent_blocks_are_swapped_shared_and_half_as_large(save_model: Any, tmp_path: Path) -> None:
    save_model(v3(), change=with_biases)
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "max_model_len": 64}
    alone = LLM(str(tmp_path), **options, num_gpu_blocks_override=100, enable_prefix_caching=False)
    [(block_bytes, _, _)] = alone.llm_engine.core.executor.kv_groups()
    assert block_bytes == 3 * 4 * 4 * 32  # layers, tokens, bytes, and 24 + 8 numbers, which need no padding
    wanted = [answers(alone, [prompt])[0] for prompt in PROMPTS]
    tight = LLM(
        str(tmp_path),
        **options,
        num_gpu_blocks_override=24,
        num_host_blocks_override=100,
        preemption_mode="swap",
        max_num_batched_tokens=16,
        watermark=0.0,
    )
    assert answers(tight, PROMPTS) == wanted
    stats = tight.llm_engine.core.scheduler.stats()
    assert stats.preemptions_by_swap > 0 and stats.swapped_in_blocks > 0
    assert stats.blocks_used == stats.host_blocks_used == 0
    [again] = tight.generate(prompts_of(PROMPTS[-1:]), PARAMS, use_tqdm=False)
    assert again.num_cached_tokens == 39 and answer_of(again) == wanted[-1]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_two_ranks_give_the_bits_of_one(dtype: DType, save_model: Any, tmp_path: Path, driver: Any) -> None:
    config = v3()
    config.update({"v_head_dim": 16, "moe_intermediate_size": 24})  # what is summed divides into pieces
    save_model(config, change=with_biases)
    alone = tensor_parallel_logits(tmp_path, driver, 1, dtype)
    assert torch.equal(tensor_parallel_logits(tmp_path, driver, 2, dtype), alone)


def test_layers_that_predict_further_tokens_are_left_out(save_model: Any, tmp_path: Path, driver: Any) -> None:
    file = tmp_path / "model.safetensors"
    expected = logits_of(save_model(v3(), change=with_biases), PROMPT)
    tensors = load_file(file)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.layers.3.embed_tokens.weight": torch.ones(2)}
    save_file({**tensors, **extra}, file)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    context = LayerContext(ReferenceKernels(), DType.FLOAT32)
    assert_same(driver(load_model(tmp_path, read_model_config(tmp_path), context)).run("s", PROMPT, [13, 1]), expected)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(WeightError, match=r"'model\.layers\.3\.eh_proj\.weight' belongs to no layer"):
        load_model(tmp_path, read_model_config(tmp_path), context)


def test_sparse_attention_is_refused_where_it_would_leave_tokens_out(zoo: Zoo) -> None:
    zoo.save(v32(), change=with_biases)
    with pytest.raises(ConfigError, match=r"max_model_len \(65\) .* \(64 tokens\); index_topk \(64\) limits"):
        zoo.engine(max_model_len=65)


def test_glm_5(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(glm_dsa(), change=with_biases))


def test_kimi_k2_is_deepseek_v3_of_another_type(zoo: Zoo) -> None:
    config = v3()
    config.update({"n_group": 1, "topk_group": 1})
    model = zoo.save(config, change=with_biases)
    edit_config(zoo.folder, model_type="kimi_k2", scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=None)
    zoo.check_network(model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"topk_method": "greedy"}, 'topk_method="greedy" is not supported; supported: "noaux_tc"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"kv_lora_rank": 25}, r"kv_lora_rank \(25\) and qk_rope_head_dim \(8\) must be even"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, not 0"),
        ({"n_routed_experts": "many"}, "n_routed_experts must be a positive integer, not 'many'"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**v3().to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}))
    assert isinstance(read_model_config(tmp_path), DeepseekConfig)
    edit_config(tmp_path, **changes)
    with pytest.raises(OctavoError, match=says):
        read_model_config(tmp_path)


def test_experts_that_cannot_be_chosen_are_refused(tmp_path: Path) -> None:
    content = {**v3().to_dict(), "architectures": ["DeepseekV3ForCausalLM"], "n_group": 3}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="8 experts cannot be limited to 2 of 3 equal groups"):
        build_without_weights(read_model_config(tmp_path), "float32")
