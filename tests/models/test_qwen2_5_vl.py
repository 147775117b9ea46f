"""Qwen2.5-VL against transformers: features of images of several sizes, and logits of prompts with them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.plan import NewSequence
from octavo.core.request import Feature, Generate, ImageInput
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.interface import Kernels
from octavo.models.config_files import read_model_config
from octavo.models.qwen2_5_vl import Qwen25VLConfig
from octavo.runner.images import RotaryPositions
from octavo.runner.input_batch import FlatInputs
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
from tests.models.zoo import edit_config, rename_tensors

IMAGE = 99
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 3, 2]},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
#: Heads of 20 dimensions; patches of 2 pixels, features of 4, windows of 12: 3 x 3 features.
VISION = {
    "depth": 4,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 12,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1, 3],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
#: Within one window, of a few whole ones, and with windows that the image cuts on both sides.
SIZES = [(8, 4), (24, 12), (28, 20), (16, 64)]


def save_qwen(folder: Path, **changes: Any) -> Any:
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        vision_config=VISION,
        text_config=TEXT | changes,
        image_token_id=IMAGE,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )
    return save_image_model(folder, transformers.Qwen2_5_VLForConditionalGeneration(config))


def their_rows(image: ImageInput) -> tuple[Tensor, Tensor]:
    """Pixels and grid as transformers' processor gives them to the tower."""
    import transformers

    [pixels] = normal_pixels(image, CLIP_PIXELS)
    processor = transformers.Qwen2VLImageProcessor(
        do_resize=False, do_rescale=False, do_normalize=False, patch_size=2, merge_size=2
    )
    made = processor(pixels, return_tensors="pt", input_data_format="channels_first")
    return made["pixel_values"], made["image_grid_thw"]


def their_features(model: Any, image: ImageInput) -> Tensor:
    rows, grid = their_rows(image)
    with torch.inference_mode():
        features: Tensor = torch.cat(model.model.get_image_features(rows, grid).pooler_output)
    return features


