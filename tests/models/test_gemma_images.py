"""Gemma 3 with images against transformers: features, and logits of prompts whose images see all of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tower_harness import (
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

#: The image's token is past what the checkpoint's embeddings say of text, but in its vocabulary.
IMAGE = 100
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 128,
}
#: Heads of 18 dimensions; squares of 2 x 2 of 6 x 6 patches make 9 features.
VISION = {
    "hidden_size": 36,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 30,
    "patch_size": 5,
    "vision_use_head": False,
}
TOKENS = [3, 17, 8, *[IMAGE] * 9, 42, 8, 77, *[IMAGE] * 9, 61, *[IMAGE] * 9, 5, 6, 7]


def save_gemma3(folder: Path, window: int) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = TEXT | {"sliding_window": window}
    config = Gemma3Config(
        text_config=text,
        vision_config=VISION,
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        attn_implementation="eager",
    )
    return save_image_model(folder, Gemma3ForConditionalGeneration(config))


def logits_of(model: Any, tokens: list[int], pixels: Tensor) -> Tensor:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == IMAGE).long()).logits[0]
    return logits


#: Windows of fewer tokens than an image has, of as many as two images with what is between, and of all.
@pytest.mark.parametrize("window", [4, 23, 64])
def test_features_and_logits_are_those_of_transformers(tmp_path: Path, window: int) -> None:
    model = save_gemma3(tmp_path, window)
    image, other = random_image(3, 30, 30), random_image(1, 30, 30, seed=1)
    pixels = normal_pixels(image, SIGLIP_PIXELS)
    with torch.inference_mode():
        expected = model.get_image_features(pixels).pooler_output.flatten(0, 1)
    logits = logits_of(model, TOKENS, pixels)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=4)
        features = driver.features(driver.tower.prepare(image))
        assert len(features) == 27
        assert_close(features, expected)
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(TOKENS, features, [len(TOKENS)])
        assert_close(at_once, logits)
        # Chunks end anywhere but within an image.
        in_chunks = prompts.run(TOKENS, features, [2, 10, 1, 12, 10, 1])
        if kernels.name == "cpu":
            check_bits(driver, image, other)
            assert torch.equal(in_chunks, at_once)
        else:
            assert_close(in_chunks, logits)


def test_an_image_sees_itself_in_both_directions(tmp_path: Path) -> None:
    """The last piece of an image shows in its first token, and in nothing before the image."""
    save_gemma3(tmp_path, 64)
    kernels = list(backends())[-1]
    driver = TowerDriver.load(tmp_path, kernels)
    features = driver.features(driver.tower.prepare(random_image(3, 30, 30)))
    prompts = ImagePrompts(tmp_path, kernels)
    before = prompts.run(TOKENS, features, [len(TOKENS)])
    changed = features.clone()
    changed[17] += 1.0  # the last feature of the second image
    after = prompts.run(TOKENS, changed, [len(TOKENS)])
    same = (before == after).all(-1)
    second = TOKENS.index(77) + 1
    assert same[:second].all() and not same[second:].any()


def test_names_of_all_versions_are_read(tmp_path: Path) -> None:
    save_gemma3(tmp_path, 64)
    kernels, image = next(backends()), random_image(1, 30, 30)

    def logits() -> Tensor:
        driver = TowerDriver.load(tmp_path, kernels)
        features = driver.features(driver.tower.prepare(image))
        return ImagePrompts(tmp_path, kernels).run([3, *[IMAGE] * 9, 4], features, [11])

    def older(name: str) -> str:
        name = name.removeprefix("model.")
        if "vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        return name if "language_model.model." in name else name.replace("language_model.", "language_model.model.")

    expected = logits()
    rename_tensors(tmp_path, lambda name: name if name.startswith("model.") else f"model.{name}")
    assert torch.equal(logits(), expected)
    rename_tensors(tmp_path, older)
    assert torch.equal(logits(), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_kernels_of_gpus_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.triton.backend import TritonKernels

    model = save_gemma3(tmp_path, 23)
    image = random_image(3, 30, 30)
    expected = logits_of(model, TOKENS, normal_pixels(image, SIGLIP_PIXELS))
    kernels = TritonKernels("cuda" if torch.cuda.is_available() else "cpu", deterministic=True)
    driver = TowerDriver.load(tmp_path, kernels)
    features = driver.features(driver.tower.prepare(image))
    prompts = ImagePrompts(tmp_path, kernels)
    at_once = prompts.run(TOKENS, features, [len(TOKENS)])
    assert_close(at_once, expected)
    assert torch.equal(prompts.run(TOKENS, features, [2, 10, 1, 12, 10, 1]), at_once)
