"""Mistral 3 and Pixtral 12B against transformers: features of images of several sizes, and logits of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.request import ImageInput
from octavo.kernels.interface import Kernels
from octavo.models.config_files import read_model_config
from octavo.models.pixtral import PixtralTowerConfig
from tests.models.tower_harness import (
    CLIP_PIXELS,
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    check_bits,
    padded_pixels,
    random_image,
    save_image_model,
)
from tests.models.zoo import edit_config, rename_tensors

IMAGE, BREAK, END = 99, 98, 97
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": None,
}
#: Heads of 20 dimensions.
VISION = {
    "model_type": "pixtral",
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 20,
    "patch_size": 3,
    "image_size": 60,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
#: One feature, wide, and high.
SIZES = [(6, 6), (12, 36), (42, 18)]


def save_mistral3(folder: Path, kind: str = "ministral3", **changes: Any) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {**TEXT, "model_type": kind}
    config = Mistral3Config(
        text_config=text, vision_config=VISION, image_token_index=IMAGE, tie_word_embeddings=False, **changes
    )
    return save_image_model(folder, Mistral3ForConditionalGeneration(config))


def save_pixtral(folder: Path, **changes: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "hidden_act": "gelu"},
        image_token_index=IMAGE,
        vision_feature_select_strategy="full",
        **{"vision_feature_layer": -1, **changes},
    )
    return save_image_model(folder, LlavaForConditionalGeneration(config))


def their_features(model: Any, images: list[ImageInput]) -> Tensor:
    with torch.inference_mode():
        made = model.model.get_image_features(**padded_pixels(images, CLIP_PIXELS))
    features: Tensor = torch.cat(list(made.pooler_output))
    return features


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mistral3")
    return folder, save_mistral3(folder)


@pytest.mark.parametrize("kernels", list(backends()), ids=lambda kernels: kernels.name)
def test_features_are_those_of_transformers(saved: tuple[Path, Any], kernels: Kernels) -> None:
    folder, model = saved
    driver = TowerDriver.load(folder, kernels, block_size=8)
    images = [random_image(1, *size, seed) for seed, size in enumerate(SIZES)]
    pieces = [piece for image in images for piece in driver.tower.prepare(image)]
    assert [len(piece.feature_rows) for piece in pieces] == [1, 12, 21]
    assert_close(driver.features(pieces), their_features(model, images))
    if kernels.name == "cpu":
        check_bits(driver, images[2], images[1])


@pytest.mark.parametrize("layer", [-1, [1, 3]])
def test_features_of_pixtral_are_those_of_transformers(tmp_path: Path, layer: Any) -> None:
    model = save_pixtral(tmp_path, vision_feature_layer=layer)
    images = [random_image(1, 9, 15), random_image(1, 21, 3)]
    expected = their_features(model, images)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels)
        pieces = [piece for image in images for piece in driver.tower.prepare(image)]
        assert [len(piece.feature_rows) for piece in pieces] == [15, 7]
        assert_close(driver.features(pieces), expected)


def prompt() -> tuple[list[ImageInput], list[int]]:
    """Texts around two images, of 2 x 3 and 1 x 2 features, with what ends their lines."""
    line = [IMAGE] * 3
    tokens = [3, 17, *line, BREAK, *line, END, 42, 8, IMAGE, IMAGE, END, 61, 5, 23]
    return [random_image(1, 12, 18), random_image(1, 6, 12, seed=1)], tokens


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_logits_of_prompts_with_images_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = save_mistral3(tmp_path, kind)
    images, tokens = prompt()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), **padded_pixels(images, CLIP_PIXELS)).logits[0]
    for kernels in backends():
        driver, prompts = TowerDriver.load(tmp_path, kernels), ImagePrompts(tmp_path, kernels)
        features = driver.features([piece for image in images for piece in driver.tower.prepare(image)])
        at_once = prompts.run(tokens, features, [len(tokens)])
        assert_close(at_once, expected)
        if kernels.name == "cpu":
            assert torch.equal(prompts.run(tokens, features, [5, 1, 9, 3]), at_once)


def test_other_names_and_older_configurations_are_read(tmp_path: Path) -> None:
    save_mistral3(tmp_path, "mistral")
    kernels, image = next(backends()), random_image(1, 12, 18)

    def results() -> tuple[Tensor, Tensor]:
        driver = TowerDriver.load(tmp_path, kernels)
        features = driver.features(driver.tower.prepare(image))
        return features, ImagePrompts(tmp_path, kernels).run([3, *[IMAGE] * 6, 4], features, [8])

    def newer(name: str) -> str:
        name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
        return name if name.startswith("lm_head.") else f"model.{name}"

    expected = results()
    rename_tensors(tmp_path, newer)
    edit_config(tmp_path, vision_config={**VISION, "rope_parameters": None, "rope_theta": 100.0})
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_language_model_without_vision_config_has_no_tower(tmp_path: Path) -> None:
    save_mistral3(tmp_path)
    edit_config(tmp_path, vision_config=None)
    config = read_model_config(tmp_path)
    assert config.image_facts is None and config.tower is None
    assert config.architecture == "Mistral3ForConditionalGeneration"


@pytest.mark.parametrize("side", [(7, 6), (6, 3), (16384 + 2, 6)])
def test_other_sizes_are_refused(saved: tuple[Path, Any], side: tuple[int, int]) -> None:
    tower = TowerDriver.load(saved[0], next(backends())).tower
    with pytest.raises(InvalidRequestError, match=rf"multiples of 6 and at most 16383, not {side[0]} x {side[1]}"):
        tower.prepare(random_image(1, *side))


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ConfigError, "multiple of 4 . num_attention_heads", {"vision_config": {**VISION, "num_attention_heads": 3}}),
        (ConfigError, "num_channels must be 3", {"vision_config": {**VISION, "num_channels": 1}}),
        (UnsupportedModelError, "head_dim=24", {"vision_config": {**VISION, "head_dim": 24}}),
        (
            UnsupportedModelError,
            'rope_type="yarn"',
            {"vision_config": {**VISION, "rope_parameters": {"rope_type": "yarn"}}},
        ),
        (UnsupportedModelError, 'model_type="clip', {"vision_config": {"model_type": "clip_vision_model"}}),
        (UnsupportedModelError, "one layer's number", {"vision_feature_layer": [1, 2]}),
        (ConfigError, "a layer from -4 to 3", {"vision_feature_layer": 4}),
        (UnsupportedModelError, 'model_type="llama"', {"text_config": {**TEXT, "model_type": "llama"}}),
    ],
)
def test_what_is_not_supported_is_named(
    saved: tuple[Path, Any], tmp_path: Path, error: type[Exception], words: str, changes: dict[str, Any]
) -> None:
    raw = json.loads((saved[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(error, match=words):
        read_model_config(tmp_path)


#: Ministral-3-3B-Instruct-2512, without what does not say how to compute.
MINISTRAL_3B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vision_feature_layer": -1,
}


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINISTRAL_3B))
    processor = {"image_processor": {"size": {"longest_edge": 1540}, "patch_size": 14}, "spatial_merge_size": 2}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.tie_word_embeddings) == (3072, 26, True)
    assert config.text_architecture == "Ministral3ForCausalLM" and config.checkpoint_dtype == "bfloat16"
    assert config.image_facts is not None and config.image_facts.token_id == 10
    tower = config.tower
    assert isinstance(tower, PixtralTowerConfig)
    assert (tower.layers, tower.merge, tower.merge_eps, tower.projector_bias) == ((24,), 2, 1e-5, False)
    assert (tower.vision.head_dim, tower.vision.activation, tower.vision.largest) == (64, "silu", (110, 110))
    assert tower.vision.normalisation == CLIP_PIXELS


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_kernels_of_gpus_give_the_same(saved: tuple[Path, Any]) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.triton.backend import TritonKernels

    folder, model = saved
    image = random_image(1, 12, 18)
    kernels = TritonKernels("cuda" if torch.cuda.is_available() else "cpu", deterministic=True)
    driver = TowerDriver.load(folder, kernels)
    features = driver.features(driver.tower.prepare(image))
    assert_close(features, their_features(model, [image]))