class RotatedPrompts(ImagePrompts):
    """With the positions of images."""

    features: Sequence[Feature] = ()

    def rotary_positions(self, start: int, end: int) -> np.ndarray:
        rotary = RotaryPositions(1)
        rotary.add(NewSequence(0, [], 0, 0, Generate(SamplingParams(), 0), features=list(self.features)), 0)
        offsets = np.array([0, end - start], np.int32)
        arrays: dict[str, np.ndarray] = {"positions": np.arange(start, end), "query_start_loc": offsets}
        rotary.add_arrays(FlatInputs(arrays, 0, end, False), np.zeros(1, np.int64), np.array([start]))
        return arrays["rotary_positions"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save_qwen(folder)


@pytest.mark.parametrize("kernels", list(backends()), ids=lambda kernels: kernels.name)
def test_features_are_those_of_transformers(saved: tuple[Path, Any], kernels: Kernels) -> None:
    folder, model = saved
    driver = TowerDriver.load(folder, kernels, block_size=8)
    for seed, (height, width) in enumerate(SIZES):
        image = random_image(1, height, width, seed)
        [piece] = driver.tower.prepare(image)
        assert len(piece.feature_rows) == height * width // 16
        assert_close(driver.features([piece]), their_features(model, image))
    if kernels.name == "cpu":
        check_bits(driver, random_image(1, 28, 20), random_image(1, 16, 64))


def test_a_window_of_the_whole_image_is_one_segment(saved: tuple[Path, Any]) -> None:
    tower = TowerDriver.load(saved[0], next(backends())).tower
    assert tower.prepare(random_image(1, 12, 12))[0].segments == (36,)
    assert tower.prepare(random_image(1, 16, 28))[0].segments == (36, 36, 12, 12, 12, 4)


@pytest.mark.parametrize("kernels", list(backends()), ids=lambda kernels: kernels.name)
def test_logits_of_prompts_with_images_are_those_of_transformers(saved: tuple[Path, Any], kernels: Kernels) -> None:
    """Two images of unlike sizes between texts, and what follows them; in chunks that cut images."""
    folder, model = saved
    images = [random_image(1, 28, 20), random_image(1, 8, 16, seed=1)]
    counts = [35, 8]
    tokens = [3, 17, 97, *[IMAGE] * 35, 96, 42, 8, 97, *[IMAGE] * 8, 96, 61, 5, 23]
    rows, grids = (torch.cat(parts) for parts in zip(*map(their_rows, images), strict=True))
    types = torch.tensor([[int(token == IMAGE) for token in tokens]])
    with torch.inference_mode():
        expected = model(
            input_ids=torch.tensor([tokens]), pixel_values=rows, image_grid_thw=grids, mm_token_type_ids=types
        ).logits[0]
    driver, prompts = TowerDriver.load(folder, kernels), RotatedPrompts(folder, kernels)
    prompts.features = [Feature(3, 35, b"", grid=(1, 7, 5)), Feature(42, 8, b"", grid=(1, 2, 4))]
    features = torch.cat([driver.features(driver.tower.prepare(image)) for image in images])
    assert len(features) == sum(counts)
    at_once = prompts.run(tokens, features, [len(tokens)])
    assert_close(at_once, expected)
    if kernels.name == "cpu":
        assert torch.equal(prompts.run(tokens, features, [5, 1, 9, 3]), at_once)


def test_texts_have_the_bits_of_a_network_without_such_positions(saved: tuple[Path, Any]) -> None:
    tokens, none = [3, 17, 42, 8, 61, 5, 23], torch.zeros(0, 48)
    for kernels in backends():
        rotated = RotatedPrompts(saved[0], kernels).run(tokens, none, [3, 1])
        plain = ImagePrompts(saved[0], kernels)
        network: Any = plain.network
        for layer in network.layers:
            layer.attention.rotary.sections = ()
        plain.forward = kernels.capture(plain._forward, replace(plain.size, rotary_axes=0))
        assert torch.equal(plain.run(tokens, none, [3, 1]), rotated)


@pytest.mark.parametrize("side", [(30, 28), (28, 2), (4 * 8192, 4)])
def test_other_sizes_are_refused(saved: tuple[Path, Any], side: tuple[int, int]) -> None:
    tower = TowerDriver.load(saved[0], next(backends())).tower
    with pytest.raises(InvalidRequestError, match=rf"multiples of 4 and at most 16384, not {side[0]} x {side[1]}"):
        tower.prepare(random_image(1, *side))


def test_other_forms_of_checkpoints_are_read(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """The names that some versions of transformers give tensors, and a flat config.json as that of the first models."""
    folder, image = tmp_path, random_image(1, 12, 8)
    save_qwen(folder)
    kernels = next(backends())
    config, prompt = read_model_config(folder), [3, 17, 42]

    def results() -> tuple[Tensor, Tensor]:
        driver, prompts = TowerDriver.load(folder, kernels), RotatedPrompts(folder, kernels)
        return driver.features(driver.tower.prepare(image)), prompts.run(prompt, torch.zeros(0, 48), [3])

    expected = results()
    rename_tensors(
        folder, lambda name: re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name))
    )
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)
    vision = VISION | {"in_chans": 3, "rope_parameters": None, "spatial_patch_size": 2}
    flat = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    scaling = {"type": "mrope", "mrope_section": [1, 3, 2]}
    edit_config(folder, text_config=None, vision_config=vision, **flat, rope_theta=100.0, rope_scaling=scaling)
    old = read_model_config(folder)
    assert isinstance(old, Qwen25VLConfig) and isinstance(config, Qwen25VLConfig)
    assert old.rope.theta == 100.0 and old.rope.sections == config.rope.sections == (1, 3, 2)
    assert old.vision.rope.theta == 10000.0
    edit_config(folder, vision_config=VISION)
    for ours, theirs in zip(results(), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": TEXT | {"rope_parameters": {"mrope_section": [1, 2, 2]}}}, "mrope_section must sum to 6"),
        ({"text_config": TEXT | {"rope_parameters": {"mrope_section": "all"}}}, "list of numbers of pairs, not 'all'"),
        ({"vision_config": VISION | {"out_hidden_size": 40}}, r"out_hidden_size \(40\) must be"),
        ({"vision_config": VISION | {"num_heads": 4}}, "multiple of 4 . num_heads"),
        ({"vision_config": VISION | {"fullatt_block_indexes": [4]}}, r"layers below 4, not \[4\]"),
        ({"vision_config": VISION | {"window_size": 3}}, r"at least that of a feature \(4\): 3"),
        ({"vision_config": VISION | {"in_channels": 1}}, "3 channels"),
    ],
)
def test_impossible_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_qwen(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


#: Qwen2.5-VL-3B-Instruct, without what does not say how to compute.
QWEN_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 151936,
}


def test_the_published_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    config = read_model_config(tmp_path)
    assert isinstance(config, Qwen25VLConfig)
    assert config.head_dim == 128 and config.qkv_bias and not config.o_bias and config.tie_word_embeddings
    assert config.rope.theta == 1e6 and config.rope.rope_type == "default" and config.rope.sections == (16, 24, 24)
    assert config.sliding_windows == (None,) * 36 and config.max_position == 128000
    assert config.image_facts is not None and config.image_facts.token_id == 151655
    vision = config.vision
    assert vision.head_dim == 80 and vision.full_layers == {7, 15, 23, 31} and vision.window == 4
    assert vision.max_patches == 65536
    assert vision.normalisation == CLIP_PIXELS and vision.activation == "silu" and vision.rope.theta == 10000.0
