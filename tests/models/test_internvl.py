"""InternVL against transformers: features of tiles, and logits of prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.models.config_files import read_model_config
from octavo.models.internvl import InternVLTowerConfig
from tests.models.tower_harness import (
    CLIP_PIXELS,
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    check_bits,
    normal_pixels,
    random_image,
    save_image_model,
)
from tests.models.zoo import rename_tensors

IMAGE = 99
TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
#: 6 x 6 patches of a tile make 9 features.
VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": [30, 30],
    "patch_size": [5, 5],
    "attention_bias": True,
}
#: As InternViT-6B has them.
LARGE = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}


def save_internvl(folder: Path, text: Any = None, vision: Any = None, **changes: Any) -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    config = InternVLConfig(
        text_config=TEXT | (text or {}),
        vision_config=VISION | (vision or {}),
        image_token_id=IMAGE,
        **{"tie_word_embeddings": False, **changes},
    )
    return save_image_model(folder, InternVLForConditionalGeneration(config))


def their_features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    layer, strategy = model.config.vision_feature_layer, model.config.vision_feature_select_strategy
    with torch.inference_mode():
        made = model.model.get_image_features(
            pixels, vision_feature_layer=layer, vision_feature_select_strategy=strategy
        )
    features: torch.Tensor = made.pooler_output.flatten(0, 1)
    return features


@pytest.mark.parametrize(
    ("text", "vision", "changes"),
    [
        ({}, {}, {"tie_word_embeddings": True}),
        ({"model_type": "qwen3", "head_dim": 16}, LARGE, {}),
        ({"model_type": "llama"}, {"use_mean_pooling": False}, {}),
        (
            {"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4}
            | {"num_experts_per_tok": 2},
            {},
            {"vision_feature_layer": 2, "projector_hidden_act": "gelu_pytorch_tanh"},
        ),
    ],
)
def test_features_and_logits_are_those_of_transformers(
    tmp_path: Path, text: dict[str, Any], vision: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = save_internvl(tmp_path, text, vision, **changes)
    image, other = random_image(3, 30, 30), random_image(1, 30, 30, seed=1)
    pixels = normal_pixels(image, CLIP_PIXELS)
    tokens = [3, 17, *[IMAGE] * 27, 42, 8, 61, 5]
    expected = their_features(model, pixels)
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([tokens]),
            pixel_values=pixels,
            vision_feature_layer=model.config.vision_feature_layer,
            vision_feature_select_strategy="default",
        ).logits[0]
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        features = driver.features(driver.tower.prepare(image))
        assert len(features) == 27
        assert_close(features, expected)
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, features, [len(tokens)])
        assert_close(at_once, logits)
        if kernels.name == "cpu":
            check_bits(driver, image, other)
            assert torch.equal(prompts.run(tokens, features, [5, 1, 9, 3]), at_once)


def test_bfloat16_has_the_errors_of_bfloat16(tmp_path: Path) -> None:
    model = save_internvl(tmp_path)
    image = random_image(2, 30, 30)
    expected = their_features(model, normal_pixels(image, CLIP_PIXELS))
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, DType.BFLOAT16)
        features = driver.features(driver.tower.prepare(image))
        assert (features - expected).square().mean().sqrt() < 0.05 * expected.std()


def test_a_layer_without_its_scale_is_refused(tmp_path: Path) -> None:
    save_internvl(tmp_path)
    rename_tensors(tmp_path, lambda name: name.replace("layer.1.lambda_2", "layer.1.lambda_3"))
    with pytest.raises(WeightError, match=r"lacks the scale of 'tower.vision.layers.1.mlp.fc2'"):
        TowerDriver.load(tmp_path, next(backends()))


#: InternVL3_5-1B-HF, without what does not say how to compute.
INTERNVL_1B: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151671,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INTERNVL_1B))
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.text_architecture) == (1024, 28, "Qwen3ForCausalLM")
    assert config.architecture == "InternVLForConditionalGeneration" and config.checkpoint_dtype == "bfloat16"
    assert config.image_facts is not None and config.image_facts.token_id == 151671
    tower = config.tower
    assert isinstance(tower, InternVLTowerConfig)
    assert (tower.merge, tower.vision.side, tower.vision.num_layers) == (2, 32, 24)
    assert tower.vision.class_token and tower.vision.qkv_bias and not tower.vision.post_norm


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ConfigError, r"downsample_ratio \(0.3\) must be", {"downsample_ratio": 0.3}),
        (UnsupportedModelError, "it must be a square", {"vision_config": {**VISION, "image_size": [30, 35]}}),
        (UnsupportedModelError, "one layer here", {"vision_feature_layer": [-1, -2]}),
        (UnsupportedModelError, 'select_strategy="full"', {"vision_feature_select_strategy": "full"}),
        (UnsupportedModelError, 'model_type="gemma"', {"text_config": {"model_type": "gemma"}}),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, error: type[Exception], words: str, changes: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INTERNVL_1B | changes))
    with pytest.raises(error, match=words):
        read_model_config(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_kernels_of_gpus_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.triton.backend import TritonKernels

    model = save_internvl(tmp_path, vision=LARGE)
    image = random_image(2, 30, 30)
    kernels = TritonKernels("cuda" if torch.cuda.is_available() else "cpu", deterministic=True)
    driver = TowerDriver.load(tmp_path, kernels)
    features = driver.features(driver.tower.prepare(image))
    assert_close(features, their_features(model, normal_pixels(image, CLIP_PIXELS)))
