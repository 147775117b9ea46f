"""Qwen3-VL against transformers: features of images of several sizes, and logits of prompts with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.request import Feature, ImageInput
from octavo.kernels.interface import Kernels
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.models.config_files import read_model_config
from octavo.models.network import build_rank_without_weights
from octavo.models.qwen3_vl import Qwen3VLConfig, Qwen3VLMoeConfig, Qwen35Config
from tests.models.test_qwen2_5_vl import RotatedPrompts, their_rows
from tests.models.tower_harness import (
    ImagePrompts,
    TowerDriver,
    assert_close,
    backends,
    check_bits,
    random_image,
    save_image_model,
)
from tests.models.zoo import edit_config

IMAGE = 99
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 3, 1]},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
#: Heads of 20 dimensions; patches of 2 pixels, features of 4; learned positions of 5 x 5 places.
VISION = {
    "depth": 4,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2, 3],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
#: Smaller and larger than the grid of learned positions, and exactly that in one direction.
SIZES = [(8, 4), (24, 12), (28, 20), (4, 64), (4, 4)]


def save_qwen3(folder: Path, *, experts: bool = False) -> Any:
    import transformers

    kind = "Qwen3VLMoe" if experts else "Qwen3VL"
    config = getattr(transformers, f"{kind}Config")(
        vision_config=VISION,
        text_config=TEXT | (EXPERTS if experts else {}),
        image_token_id=IMAGE,
        video_token_id=98,
        vision_start_token_id=97,
        vision_end_token_id=96,
    )
    return save_image_model(folder, getattr(transformers, f"{kind}ForConditionalGeneration")(config))


def their_features(model: Any, image: ImageInput) -> Tensor:
    """Beside each other: the embeddings, and what is added in the layers."""
    rows, grid = their_rows(image)
    with torch.inference_mode():
        found = model.model.get_image_features(rows, grid)
    return torch.cat([torch.cat(parts) for parts in (found.pooler_output, *found.deepstack_features)], dim=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_qwen3(folder)


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


#: Two images of unlike sizes between texts, and what follows them.
PROMPT = [3, 17, 97, *[IMAGE] * 35, 96, 42, 8, 97, *[IMAGE] * 8, 96, 61, 5, 23]
PLACES = [Feature(3, 35, b"", grid=(1, 7, 5)), Feature(42, 8, b"", grid=(1, 2, 4))]


def images() -> list[ImageInput]:
    return [random_image(1, 28, 20), random_image(1, 8, 16, seed=1)]


def their_logits(model: Any) -> Tensor:
    rows, grids = (torch.cat(parts) for parts in zip(*map(their_rows, images()), strict=True))
    types = torch.tensor([[int(token == IMAGE) for token in PROMPT]])
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor([PROMPT]), pixel_values=rows, image_grid_thw=grids, mm_token_type_ids=types
        ).logits[0]
    return logits


def our_logits(folder: Path, kernels: Kernels, *sizes: list[int]) -> list[Tensor]:
    """Of the prompt in chunks of these sizes."""
    driver, prompts = TowerDriver.load(folder, kernels), RotatedPrompts(folder, kernels)
    prompts.features = PLACES
    features = torch.cat([driver.features(driver.tower.prepare(image)) for image in images()])
    return [prompts.run(PROMPT, features, each) for each in sizes]


@pytest.mark.parametrize("kernels", list(backends()), ids=lambda kernels: kernels.name)
def test_logits_of_prompts_with_images_are_those_of_transformers(saved: tuple[Path, Any], kernels: Kernels) -> None:
    folder, model = saved
    at_once, cut = our_logits(folder, kernels, [len(PROMPT)], [5, 1, 9, 3])
    assert_close(at_once, their_logits(model))
    if kernels.name == "cpu":
        assert torch.equal(cut, at_once)


@pytest.mark.parametrize("inputs_first", [False, True], ids=["of transformers 5", "published"])
def test_a_mixture_in_either_form_of_its_experts(tmp_path: Path, inputs_first: bool) -> None:
    model = save_qwen3(tmp_path, experts=True)
    if inputs_first:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
        assert {tuple(each.shape) for each in turned.values()} == {(4, 48, 40), (4, 20, 48)}
        save_file(tensors | turned, file, metadata={"format": "pt"})
    kernels = [*backends()][-1]
    at_once, cut = our_logits(tmp_path, kernels, [len(PROMPT)], [5, 1, 9, 3])
    assert_close(at_once, their_logits(model))
    if kernels.name == "cpu":
        assert torch.equal(cut, at_once)


def test_texts_have_the_bits_of_a_network_without_such_positions(saved: tuple[Path, Any]) -> None:
    tokens, none = [3, 17, 42, 8, 61, 5, 23], torch.zeros(0, 4 * 48)
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


def test_the_first_stage_has_the_layers_with_features(saved: tuple[Path, Any]) -> None:
    config = read_model_config(saved[0])
    context = LayerContext(ReferenceKernels(), DType.FLOAT32, layers=range(2), virtual_tokens=8)
    with pytest.raises(ConfigError, match="before layer 3, which must be in the first pipeline stage"):
        build_rank_without_weights(config, context)
    later = build_rank_without_weights(config, replace(context, layers=range(2, 3)))
    later.set_features(0, np.zeros((0, 0), np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": TEXT | {"rope_parameters": {"mrope_section": [1, 2, 2]}}}, "mrope_section must sum to 8"),
        ({"vision_config": VISION | {"out_hidden_size": 40}}, r"out_hidden_size \(40\) must be"),
        ({"vision_config": VISION | {"num_heads": 4}}, "multiple of 4 . num_heads"),
        ({"vision_config": VISION | {"deepstack_visual_indexes": [4]}}, r"layers below 4, not \[4\]"),
        ({"vision_config": VISION | {"deepstack_visual_indexes": [2, 1]}}, r"ascending, not \[2, 1\]"),
        (
            {"vision_config": VISION | {"deepstack_visual_indexes": [0, 1, 2, 3]}},
            "has 4 layers, but the decoder only 3",
        ),
        ({"vision_config": VISION | {"num_position_embeddings": 24}}, "those of a square, not 24"),
    ],
)
def test_impossible_configurations_are_refused(
    saved: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


#: Of published checkpoints, without what does not say how to compute.
VISION_4B: dict[str, Any] = {
    **{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024},
    **{"in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16},
    **{"num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2},
    "temporal_patch_size": 2,
}
QWEN_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    **{"image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": True},
    "text_config": {
        **{"attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645},
        **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728},
        **{"max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32},
        **{"num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936,
    },
    "vision_config": VISION_4B,
}


def test_the_published_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_4B))
    bounds = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(bounds | {"patch_size": 16}))
    config = read_model_config(tmp_path)
    assert isinstance(config, Qwen3VLConfig)
    assert config.head_dim == 128 and config.qk_norm and not config.qkv_bias and config.tie_word_embeddings
    assert config.rope.theta == 5e6 and config.rope.rope_type == "default" and config.rope.axes == 3
    assert config.rope.sections == (1,) * 60 + (4,) and config.max_position == 262144
    facts = config.image_facts
    assert facts is not None and (facts.token_id, facts.layers, facts.vectors) == (151655, (1, 2, 3), 4)
    vision = config.vision
    assert vision.head_dim == 64 and vision.deep_layers == (5, 11, 17) and vision.side == 48 and vision.frames == 2
    assert vision.max_patches == 65536 and vision.activation == "gelu_tanh" and vision.normalisation.mean == (0.5,) * 3


def test_the_published_mixture(tmp_path: Path) -> None:
    text = QWEN_4B["text_config"] | {"model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "num_experts": 128}
    text |= {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": []}
    content = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    vision = VISION_4B | {"out_hidden_size": 2048}
    whole = QWEN_4B | content | {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_model_config(tmp_path)
    assert isinstance(config, Qwen3VLMoeConfig) and not config.tie_word_embeddings
    assert (
        config.mixture.num_experts == 128 and config.mixture.routing.top_k == 8 and config.mixture.routing.renormalize
    )
    assert {rope.sections for rope in config.ropes if rope is not None} == {(1,) * 60 + (4,)}


def test_qwen3_5_has_the_tower_without_deep_layers(tmp_path: Path) -> None:
    """As Qwen3.5-4B; without a tower in config.json or the file of the image processor it reads texts alone."""
    text = {
        **{"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216},
        **{"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256},
        **{"max_position_embeddings": 262144, "eos_token_id": 248044, "full_attention_interval": 4},
        "rope_parameters": {
            **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
            **{"rope_theta": 10000000, "partial_rotary_factor": 0.25},
        },
    }
    content = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056}
    vision = {name: value for name, value in VISION_4B.items() if name != "deepstack_visual_indexes"}
    (tmp_path / "config.json").write_text(json.dumps(content | {"text_config": text, "vision_config": vision}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = read_model_config(tmp_path)
    assert isinstance(config, Qwen35Config) and config.vision is not None and config.vision.deep_layers == ()
    assert config.rope.sections == (1,) * 32 and config.rope.partial_rotary_factor == 0.25
    facts = config.image_facts
    assert facts is not None and facts.token_id == 248056 and facts.layers == ()
    (tmp_path / "preprocessor_config.json").unlink()
    plain = read_model_config(tmp_path)
    assert isinstance(plain, Qwen35Config) and plain.vision is None and plain.image_facts is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    edit_config(tmp_path, vision_config=None)
    assert read_model_config(tmp_path) == plain
