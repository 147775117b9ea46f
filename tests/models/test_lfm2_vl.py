"""LFM2-VL against transformers: features of pieces of several sizes, and logits of prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.request import ImageInput
from octavo.models.config_files import read_model_config
from octavo.models.lfm2_vl import Lfm2VlTowerConfig, grid_shares
from tests.models.tower_harness import (
    SIGLIP_PIXELS,
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    check_bits,
    padded_patches,
    random_image,
    save_image_model,
)

IMAGE = 99
TEXT: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
#: Positions are those of a grid of 5 x 5.
VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 25,
    "vision_use_head": False,
}


def save_lfm2_vl(folder: Path, **changes: Any) -> Any:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    config = Lfm2VlConfig(
        text_config=TEXT,
        vision_config={"model_type": "siglip2_vision_model", **VISION},
        image_token_id=IMAGE,
        projector_hidden_size=56,
        **changes,
    )
    return save_image_model(folder, Lfm2VlForConditionalGeneration(config))


def tiled_image() -> ImageInput:
    """Two tiles and a whole of another size."""
    return ImageInput.of(random_image(2, 16, 16).array(), random_image(1, 24, 8, seed=1))


def their_features(model: Any, *images: ImageInput) -> Tensor:
    with torch.inference_mode():
        features: Tensor = torch.cat(
            model.model.get_image_features(**padded_patches(images, 4, SIGLIP_PIXELS)).pooler_output
        )
    return features


@pytest.mark.parametrize("options", [{}, {"projector_use_layernorm": False, "projector_bias": False}])
def test_features_and_logits_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_lfm2_vl(tmp_path, **options)
    image, other = tiled_image(), random_image(1, 40, 32, seed=2)
    tokens = [3, 17, *[IMAGE] * 4, 50, *[IMAGE] * 4, 51, *[IMAGE] * 3, 42, *[IMAGE] * 20, 8, 61, 5]
    expected = their_features(model, image, other)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), **padded_patches([image, other], 4, SIGLIP_PIXELS)).logits[0]
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, block_size=8)
        pieces = driver.tower.prepare(image) + driver.tower.prepare(other)
        assert [len(piece.feature_rows) for piece in pieces] == [4, 4, 3, 20]
        features = driver.features(pieces)
        assert_close(features, expected)
        prompts = ImagePrompts(tmp_path, kernels)
        at_once = prompts.run(tokens, features, [len(tokens)])
        assert_close(at_once, logits)
        if kernels.name == "cpu":
            check_bits(driver, other, image)
            assert torch.equal(prompts.run(tokens, features, [5, 1, 9, 3]), at_once)


def test_bfloat16_has_the_errors_of_bfloat16(tmp_path: Path) -> None:
    model = save_lfm2_vl(tmp_path)
    image = random_image(1, 24, 40)
    expected = their_features(model, image)
    for kernels in backends():
        driver = TowerDriver.load(tmp_path, kernels, DType.BFLOAT16)
        features = driver.features(driver.tower.prepare(image))
        assert (features - expected).square().mean().sqrt() < 0.05 * expected.std()


@pytest.mark.parametrize("count", [1, 3, 16, 23, 40])
def test_positions_are_interpolated_as_by_torch(count: int) -> None:
    grid = torch.arange(16.0)[None, None, :, None].expand(1, 1, 16, 2).square()
    expected = torch.nn.functional.interpolate(
        grid, size=(count, 2), mode="bilinear", align_corners=False, antialias=True
    )
    shares = torch.from_numpy(grid_shares(count, 16))
    assert torch.allclose(shares @ grid[0, 0, :, 0], expected[0, 0, :, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("side", [(12, 8), (8, 6), (4104, 8)])
def test_other_sizes_are_refused(tmp_path: Path, side: tuple[int, int]) -> None:
    save_lfm2_vl(tmp_path)
    tower = TowerDriver.load(tmp_path, next(backends())).tower
    with pytest.raises(InvalidRequestError, match=rf"multiples of 8 and at most 4096, not {side[0]} x {side[1]}"):
        tower.prepare(random_image(1, *side))


#: LFM2-VL-450M, without what does not say how to compute.
LFM2_VL_450M: dict[str, Any] = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "downsample_factor": 2,
    "image_token_id": 396,
    "model_type": "lfm2_vl",
    "projector_bias": True,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_use_layernorm": True,
    "text_config": {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 1024,
        "block_ff_dim": 6656,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 7,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "layer_types": ["conv", "full_attention"] * 8,
        "max_position_embeddings": 128000,
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "vocab_size": 65536,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-06,
        "model_type": "siglip2_vision_model",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "num_patches": 256,
        "patch_size": 16,
        "vision_use_head": False,
    },
}


def test_a_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2_VL_450M))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.intermediate_size, config.tie_word_embeddings) == (1024, 4608, True)
    assert config.text_architecture == "Lfm2ForCausalLM" and config.checkpoint_dtype == "bfloat16"
    assert config.image_facts is not None and config.image_facts.token_id == 396
    tower = config.tower
    assert isinstance(tower, Lfm2VlTowerConfig)
    assert (tower.merge, tower.vision.side, tower.vision.post_norm, tower.max_patches) == (2, 16, True, 1024)
    assert tower.vision.normalisation == SIGLIP_PIXELS


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (ConfigError, r"num_patches \(200\) must be the square", {"vision_config": {**VISION, "num_patches": 200}}),
        (UnsupportedModelError, 'model_type="siglip_vision', {"vision_config": {"model_type": "siglip_vision_model"}}),
        (UnsupportedModelError, 'model_type="llama"', {"text_config": {"model_type": "llama"}}),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, error: type[Exception], words: str, changes: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LFM2_VL_450M | changes))
    with pytest.raises(error, match=words):
        read_model_config(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_interpreter")
def test_kernels_of_gpus_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.triton.backend import TritonKernels

    model = save_lfm2_vl(tmp_path)
    image = tiled_image()
    kernels = TritonKernels("cuda" if torch.cuda.is_available() else "cpu", deterministic=True)
    driver = TowerDriver.load(tmp_path, kernels)
    features = driver.features(driver.tower.prepare(image))
    assert_close(features, their_features(model, image))
