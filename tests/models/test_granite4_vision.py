"""Granite 4 Vision against transformers: features of wholes and tiles for each layer, and logits of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.request import ImageInput
from octavo.images.processors import LlavaNextProcessor, read_image_processor
from octavo.models.config_files import read_json, read_model_config
from octavo.models.granite4_vision import Granite4TowerConfig
from tests.models.tower_harness import (
    SIGLIP_PIXELS,
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    padded_tiles,
    random_image,
    save_image_model,
)

IMAGE = 99
TEXT: dict[str, Any] = {
    **{"model_type": "granite4_vision_text", "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80},
    **{"num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}
#: 8 x 8 patches of a tile make 4 x 4 features.
VISION: dict[str, Any] = {
    **{"model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 4, "vision_use_head": False},
}
SIZES = [[32, 64], [64, 32], [64, 64]]
SETTINGS: dict[str, Any] = {
    **{"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": SIZES},
    **{"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
PROCESSOR = LlavaNextProcessor("<image>", 32, 4, [(32, 64), (64, 32), (64, 64)], 3)
#: Padded above and below, and on the left and right.
IMAGES = [(48, 64), (60, 20)]


def save(folder: Path, **changes: Any) -> Any:
    from transformers import Granite4VisionConfig, Granite4VisionForConditionalGeneration

    config = Granite4VisionConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_index=IMAGE,
        image_grid_pinpoints=SIZES,
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        **{"deepstack_layer_map": [[-1, 0], [1, 3]], "spatial_vision_layer": -2, "spatial_target_layers": [1, 2, 5, 6]},
        **changes,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return save_image_model(folder, Granite4VisionForConditionalGeneration(config))


def processed(height: int, width: int, seed: int = 0) -> tuple[ImageInput, int]:
    """Of an image of this size, random pixels; and the number of its features."""
    made = PROCESSOR.process(random_image(1, height, width, seed).array()[0])
    return made.image, made.num_features


@pytest.mark.parametrize(
    "qformer",
    [
        {"intermediate_size": 96, "num_hidden_layers": 1, "cross_attention_frequency": 1},
        # The second layer does not read the windows.
        {"intermediate_size": 96, "num_hidden_layers": 3, "cross_attention_frequency": 2},
    ],
)
def test_features_and_logits_are_those_of_transformers(tmp_path: Path, qformer: dict[str, Any]) -> None:
    model = save(tmp_path, qformer_config={"model_type": "blip_2_qformer", **qformer})
    assert read_image_processor(tmp_path, read_json(tmp_path / "config.json")) == PROCESSOR
    images = [processed(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    pixels = padded_tiles([image for image, _ in images], SIGLIP_PIXELS)
    tokens = [3, 17, *[t for _, count in images for t in (*[IMAGE] * count, 42)], 8, 61]
    with torch.inference_mode():
        made = dict(model.model.get_image_features(pixels, torch.tensor(IMAGES)).deepstack_features)
        logits = model(input_ids=torch.tensor([tokens]), pixel_values=pixels, image_sizes=torch.tensor(IMAGES)).logits[
            0
        ]
    assert sorted(made) == [0, 1, 2, 3, 5, 6]
    made[0] = [features / TEXT["embedding_multiplier"] for features in made[0]]
    assert [len(features) for features in made[0]] == [count for _, count in images]
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        ours = [driver.features(driver.tower.prepare(image)) for image, _ in images]
        for index, features in enumerate(ours):
            for layer, vectors in zip(sorted(made), features.split(TEXT["hidden_size"], dim=1), strict=True):
                assert_close(vectors, made[layer][index])
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, torch.cat(ours), [len(tokens)])
        assert_close(at_once, logits)
        if kernels.name == "cpu":
            assert torch.equal(prompts.run(tokens, torch.cat(ours), [5, 1, 9, 3]), at_once)
            driver.features(driver.tower.prepare(images[1][0]))
            assert torch.equal(driver.features(driver.tower.prepare(images[0][0])), ours[0])


def test_a_query_begins_as_one_corner_or_as_the_mean(tmp_path: Path) -> None:
    """Every patch of a tile is in one square, whose rows follow each other line by line."""
    save(tmp_path)
    tower = read_model_config(tmp_path).tower
    assert isinstance(tower, Granite4TowerConfig)
    assert {each.layer: (each.tower_layer, each.corner) for each in tower.projectors} == {
        **{0: (3, None), 3: (1, None)},
        **{1: (2, 0), 2: (2, 1), 5: (2, 2), 6: (2, 3)},
    }
    # The first window's first squares, and the second window's first one.
    assert tower.order[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11] and tower.order[16:20].tolist() == [4, 5, 12, 13]


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"downsample_rate": "3/8"}, ConfigError, "the second is twice the first and divides .* not '3/8'"),
        ({"downsample_rate": None}, ConfigError, "downsample_rate must be"),
        ({"deepstack_layer_map": [[-1, 1]]}, UnsupportedModelError, "different layers of the decoder, and the first"),
        ({"spatial_target_layers": [0, 1, 2, 3]}, UnsupportedModelError, "different layers of the decoder"),
        ({"spatial_target_layers": [1, 2, 5, 7]}, ConfigError, r"go to the layers \[0, 3, 1, 2, 5, 7\]; .* has 7"),
        ({"deepstack_layer_map": [[-5, 0]]}, ConfigError, "deepstack_layer_map has the tower's layer -5; there are 3"),
        ({"deepstack_layer_map": [0, 1]}, ConfigError, "must be pairs of layers"),
        ({"vision_feature_select_strategy": "default"}, UnsupportedModelError, "strategy must be full"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, UnsupportedModelError, "clip_vision_model"),
        ({"qformer_config": {"use_qformer_text_input": True}}, UnsupportedModelError, "use_qformer_text_input"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    changes: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    config = {
        **{"architectures": ["Granite4VisionForConditionalGeneration"], "model_type": "granite4_vision"},
        **{"text_config": TEXT | {"rms_norm_eps": 1e-6}, "vision_config": VISION, "image_token_index": IMAGE},
        **{"deepstack_layer_map": [[-1, 0], [1, 3]], "spatial_target_layers": [1, 2, 5, 6]},
        **{"vision_feature_select_strategy": "full", "downsample_rate": "2/4"},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path).image_facts is not None
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=problem):
        read_model_config(tmp_path)
