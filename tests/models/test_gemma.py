"""The Gemma family against transformers, its config.json as it is published, and checkpoints that also see images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import RopeConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.gemma import Gemma3Config, GemmaConfig
from tests.models.zoo import SMALL, Zoo

#: Heads of other sizes than hidden / heads.
SHAPE = SMALL | {"head_dim": 16}


def test_gemma(zoo: Zoo) -> None:
    from transformers import GemmaConfig

    zoo(GemmaConfig(**SHAPE))


def test_gemma2(zoo: Zoo) -> None:
    from transformers import Gemma2Config

    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    zoo(
        Gemma2Config(**SHAPE, **caps, sliding_window=7, query_pre_attn_scalar=24),
        tight={"num_gpu_blocks_override": 22, "block_size": 4},
    )


def test_gemma3(zoo: Zoo) -> None:
    from transformers import Gemma3TextConfig

    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    }
    shape = SHAPE | {"num_hidden_layers": 4}
    options = {"sliding_window": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}
    zoo(
        Gemma3TextConfig(**shape, **options, rope_parameters=ropes),
        tight={"num_gpu_blocks_override": 20, "block_size": 4},
    )


SPECIAL = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
#: Published files, without what does not say how to compute.
GEMMA_2B = SPECIAL | {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA2_27B = SPECIAL | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
#: Its text part names no vocabulary, no lengths and no ends: they are the defaults.
GEMMA3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def read(folder: Path, raw: dict[str, Any]) -> GemmaConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_model_config(folder)
    assert isinstance(config, GemmaConfig)
    return config


def test_the_first_gemma_gates_by_tanh_whatever_its_file_says(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_2B)
    assert config.tie_word_embeddings and not config.post_norms and not config.qk_norm
    assert config.sliding_windows == (None,) * 18 and config.query_scale == 256**-0.5
    assert config.score_cap is None and config.logit_cap is None
    assert config.rope == config.local_rope and config.rope.theta == 10000.0


def test_gemma2_alternates_windows_and_caps(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2_27B)
    assert config.sliding_windows == (4096, None) * 23 and config.post_norms and not config.qk_norm
    assert (config.score_cap, config.logit_cap, config.query_scale) == (50.0, 30.0, 144**-0.5)
    assert read(tmp_path, GEMMA2_27B | {"attn_logit_softcapping": None}).score_cap is None
    absent = {name: value for name, value in GEMMA2_27B.items() if name != "attn_logit_softcapping"}
    assert read(tmp_path, absent).score_cap == 50.0


def test_gemma3_that_sees_images_is_read_as_its_text_part(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_27B)
    assert config.sliding_windows == (*(1024,) * 5, None) * 10 + (1024, 1024)
    assert (config.vocab_size, config.max_position, config.qk_norm) == (262208, 131072, True)
    assert (config.eos_token_ids, config.bos_token_id, config.checkpoint_dtype) == ((1, 106), 2, "bfloat16")
    assert config.query_scale == 168**-0.5 and config.score_cap is None and config.logit_cap is None
    length = {"max_position_embeddings": 131072}
    assert config.rope == RopeConfig(1e6, "linear", scaling={"factor": 8.0} | length)
    assert config.local_rope == RopeConfig(1e4, "default", scaling=length)


def test_both_spellings_of_two_ropes_mean_the_same(tmp_path: Path) -> None:
    text = GEMMA3_27B["text_config"]
    kept = {name: value for name, value in text.items() if name != "rope_scaling"}
    ropes = {
        "full_attention": {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
    }
    older = read(tmp_path, GEMMA3_27B | {"text_config": text | {"rope_local_base_freq": 5e3}})
    types = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(62)]
    newer = GEMMA3_27B | {"text_config": kept | {"rope_parameters": ropes, "layer_types": types}}
    assert read(tmp_path, newer) == older


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (UnsupportedModelError, "use_bidirectional_attention", {"use_bidirectional_attention": True}),
        (UnsupportedModelError, 'hidden_act="relu"', {"hidden_activation": "relu"}),
        (UnsupportedModelError, 'hidden_act="gelu"', {"hidden_activation": "gelu"}),
        (UnsupportedModelError, "'linear_attention'", {"layer_types": ["linear_attention"] * 46}),
        (ConfigError, "layer_types must be a list of 46", {"layer_types": ["full_attention"]}),
        (ConfigError, "final_logit_softcapping", {"final_logit_softcapping": 0}),
        (ConfigError, "sliding_window", {"sliding_window": None}),
        (ConfigError, "query_pre_attn_scalar", {"query_pre_attn_scalar": -1}),
    ],
)
def test_what_cannot_be_computed_is_named(
    error: type[Exception], words: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, GEMMA2_27B | changes)


def test_gemma3_with_images_has_the_facts_of_both_parts(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_27B)
    assert isinstance(config, Gemma3Config) and config.image_facts is not None
    assert (config.image_facts.token_id, config.image_facts.is_whole) == (262144, True)
    assert (config.vision.side, config.pooled_side, config.vision.head_dim) == (64, 4, 72)
    without = {name: value for name, value in GEMMA3_27B.items() if name != "vision_config"}
    assert read(tmp_path, without).image_facts is None
    with pytest.raises(ConfigError, match=r"mm_tokens_per_image \(200\)"):
        read(tmp_path, GEMMA3_27B | {"mm_tokens_per_image": 200})
    with pytest.raises(UnsupportedModelError, match='model_type="clip_vision_model"'):
        read(tmp_path, GEMMA3_27B | {"vision_config": {"model_type": "clip_vision_model"}})


def test_a_checkpoint_that_also_sees_images_answers_to_text(tmp_path: Path, driver: Callable[..., Any]) -> None:
    import transformers

    text = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    sizes = {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | sizes, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    tokens = [3, 17, 99, 42, 8, 8, 61, 100, 5, 23, 77]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    network = load_model(tmp_path, read_model_config(tmp_path), LayerContext(ReferenceKernels(), DType.FLOAT32))
    torch.testing.assert_close(driver(network).run("a", tokens, [7, 1]), expected, atol=1e-4, rtol=0)
