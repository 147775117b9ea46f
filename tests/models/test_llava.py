"""LLaVA against transformers: features of CLIP's layer, and logits of prompts with images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.llava import LlavaTowerConfig
from octavo.models.network import build_without_weights, matrices, num_active_parameters, num_parameters
from tests.models.tower_harness import (
    CLIP_PIXELS,
    SIGLIP_PIXELS,
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

#: The image's token, in the vocabulary.
IMAGE = 99
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 20,
    "patch_size": 5,
}


def save_llava(folder: Path, vision: Any = None, **options: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=vision or CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        **options,
    )
    return save_image_model(folder, LlavaForConditionalGeneration(config))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": 2},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": [-2, 0, 3]},
    ],
)
def test_features_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_llava(tmp_path, **options)
    image, other = random_image(2, 20, 20), random_image(1, 20, 20, seed=1)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        with torch.inference_mode():
            expected = model.get_image_features(normal_pixels(image, CLIP_PIXELS)).pooler_output
        features = driver.features(driver.tower.prepare(image))
        assert len(features) == 2 * (17 if options else 16)
        assert_close(features, torch.cat(list(expected)))
        if kernels.name == "cpu":
            check_bits(driver, image, other)


def prompt_with(count: int) -> list[int]:
    """Text around two images of ``count`` features each."""
    return [3, 17, *[IMAGE] * count, 42, 8, *[IMAGE] * count, 61, 5]


def test_logits_of_prompts_with_images_are_those_of_transformers(tmp_path: Path) -> None:
    model = save_llava(tmp_path)
    image, tokens = random_image(2, 20, 20), prompt_with(16)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        pixels = normal_pixels(image, CLIP_PIXELS)
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens]), pixel_values=pixels).logits[0]
        features = driver.features(driver.tower.prepare(image))
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, features, [len(tokens)])
        assert_close(at_once, expected)
        in_chunks = prompts.run(tokens, features, [5, 1, 9, 3])
        assert kernels.name != "cpu" or torch.equal(in_chunks, at_once)
        assert_close(in_chunks, expected)


def test_siglip_may_be_the_tower(tmp_path: Path) -> None:
    from transformers import SiglipVisionConfig

    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    model = save_llava(tmp_path, vision, vision_feature_layer=-1, vision_feature_select_strategy="full")
    said = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    image = random_image(1, 20, 20)
    with torch.inference_mode():
        expected = torch.cat(list(model.get_image_features(normal_pixels(image, SIGLIP_PIXELS)).pooler_output))
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels)
        assert_close(driver.features(driver.tower.prepare(image)), expected)


def newer(name: str) -> str:
    """As transformers 5 calls its parts."""
    name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
    return name if name.startswith("lm_head.") else f"model.{name}"


def older(name: str) -> str:
    """As transformers 4 does."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize("rename", [newer, older])
def test_names_of_all_versions_are_read(tmp_path: Path, rename: Callable[[str], str]) -> None:
    save_llava(tmp_path)
    kernels, image = next(backends()), random_image(1, 20, 20)

    def logits() -> Tensor:
        driver = TowerDriver.load(tmp_path, kernels)
        features = driver.features(driver.tower.prepare(image))
        return ImagePrompts(tmp_path, kernels).run([3, *[IMAGE] * 16, 4], features, [18])

    expected = logits()
    rename_tensors(tmp_path, rename)
    assert torch.equal(logits(), expected)


def test_a_stage_that_is_not_the_first_has_no_tower_and_ranks_have_all_of_it(tmp_path: Path) -> None:
    save_llava(tmp_path)
    config, kernels = read_model_config(tmp_path), ReferenceKernels()
    stages = [
        load_model(tmp_path, config, LayerContext(kernels, DType.FLOAT32, layers=layers))
        for layers in (range(1), range(1, 2))
    ]
    assert stages[0].tower is not None and stages[1].tower is None
    image = random_image(1, 20, 20)
    driver = TowerDriver(stages[0].tower, kernels)
    expected = driver.features(driver.tower.prepare(image))
    rank = load_model(tmp_path, config, LayerContext(kernels, DType.FLOAT32, tp_rank=1, tp_size=2))
    assert rank.tower is not None
    assert torch.equal(TowerDriver(rank.tower, kernels).features(rank.tower.prepare(image)), expected)


#: llava-1.5-7b-hf, without what does not say how to compute.
LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAVA_7B | changes))
    return read_model_config(folder)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.vocab_size) == (4096, 32, 32, 32064)
    assert (config.max_position, config.checkpoint_dtype, config.eos_token_ids) == (4096, "float16", (2,))
    assert config.image_facts is not None and config.image_facts.token_id == 32000
    tower = config.tower
    assert isinstance(tower, LlavaTowerConfig) and tower.layers == (23,)
    assert (tower.vision.num_layers, tower.vision.side, tower.vision.activation) == (23, 24, "quick_gelu")
    assert tower.vision.class_token and not tower.keeps_first and tower.vision.normalisation == CLIP_PIXELS


def test_no_step_reads_the_tower(tmp_path: Path) -> None:
    network = build_without_weights(read(tmp_path), "bfloat16")
    # Of 7,063,427,072 there are not the last layer of CLIP, its last norm, and the class's own vector.
    assert num_parameters(network) == 7_063_427_072 - 12_596_224 - 2048 - 1024
    assert num_active_parameters(network) == 6_738_939_904
    assert all(not weight.name.startswith("tower.") for weight in matrices(network))


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ConfigError, "default or full, not 'cls'", {"vision_feature_select_strategy": "cls"}),
        (ConfigError, "a layer from -25 to 24 or a list of them, not -26", {"vision_feature_layer": -26}),
        (ConfigError, "a layer from -25 to 24 or a list of them, not ", {"vision_feature_layer": [-2, "last"]}),
        (UnsupportedModelError, "must be full for a tower without", {"vision_config": {"model_type": "pixtral"}}),
        (UnsupportedModelError, 'model_type="dinov2"', {"vision_config": {"model_type": "dinov2"}}),
        (UnsupportedModelError, 'model_type="gemma"', {"text_config": {"model_type": "gemma"}}),
        (UnsupportedModelError, "'tanh'", {"projector_hidden_act": "tanh"}),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, error: type[Exception], words: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, **changes)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    save_llava(tmp_path)
    tower = TowerDriver.load(tmp_path, next(backends())).tower
    with pytest.raises(InvalidRequestError, match="20 x 20, not 20 x 25"):
        tower.prepare(random_image(1, 20, 25))
