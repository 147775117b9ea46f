"""The GPT family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.models.config_files import read_model_config
from tests.models.zoo import PROMPT, SMALL, Zoo, edit_config, logits_of, prompts_of, rename_tensors

SHAPE = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_head": 6,
    "n_layer": 3,
    "n_positions": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def gpt2_config(**values: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(**SHAPE, **values)


def test_gpt2(zoo: Zoo) -> None:
    zoo(gpt2_config())


def test_gpt2_with_other_scales_as_first_published(zoo: Zoo) -> None:
    """Without the prefix, and with the buffers of causal masks, as in the hub's gpt2."""
    model = zoo.save(gpt2_config(scale_attn_by_inverse_layer_idx=True, n_inner=80, activation_function="relu"))
    rename_tensors(zoo.folder, lambda name: name.removeprefix("transformer."))
    file = zoo.folder / "model.safetensors"
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
    save_file({**load_file(file), **masks}, file, metadata={"format": "pt"})
    zoo.check_network(model)


def test_learned_positions_limit_the_context(zoo: Zoo) -> None:
    model = zoo.save(gpt2_config())
    llm = LLM(str(zoo.folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=200)
    prompts = prompts_of([(PROMPT * 4)[:90], PROMPT * 4])
    last, beyond = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True), use_tqdm=False)
    tokens = list(last.outputs[0].token_ids)
    assert len(tokens) == 6
    scores = logits_of(model, (PROMPT * 4)[:90] + tokens)[89:-1]
    assert (scores.max(-1).values - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() < 1e-3
    assert beyond.outputs[0].finish_reason == "error"
    assert "96" in str(beyond.outputs[0].error)
    with pytest.raises(ConfigError, match=r"max_model_len \(97\) is longer than the model's context length \(96"):
        LLM(str(zoo.folder), skip_tokenizer_init=True, max_model_len=97)


def test_cross_attention_is_refused(zoo: Zoo) -> None:
    zoo.save(gpt2_config())
    edit_config(zoo.folder, add_cross_attention=True)
    with pytest.raises(UnsupportedModelError, match="add_cross_attention=true is not supported"):
        read_model_config(zoo.folder)


def bigcode(**values: Any) -> Any:
    from transformers import GPTBigCodeConfig

    return GPTBigCodeConfig(**SHAPE, **values)


def test_starcoder(zoo: Zoo) -> None:
    zoo(bigcode())


def test_starcoder_with_a_kv_head_for_each_query_head(zoo: Zoo) -> None:
    zoo.check_network(zoo.save(bigcode(multi_query=False)))


def test_starcoder2(zoo: Zoo) -> None:
    from transformers import Starcoder2Config

    zoo(Starcoder2Config(**SMALL, sliding_window=30), tight={"num_gpu_blocks_override": 16, "block_size": 4})


def test_gptj(zoo: Zoo) -> None:
    from transformers import GPTJConfig

    shape = {"vocab_size": 101, "n_embd": 48, "n_head": 3, "n_layer": 3, "n_positions": 96}
    zoo(GPTJConfig(**shape, rotary_dim=6, bos_token_id=0, eos_token_id=1))
    edit_config(zoo.folder, rotary_dim=18)
    with pytest.raises(ConfigError, match="rotary_dim must be even and at most 16, not 18"):
        read_model_config(zoo.folder)


def test_phi(zoo: Zoo) -> None:
    from transformers import PhiConfig

    zoo(PhiConfig(**SMALL))
    zoo.check_network(zoo.save(PhiConfig(**SMALL, qk_layernorm=True)))


def stablelm_config(**values: Any) -> Any:
    from transformers import StableLmConfig

    # A quarter of the 16 dimensions of a head is rotated.
    shape = {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1}
    return StableLmConfig(**{**shape, **values})


def test_stablelm(zoo: Zoo) -> None:
    zoo(stablelm_config(use_qkv_bias=True))


def test_stablelm_2_12b(zoo: Zoo) -> None:
    """Parallel parts, and a norm for each head."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
    zoo.check_network(zoo.save(stablelm_config(use_parallel_residual=True, qk_layernorm=True, **heads)))


def bloom_config(**values: Any) -> Any:
    from transformers import BloomConfig

    # Six heads: the slopes of a number that is no power of two.
    return BloomConfig(vocab_size=101, hidden_size=48, n_head=6, n_layer=3, bos_token_id=0, eos_token_id=1, **values)


def test_bloom(zoo: Zoo) -> None:
    zoo(bloom_config())


def test_bloom_with_residuals_after_norms_in_a_published_spelling(zoo: Zoo) -> None:
    model = zoo.save(bloom_config(apply_residual_connection_post_layernorm=True))
    edit_config(zoo.folder, hidden_size=None, n_embed=48, n_head=None, num_attention_heads=6)
    rename_tensors(zoo.folder, lambda name: name.removeprefix("transformer."))
    zoo.check_network(model)


def falcon_config(**values: Any) -> Any:
    from transformers import FalconConfig

    shape = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "intermediate_size")}
    return FalconConfig(**{**shape, **values})


def use_sdpa(model: Any) -> None:
    """Eager attention of transformers adds the biases of ALiBi twice: in the mask too, which sdpa takes them from."""
    model.config._attn_implementation = "sdpa"


GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}


def test_falcon_with_grouped_heads(zoo: Zoo) -> None:
    zoo(falcon_config(**GROUPED))
    edit_config(zoo.folder, parallel_attn=False)
    with pytest.raises(UnsupportedModelError, match="parallel_attn=false with new_decoder_architecture=true"):
        read_model_config(zoo.folder)
    edit_config(zoo.folder, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"num_attention_heads \(6\) must be a multiple of num_kv_heads \(4\)"):
        read_model_config(zoo.folder)


def test_falcon_with_linear_biases(zoo: Zoo) -> None:
    # Four heads have slopes, and their products with positions, that the bfloat16 of transformers holds.
    values = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
    zoo(falcon_config(**values, hidden_size=64, num_attention_heads=4), change=use_sdpa)


@pytest.mark.parametrize(
    "values", [{}, {**GROUPED, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80, "tie_word_embeddings": False}]
)
def test_falcon_variants(values: dict[str, Any], zoo: Zoo) -> None:
    zoo.check_network(zoo.save(falcon_config(**values)))


OPT_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def opt_config(**values: Any) -> Any:
    from transformers import OPTConfig

    return OPTConfig(**OPT_SHAPE, **values)


def test_opt(zoo: Zoo) -> None:
    zoo(opt_config())


@pytest.mark.parametrize(
    "values",
    [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},  # 350m
        {"_remove_final_layer_norm": True},
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},  # Galactica
    ],
)
def test_opt_variants(values: dict[str, Any], zoo: Zoo) -> None:
    zoo.check_network(zoo.save(opt_config(**values)))


def test_command_r(zoo: Zoo) -> None:
    from transformers import CohereConfig

    zoo(CohereConfig(**SMALL, attention_bias=True, logit_scale=0.3))


def test_command_r_plus(zoo: Zoo) -> None:
    from transformers import CohereConfig

    zoo.check_network(zoo.save(CohereConfig(**SMALL, use_qk_norm=True, logit_scale=0.8)))


def cohere2_config(**values: Any) -> Any:
    from transformers import Cohere2Config

    types = ["sliding_attention", "full_attention", "full_attention"]
    return Cohere2Config(**{**SMALL, "logit_scale": 0.3, "sliding_window": 7, "layer_types": types, **values})


def test_cohere2(zoo: Zoo) -> None:
    zoo(cohere2_config())
    edit_config(zoo.folder, sliding_window_pattern=3, layer_types=None)
    assert read_model_config(zoo.folder).sliding_windows == (7, 7, None)
