"""Gemma 4 with images against transformers: pixels, features, and logits of prompts with images of several sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.errors import InvalidRequestError
from octavo.core.request import ImageInput
from octavo.images.processors import Gemma4Processor, read_image_processor
from octavo.models.config_files import read_json
from tests.image_models import picture
from tests.models.test_gemma4 import LARGE_MODEL, SMALL_MODEL
from tests.models.tower_harness import (
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    check_bits,
    random_image,
    save_image_model,
)

IMAGE = 100
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 600,
}
TOKENS = {"image_token_id": IMAGE, "boi_token_id": 98, "eoi_token_id": 99, "video_token_id": 97, "audio_token_id": 96}


def save(folder: Path, text: dict[str, Any], **vision: Any) -> Any:
    """E2B's kind of tower with bounds, or that of the larger models, whose features are standardised."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(
        text_config={"model_type": "gemma4_text", **json.loads(json.dumps(text))},
        vision_config={"model_type": "gemma4_vision", **VISION, **vision},
        **TOKENS,
    )
    config._attn_implementation = "eager"
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for index, (name, buffer) in enumerate(model.named_buffers()):
            if "vision_tower" in name and name.endswith(("_min", "_max")):
                buffer.fill_((1.0 + index % 5 / 4) * (-1 if name.endswith("_min") else 1))
            elif name.endswith(("std_bias", "std_scale")):
                torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
    return save_processor(folder, save_image_model(folder, model, std=0.15), "Gemma4ImageProcessor")


def save_unified(folder: Path) -> Any:
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = {name: value for name, value in LARGE_MODEL.items() if name != "hidden_size_per_layer_input"}
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 40, "mm_posemb_size": 80}
    config = Gemma4UnifiedConfig(
        text_config={"model_type": "gemma4_unified_text", **json.loads(json.dumps(text))},
        vision_config={"model_type": "gemma4_unified_vision", **vision, "output_proj_dims": 40},
        **TOKENS,
    )
    config._attn_implementation = "eager"
    model = save_image_model(folder, Gemma4UnifiedForConditionalGeneration(config), std=0.15)
    return save_processor(folder, model, "Gemma4UnifiedImageProcessor")


def save_processor(folder: Path, model: Any, kind: str) -> Any:
    settings = {"image_processor_type": kind, "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    settings |= {"do_normalize": False, "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def processed(picture: np.ndarray, model: Any) -> dict[str, Tensor]:
    """By transformers' processor; that of the unified models, which needs torchvision, merges the same patches."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)
    made = processor(images=[picture], return_tensors="pt")
    pixels, places = made["pixel_values"], made["image_position_ids"]
    if model.config.model_type == "gemma4_unified":
        held = (places[0] >= 0).all(-1)
        columns, lines = (places[0, held].max(0).values + 1).tolist()
        whole = pixels[0, held].reshape(lines, columns, 4, 4, 3).permute(0, 2, 1, 3, 4)
        squares = whole.reshape(lines // 3, 12, columns // 3, 12, 3).permute(0, 2, 1, 3, 4)
        pixels = squares.reshape(1, -1, 12 * 12 * 3)
        line, column = np.divmod(np.arange(pixels.shape[1]), columns // 3)
        places = torch.from_numpy(np.stack((column, line), axis=-1))[None]
    return {"pixel_values": pixels, "image_position_ids": places}


def features_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        output = model.get_image_features(**inputs)
    return torch.cat(list(output.pooler_output))


def logits_of(model: Any, tokens: list[int], inputs: dict[str, Tensor]) -> Tensor:
    ids = torch.tensor([tokens])
    is_image = (ids == IMAGE).long()
    # The masks of transformers' ``generate``: that of the unified models' forward has images see themselves everywhere.
    places = torch.arange(len(tokens))[None]
    masks = model.create_masks_for_generate(
        model.config, torch.zeros(1, len(tokens), 48), None, None, places, mm_token_type_ids=is_image
    )
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, attention_mask=masks, **inputs).logits[0]
    return logits


MODELS = {
    "per-layer inputs, bounds": lambda folder: save(folder, SMALL_MODEL, use_clipped_linears=True),
    "standardised, images see themselves": lambda folder: save(
        folder, LARGE_MODEL | {"use_bidirectional_attention": "vision"}, standardize=True
    ),
    "unified": save_unified,
}


@pytest.mark.parametrize("kind", MODELS)
def test_features_and_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind](tmp_path)
    pixels = picture(50, 150)
    inputs = processed(pixels, model)
    processor = read_image_processor(tmp_path, read_json(tmp_path / "config.json"))
    image = processor.process(pixels)
    # 4 x 14 features of 12 x 12 pixels are the most of this ratio.
    assert (image.image.height, image.image.width, image.num_features) == (48, 168, 56)
    expected = features_of(model, inputs)
    tokens = [3, 17, 98, *[IMAGE] * len(expected), 99, 42, 8, 77]
    logits = logits_of(model, tokens, inputs)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4, tokens=640)
        features = driver.features(driver.tower.prepare(image.image))
        assert_close(features, expected)
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, features, [len(tokens)])
        assert_close(at_once, logits)
        # An image that sees itself is computed in one step.
        in_chunks = prompts.run(tokens, features, [3, 57, 1] if prompts.facts.is_whole else [3, 20, 7])
        if kernels.name == "cpu":
            check_bits(driver, ImageInput.of(image.image.array()), random_image(1, 24, 36))
            assert torch.equal(in_chunks, at_once)
        else:
            assert_close(in_chunks, logits)


@pytest.mark.parametrize("size", [(7, 3), (100, 100), (640, 480), (3, 900), (2000, 4), (96, 96)])
def test_images_are_scaled_as_by_transformers(size: tuple[int, int]) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    processor = Gemma4Processor("i", "b", "e", feature_side=12, max_features=70, resample=3)
    image = processor.process(picture(*size))
    expected = get_aspect_ratio_preserving_size(*size, patch_size=4, max_patches=630, pooling_kernel_size=3)
    assert (image.image.height, image.image.width) == expected
    assert image.expansion == f"b{'i' * image.num_features}e" and image.num_features <= processor.max_features


def test_sizes_that_the_tower_has_no_places_for_are_refused(tmp_path: Path) -> None:
    save_unified(tmp_path)
    tower = TowerDriver.load(tmp_path, next(backends())).tower
    for sides in ((24, 30), (12, 81 * 12)):
        with pytest.raises(InvalidRequestError, match="sides of images must be multiples of 12 and at most 960"):
            tower.prepare(random_image(1, *sides))
