"""Idefics3 and SmolVLM against transformers: features of pieces, and logits of prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.models.config_files import read_model_config
from octavo.models.idefics3 import Idefics3TowerConfig, _bucket
from octavo.models.vision import VitConfig
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

IMAGE = 99
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
#: Heads of 20 dimensions; 6 x 6 patches of a piece make 9 features.
VISION = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 30,
    "patch_size": 5,
}


def save_idefics3(folder: Path, family: str = "Idefics3", **vision: int) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vision_config=VISION | vision,
        text_config={"model_type": "llama", **TEXT},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return save_image_model(folder, getattr(transformers, f"{family}ForConditionalGeneration")(config))


@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
def test_features_and_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_idefics3(tmp_path, family)
    image, other = random_image(3, 30, 30), random_image(1, 30, 30, seed=1)
    pixels = normal_pixels(image, SIGLIP_PIXELS)[None]
    tokens = [3, 17, *[IMAGE] * 9, 42, 8, *[IMAGE] * 9, 61, *[IMAGE] * 9, 5]
    with torch.inference_mode():
        expected = torch.cat(model.model.get_image_features(pixels).pooler_output)
        logits = model(input_ids=torch.tensor([tokens]), pixel_values=pixels).logits[0]
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


@pytest.mark.parametrize("head_dim", [72, 80])
def test_heads_that_fill_no_registers(tmp_path: Path, head_dim: int) -> None:
    model = save_idefics3(tmp_path, hidden_size=2 * head_dim)
    image = random_image(1, 30, 30)
    pixels = normal_pixels(image, SIGLIP_PIXELS)[None]
    with torch.inference_mode():
        expected = torch.cat(model.model.get_image_features(pixels).pooler_output)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels)
        assert_close(driver.features(driver.tower.prepare(image)), expected)


def test_bfloat16_has_the_errors_of_bfloat16(tmp_path: Path) -> None:
    model = save_idefics3(tmp_path)
    image = random_image(2, 30, 30)
    pixels = normal_pixels(image, SIGLIP_PIXELS)[None]
    with torch.inference_mode():
        expected = torch.cat(model.model.get_image_features(pixels).pooler_output)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, DType.BFLOAT16)
        features = driver.features(driver.tower.prepare(image))
        assert (features - expected).square().mean().sqrt() < 0.05 * expected.std()
        if kernels.name == "cpu":
            check_bits(driver, image, random_image(1, 30, 30, seed=1))


def test_smaller_pieces_have_positions_of_their_relative_places(tmp_path: Path) -> None:
    model = save_idefics3(tmp_path)
    image = random_image(1, 20, 20)
    pixels = normal_pixels(image, SIGLIP_PIXELS)[None]
    with torch.inference_mode():
        expected = torch.cat(model.model.get_image_features(pixels).pooler_output)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels)
        pieces = driver.tower.prepare(image)
        assert len(pieces[0].feature_rows) == 4
        assert_close(driver.features(pieces), expected)


@pytest.mark.parametrize("side", [2, 14, 26, 27, 32, 70])
def test_places_at_boundaries_fall_where_those_of_torch_do(side: int) -> None:
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    for count in range(1, side + 1):
        fractions = torch.clamp(torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count)), max=1.0 - 1e-6)
        expected = torch.bucketize(fractions, boundaries, right=True)
        assert torch.equal(torch.from_numpy(_bucket(np.arange(count), count, side)), expected), count


@pytest.mark.parametrize(("height", "width"), [(40, 40), (25, 30), (30, 32)])
def test_other_pieces_are_refused(tmp_path: Path, height: int, width: int) -> None:
    save_idefics3(tmp_path)
    tower = TowerDriver.load(tmp_path, next(backends())).tower
    with pytest.raises(InvalidRequestError, match=rf"multiples of 10 and at most 30, not {height} x {width}"):
        tower.prepare(random_image(1, height, width))


def test_names_of_older_checkpoints_are_read(tmp_path: Path) -> None:
    save_idefics3(tmp_path)
    kernels = next(backends())
    image = random_image(1, 30, 30)
    driver = TowerDriver.load(tmp_path, kernels)
    expected = driver.features(driver.tower.prepare(image))
    rename_tensors(tmp_path, lambda name: name.removeprefix("model."))
    driver = TowerDriver.load(tmp_path, kernels)
    assert torch.equal(driver.features(driver.tower.prepare(image)), expected)


#: SmolVLM-256M-Instruct, without what does not say how to compute.
SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "idefics3_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
    },
}


def read(folder: Path, raw: dict[str, Any]) -> tuple[ModelConfig, VitConfig]:
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_model_config(folder)
    assert isinstance(config.tower, Idefics3TowerConfig)
    return config, config.tower.vision


def test_a_published_config_is_read(tmp_path: Path) -> None:
    config, vision = read(tmp_path, SMOLVLM_256M)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (576, 30, 49280)
    assert config.architecture == "Idefics3ForConditionalGeneration" and config.checkpoint_dtype == "bfloat16"
    assert config.image_facts is not None and config.image_facts.token_id == 49190
    assert vision.side == 32 and vision.head_dim == 64 and vision.num_layers == 12
    assert vision.normalisation == SIGLIP_PIXELS
    with pytest.raises(ConfigError, match=r"scale_factor \(5\) must divide"):
        read(tmp_path, SMOLVLM_256M | {"scale_factor": 5})


def test_pixels_are_normalised_as_the_folder_says(tmp_path: Path) -> None:
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "rescale_factor": 1 / 255}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    found = read(tmp_path, SMOLVLM_256M)[1].normalisation
    assert found is not None and (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"do_normalize": False}}))
    found = read(tmp_path, SMOLVLM_256M)[1].normalisation
    assert found is not None and (found.mean, found.std) == ((0.0,) * 3, (1.0,) * 3)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_mean": [0.5]}}))
    with pytest.raises(ConfigError, match="image_mean must be three numbers"):
        read(tmp_path, SMOLVLM_256M)
