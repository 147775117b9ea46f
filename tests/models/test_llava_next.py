"""LLaVA-NeXT and Granite Vision against transformers: features of wholes and tiles, and logits of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.errors import InvalidRequestError, UnsupportedModelError
from octavo.core.request import ImageInput
from octavo.images.processors import LlavaNextProcessor
from octavo.models.config_files import read_model_config
from octavo.models.llava_next import LlavaNextTowerConfig
from tests.models.tower_harness import (
    CLIP_PIXELS,
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
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GRANITE = {
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 20,
    "patch_size": 5,
}
SIZES = [[20, 40], [40, 20], [40, 40], [20, 80]]
PROCESSOR = LlavaNextProcessor("x", 20, 4, [(20, 40), (40, 20), (40, 40), (20, 80)], 3)


def save_llava_next(folder: Path, text: dict[str, Any], vision: str, **changes: Any) -> Any:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    own = {"vision_use_head": False} if vision == "siglip" else {}
    config = LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT, **text},
        vision_config={"model_type": f"{vision}_vision_model", **VISION, **own},
        image_token_index=IMAGE,
        image_grid_pinpoints=SIZES,
        **changes,
    )
    if vision == "siglip":
        said = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return save_image_model(folder, LlavaNextForConditionalGeneration(config))


def processed(height: int, width: int, seed: int = 0) -> tuple[ImageInput, int]:
    """Of an image of this size, random pixels; and the number of its features."""
    made = PROCESSOR.process(random_image(1, height, width, seed).array()[0])
    return made.image, made.num_features


#: Padded above and below, on the left and right, not at all, and in a row of four tiles.
IMAGES = [(30, 40), (70, 21), (40, 40), (9, 60)]


@pytest.mark.parametrize(
    ("text", "vision", "changes"),
    [
        ({}, "clip", {}),
        (GRANITE, "siglip", {"vision_feature_select_strategy": "full", "vision_feature_layer": [-3, -2, -1]}),
    ],
)
def test_features_and_logits_are_those_of_transformers(
    tmp_path: Path, text: dict[str, Any], vision: str, changes: dict[str, Any]
) -> None:
    model = save_llava_next(tmp_path, text, vision, **changes)
    normalisation = SIGLIP_PIXELS if vision == "siglip" else CLIP_PIXELS
    images = [processed(*size, seed=seed) for seed, size in enumerate(IMAGES)]
    pixels = padded_tiles([image for image, _ in images], normalisation)
    tokens = [3, 17, *[t for _, count in images[:2] for t in (*[IMAGE] * count, 42)], 8, 61]
    with torch.inference_mode():
        made = model.model.get_image_features(pixels, torch.tensor(IMAGES)).pooler_output
        logits = model(
            input_ids=torch.tensor([tokens]), pixel_values=pixels[:2], image_sizes=torch.tensor(IMAGES[:2])
        ).logits[0]
    # transformers leaves out the factor that a Granite has alone, and before the tower of Granite 4.
    logits = logits / text.get("logits_scaling", 1.0)
    assert [len(features) for features in made] == [count for _, count in images]
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        ours = [driver.features(driver.tower.prepare(image)) for image, _ in images]
        for features, expected in zip(ours, made, strict=True):
            assert_close(features, expected)
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, torch.cat(ours[:2]), [len(tokens)])
        assert_close(at_once, logits)
        if kernels.name == "cpu":
            in_chunks = prompts.run(tokens, torch.cat(ours[:2]), [5, 1, 9, 3])
            assert torch.equal(in_chunks, at_once)
            driver.features(driver.tower.prepare(images[1][0]))
            assert torch.equal(driver.features(driver.tower.prepare(images[0][0])), ours[0])


def test_pieces_that_make_no_tiles_are_refused(tmp_path: Path) -> None:
    save_llava_next(tmp_path, {}, "clip")
    tower = TowerDriver.load(tmp_path, next(backends())).tower
    with pytest.raises(InvalidRequestError, match="a whole and tiles, and not 3 pieces"):
        tower.prepare(random_image(3, 20, 20))


#: granite-vision-3.3-2b, without what does not say how to compute.
GRANITE_VISION_2B: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [3840, 384]],
    "image_seq_length": 576,
    "image_token_index": 49155,
    "model_type": "llava_next",
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 300000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49156,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_image_newline_parameter": True,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "vision_feature_layer": [-24, -20, -12, -1],
    "vision_feature_select_strategy": "full",
}


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_VISION_2B))
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.text_architecture) == (2048, "GraniteForCausalLM")
    assert config.image_facts is not None and config.image_facts.token_id == 49155
    tower = config.tower
    assert isinstance(tower, LlavaNextTowerConfig)
    assert tower.layers == (4, 8, 16, 27) and tower.keeps_first and tower.vision.side == 27
    changed = GRANITE_VISION_2B | {"vision_feature_select_strategy": "default"}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(UnsupportedModelError, match="vision_feature_select_strategy must be full"):
        read_model_config(tmp_path)


def test_lines_end_with_the_learned_vector(tmp_path: Path) -> None:
    model = save_llava_next(tmp_path, {}, "clip")
    image, count = processed(30, 40)
    driver = TowerDriver.load(tmp_path, next(backends()))
    features = driver.features(driver.tower.prepare(image)).numpy()
    newline = model.model.image_newline.detach().numpy()
    assert image.layout is not None
    lines, columns = 8 - 2 * image.layout.top, 8 - 2 * image.layout.left
    assert count == 16 + lines * (columns + 1)
    ends = np.flatnonzero((features == newline).all(axis=1))
    assert ends.tolist() == [16 + line * (columns + 1) + columns for line in range(lines)]
