"""What families make of images is what transformers' processors on Pillow make of them, to the bit.

Its processors on torchvision round differently after they resize, by a level of 255.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.images.image_files import normalisation_of
from octavo.images.processors import AnyProcessor, Qwen2_5_VLProcessor, read_image_processor, read_settings
from tests.images.image_cases import noise, scene
from tests.images.processor_folders import CONFIGS, PROCESSORS, write_folder

#: Height and width: small, square, long, odd, near the families' own sizes and multiples of them.
SIZES = [
    (1, 1),
    (2, 3),
    (17, 200),
    (200, 17),
    (14, 14),
    (28, 57),
    (224, 224),
    (335, 337),
    (336, 336),
    (364, 364),
    (365, 364),
    (512, 1024),
    (513, 1025),
    (333, 500),
    (480, 640),
    (896, 896),
    (777, 1333),
    (1500, 1001),
]
#: Modules in transformers, and the classes in them.
CLASSES = {
    "llava": ("clip.image_processing_pil_clip", "CLIPImageProcessorPil"),
    "idefics3": ("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
    "gemma3": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
    "internvl": ("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil"),
    "llava_next": ("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil"),
    "mistral3": ("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil"),
    "qwen2_5_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
}
#: Sides of patches of the families whose images are rows of patches.
PATCHES = {"qwen2_5_vl": 14, "qwen3_vl": 16}


def peer(folder: Path, module: str, name: str) -> Any:
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return cls(**json.loads((folder / "preprocessor_config.json").read_text()))


def patches(pixels: np.ndarray, patch: int) -> np.ndarray:
    """Qwen's rows of a normalised image [height, width, 3]: 2 x 2 patches beside each other, twice."""
    height, width, _ = pixels.shape
    side = 2 * patch
    cut = pixels.reshape(height // side, 2, patch, width // side, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    twice = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
    return twice.reshape(-1, 3 * 2 * patch**2)


def check_against_peer(folder: Path, config: dict[str, Any], image: np.ndarray, reference: Any, family: str) -> None:
    processed = read_image_processor(folder, config).process(image)
    rows = normalisation_of(read_settings(folder, config)).rows(processed.image.array())
    expected = reference(image, return_tensors="np", input_data_format="channels_last", **ROWS.get(family, {}))
    values = expected["pixel_values"]
    if family in PATCHES:
        assert np.array_equal(patches(rows[0], PATCHES[family]), values)
        grid = expected["image_grid_thw"][0]
        assert processed.grid == (1, grid[1] // 2, grid[2] // 2)
    else:
        values = values.reshape(-1, *values.shape[-3:])
        assert np.array_equal(rows, values.transpose(0, 2, 3, 1))
        assert processed.grid is None
    assert rows.dtype == values.dtype == np.float32
    assert processed.expansion == expected_expansion(family, expected)
    assert processed.num_features == processed.expansion.count(FEATURES[family])
    assert processed.num_features <= read_image_processor(folder, config).max_features


TILED = ("idefics3", "smolvlm", "internvl", "llava_next")
#: What their processors do not tell by default.
ROWS: dict[str, dict[str, Any]] = {
    "idefics3": {"return_row_col_info": True},
    "smolvlm": {"return_row_col_info": True},
    "internvl": {"crop_to_patches": True},
}
FEATURES = {
    "llava": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3": "<image_soft_token>",
    "internvl": "<IMG_CONTEXT>",
    "llava_next": "<image>",
    "mistral3": "[IMG]",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
}


def expected_expansion(family: str, inputs: Any) -> str:
    """What transformers' processor of the family puts in the place of an image; it needs only a few of its members."""
    if family == "smolvlm":
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        rows, columns = inputs["rows"][0][0], inputs["cols"][0][0]
        return get_image_prompt_string(rows, columns, 64, "<fake_token_around_image>", "<image>", "<global-img>")
    families: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llava": (
            "llava.processing_llava",
            "LlavaProcessor",
            {
                "image_token": "<image>",
                "patch_size": 14,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        "idefics3": (
            "idefics3.processing_idefics3",
            "Idefics3Processor",
            {
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_tag": "<global-img>",
                "image_seq_len": 169,
            },
        ),
        "gemma3": (
            "gemma3.processing_gemma3",
            "Gemma3Processor",
            {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"},
        ),
        "internvl": (
            "internvl.processing_internvl",
            "InternVLProcessor",
            {
                "start_image_token": "<img>",
                "image_token": "<IMG_CONTEXT>",
                "end_image_token": "</img>",
                "image_seq_length": 256,
            },
        ),
        "llava_next": ("llava_next.processing_llava_next", "LlavaNextProcessor", {}),
        "mistral3": (
            "pixtral.processing_pixtral",
            "PixtralProcessor",
            {
                "image_token": "[IMG]",
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
                "patch_size": 14,
                "spatial_merge_size": 2,
            },
        ),
        "qwen2_5_vl": (
            "qwen2_5_vl.processing_qwen2_5_vl",
            "Qwen2_5_VLProcessor",
            {"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=2)},
        ),
        "qwen3_vl": (
            "qwen3_vl.processing_qwen3_vl",
            "Qwen3VLProcessor",
            {"image_token": "<|image_pad|>", "image_processor": SimpleNamespace(merge_size=2)},
        ),
    }
    module, name, members = families[family]
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    if family == "llava_next":  # several of its methods count
        processor = object.__new__(cls)
        sizes = PROCESSORS["llava_next"]["image_grid_pinpoints"]
        processor.image_processor = SimpleNamespace(image_grid_pinpoints=sizes)
        processor.patch_size, processor.num_additional_image_tokens = 14, 0
        processor.vision_feature_select_strategy, processor.image_token = "full", "<image>"
        return processor.replace_image_token(inputs, 0)
    return cls.replace_image_token(SimpleNamespace(**members), inputs, 0)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((family, [(1, 1), (28, 57)]) for family in CLASSES),
        # Of the families that make many pieces of any image, a few: the next test has the others.
        *(pytest.param(family, SIZES[::5] if family in TILED else SIZES, marks=pytest.mark.slow) for family in CLASSES),
    ],
)
def test_pixels_and_expansions_are_those_of_transformers(
    family: str, sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    folder, config = write_folder(tmp_path, family)
    reference = peer(folder, *CLASSES[family])
    for height, width in sizes:
        check_against_peer(folder, config, scene(height, width), reference, family)
    check_against_peer(folder, config, noise(101, 467), reference, family)


@pytest.mark.parametrize("family", CLASSES)
def test_random_sizes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """With small networks, so that many are quick."""
    small: dict[str, dict[str, Any]] = {
        "llava": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 42}},
        "idefics3": {"size": {"longest_edge": 113}, "max_image_size": {"longest_edge": 28}},
        "smolvlm": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        "gemma3": {"size": {"height": 56, "width": 56}},
        "internvl": {"size": {"height": 28, "width": 42}},
        "llava_next": {
            **{"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [112, 56], [28, 140]],
        },
        "mistral3": {"size": {"longest_edge": 140}},
        "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 20000},
        "qwen3_vl": {"size": {"shortest_edge": 4096, "longest_edge": 26000}},
    }
    folder, config = write_folder(tmp_path, family, **small[family])
    reference = peer(folder, *CLASSES[family])
    processor, normalisation = read_image_processor(folder, config), normalisation_of(read_settings(folder, config))

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(1, 300), st.integers(1, 300))
    def check(height: int, width: int) -> None:
        # Of longer images, LLaVA-NeXT's tiles of 2 x 2 features would leave none, and transformers' Pixtral no pixels.
        if max(height, width) > {"llava_next": 4, "mistral3": 140}.get(family, 200) * min(height, width):
            return
        image = scene(height, width)
        processed = processor.process(image)
        rows = normalisation.rows(processed.image.array())
        options = {"crop_to_patches": True} if family == "internvl" else {}
        made = reference(image, return_tensors="np", input_data_format="channels_last", **options)
        values = made["pixel_values"]
        if family in PATCHES:
            assert np.array_equal(patches(rows[0], PATCHES[family]), values)
        else:
            values = values.reshape(-1, *values.shape[-3:])
            assert np.array_equal(rows, values.transpose(0, 2, 3, 1))
        assert processed.num_features <= processor.max_features

    check()


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty torchvision where there is none: some modules of transformers import it, and no test calls it."""
    from transformers import utils

    if not utils.is_torchvision_available():
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["torchvision.transforms.v2"], "functional", None, raising=False)


@pytest.fixture
def lfm2_vl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' image processor and processor of LFM2-VL, with Pillow where they resize with torchvision."""
    from transformers import image_processing_backends

    module = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    texts = importlib.import_module("transformers.models.lfm2_vl.processing_lfm2_vl")

    def resized(self: Any, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
        whole = Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((size.width, size.height), 2)
        return torch.from_numpy(np.asarray(whole).copy()).permute(2, 0, 1)[None]

    monkeypatch.setattr(image_processing_backends.TorchvisionBackend, "resize", resized)
    processor = object.__new__(texts.Lfm2VlProcessor)
    processor.image_processor = object.__new__(module.Lfm2VlImageProcessor)
    processor.image_token, processor.image_thumbnail_token = "<image>", "<|img_thumbnail|>"
    processor.image_start_token, processor.image_end_token = "<|image_start|>", "<|image_end|>"
    return processor


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 6},
        {"tile_size": 64, "min_image_tokens": 2, "max_image_tokens": 6, "use_thumbnail": False, "min_tiles": 3},
        {"do_image_splitting": False, "min_image_tokens": 3, "max_image_tokens": 9},
    ],
)
def test_pieces_of_lfm2_vl_are_those_of_transformers(changes: dict[str, Any], lfm2_vl: Any, tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, "lfm2_vl", **changes)
    processor = read_image_processor(folder, config)
    said = {**PROCESSORS["lfm2_vl"], **changes}
    tiles = {} if said["do_image_splitting"] else {"min_tiles": 1, "max_tiles": 1}
    names = "downsample_factor min_tiles max_tiles use_thumbnail min_image_tokens max_image_tokens encoder_patch_size"
    options = {name: said[name] for name in (*names.split(), "tile_size", "max_pixels_tolerance", "resample")} | tiles
    counts = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(1, 400), st.integers(1, 400))
    def check(height: int, width: int) -> None:
        if max(height, width) > 200 * min(height, width):
            return
        image = scene(height, width)
        batch = torch.from_numpy(image).permute(2, 0, 1)[None]
        [pieces], rows, columns, sizes = lfm2_vl.image_processor.resize_and_split(batch, **options)
        processed = processor.process(image)
        ours = [piece for part in processed.image.parts() for piece in part.array()]
        assert len(ours) == len(pieces)
        for mine, theirs in zip(ours, pieces, strict=True):
            assert np.array_equal(mine, theirs.permute(1, 2, 0).numpy())
        inputs = {"image_rows": rows, "image_cols": columns, "image_sizes": sizes}
        expected = lfm2_vl.replace_image_token(inputs, 0, use_image_special_tokens=True, **options)
        assert processed.expansion == expected
        assert processed.num_features == expected.count("<image>") <= processor.max_features
        counts.add(len(ours))

    check()
    assert max(counts) > 2 or tiles


def test_llava_pads_where_its_processor_says_so(tmp_path: Path) -> None:
    folder, config = write_folder(
        tmp_path, "llava", image_processor_type="LlavaImageProcessor", do_pad=True, size={"shortest_edge": 336}
    )
    reference = peer(folder, "llava.image_processing_pil_llava", "LlavaImageProcessorPil")
    for height, width in [(20, 300), (300, 21), (64, 64), (335, 500)]:
        check_against_peer(folder, config, scene(height, width), reference, "llava")


def test_llava_resizes_to_a_square_where_it_says_so(tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, "llava", size={"height": 336, "width": 336}, do_center_crop=False)
    check_against_peer(folder, config, scene(50, 90), peer(folder, *CLASSES["llava"]), "llava")


@pytest.mark.parametrize("family", ["idefics3", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_images_are_not_split_where_the_processor_says_so(family: str, tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, family, do_image_splitting=False)
    reference = peer(folder, *CLASSES[family])
    for height, width in [(30, 900), (512, 512)]:
        check_against_peer(folder, config, scene(height, width), reference, family)
    processor = read_image_processor(folder, config)
    assert processor.process(scene(900, 900)).num_features == processor.max_features


@pytest.mark.parametrize("family", CLASSES)
def test_a_missing_setting_is_the_one_of_the_family(family: str, tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, family)
    (folder / "preprocessor_config.json").write_text("{}")
    if family in ("smolvlm",):
        config = {**config, "vision_config": {"patch_size": 13}, "scale_factor": 4}
    if family == "qwen3_vl":  # whose processor has the patches of Qwen2-VL then, and the network's are not known
        (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    if family == "llava_next":  # transformers' own default sizes cut tiles of 224 out of multiples of 336
        with pytest.raises(ConfigError, match="that 224 divides"):
            read_image_processor(folder, config)
        return
    reference = peer(folder, *CLASSES[family])
    options: dict[str, Any] = {}
    if family == "internvl":
        options = {"crop_to_patches": True, "size": {"height": 448, "width": 448}}
    if family == "mistral3":
        options = {"patch_size": 28}
    processed = read_image_processor(folder, config).process(scene(120, 333))
    rows = normalisation_of(read_settings(folder, config)).rows(processed.image.array())
    values = reference(scene(120, 333), return_tensors="np", input_data_format="channels_last", **options)[
        "pixel_values"
    ]
    if family in PATCHES:
        assert np.array_equal(patches(rows[0], PATCHES[family]), values)
    else:
        assert np.array_equal(rows, values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1))


def test_settings_of_transformers_5_stand_in_one_file(tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, "gemma3")
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": {"size": {"height": 56, "width": 70}}, "image_seq_length": 256})
    )
    assert read_image_processor(folder, config).process(scene(30, 30)).image.height == 56
    (folder / "preprocessor_config.json").unlink()
    assert read_image_processor(folder, config).process(scene(30, 30)).image.width == 70


def test_texts_of_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, "gemma3")
    tokens = [{"id": 255999, "content": "<boi>"}, {"id": 256000, "content": "<eoi>"}, {"id": 262144, "content": "<s>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    processed = read_image_processor(folder, config).process(scene(30, 30))
    assert processed.expansion == "\n\n<boi>" + "<s>" * 256 + "<eoi>\n\n"


def test_a_longer_image_of_mistral_3_has_one_line(tmp_path: Path) -> None:
    processed = read_image_processor(*write_folder(tmp_path, "mistral3")).process(scene(1, 4000))
    assert (processed.image.height, processed.image.width, processed.num_features) == (28, 1540, 55)


@pytest.mark.parametrize("family", ["lfm2_vl", "llava", "llava_next", "qwen2_5_vl", "qwen3_vl"])
def test_images_that_are_too_long_are_refused(family: str, tmp_path: Path) -> None:
    processor = read_image_processor(*write_folder(tmp_path, family))
    processor.process(scene(1, 200))
    with pytest.raises(InvalidRequestError, match=r"201 x 1 pixels is too long: one side may be at most 200 times"):
        processor.process(scene(1, 201))


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "gemma3", "internvl", "mistral3"])
def test_other_families_take_images_of_any_shape(family: str, tmp_path: Path) -> None:
    processor = read_image_processor(*write_folder(tmp_path, family))
    assert processor.process(scene(1, 4000)).num_features <= processor.max_features


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2000), st.floats(1 / 200, 200), st.integers(784, 40000), st.integers(1, 60))
def test_no_image_of_qwen_has_more_features_than_it_says(height: int, ratio: float, least: int, more: int) -> None:
    processor = Qwen2_5_VLProcessor("x", 28, least, least * more, 3)
    width = max(1, round(height * ratio))
    if max(height, width) <= 200 * min(height, width):
        resized = processor._resized(height, width)
        assert resized[0] * resized[1] // 784 <= processor.max_features


@pytest.mark.parametrize("family", CONFIGS)
def test_processors_travel_as_data(family: str, tmp_path: Path) -> None:
    processor = read_image_processor(*write_folder(tmp_path, family))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(processor), type=AnyProcessor) == processor


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma3", {"do_pan_and_scan": True}, r"do_pan_and_scan .* is not supported; set it to false"),
        ("gemma3", {"size": {"shortest_edge": 100}}, "size must have a height and a width"),
        ("gemma3", {"resample": 9}, "resample must be a filter from 0 to 5, not 9"),
        ("gemma3", {"resample": "bilinear"}, "resample must be a filter from 0 to 5, not 'bilinear'"),
        ("llava", {"do_resize": False}, "do_resize is false"),
        ("llava", {"do_center_crop": False}, "do_center_crop is false"),
        ("llava", {"size": {"longest_edge": 20}}, "size must have shortest_edge, or height and width"),
        ("llava", {"size": "large"}, "size must be an object of sizes in pixels, not 'large'"),
        ("llava", {"crop_size": {"height": 0, "width": 3}}, "height must be an integer from 1"),
        ("idefics3", {"max_image_size": {"longest_edge": 365}}, "max_image_size is 365, which 28 does not divide"),
        ("idefics3", {"size": {"height": 3, "width": 4}}, "size must have longest_edge"),
        ("idefics3", {"do_image_splitting": "yes"}, "do_image_splitting must be true or false, not 'yes'"),
        ("internvl", {"min_patches": 5, "max_patches": 4}, r"min_patches \(5\) must be at most max_patches \(4\)"),
        ("lfm2_vl", {"encoder_patch_size": 14}, "encoder_patch_size is 14, but the network's"),
        ("lfm2_vl", {"tile_size": 100}, r"tile_size is 100, which a feature's side \(32\) does not divide"),
        ("lfm2_vl", {"min_image_tokens": 300}, "300 to 256 image tokens"),
        ("llava_next", {"size": {"shortest_edge": 336}}, "must be the same square"),
        ("llava_next", {"image_grid_pinpoints": [[384, 100]]}, "heights and widths that 384 divides"),
        ("llava_next", {"image_grid_pinpoints": []}, "image_grid_pinpoints must have a size"),
        ("mistral3", {"size": {"shortest_edge": 100}}, "size must have a height and a width"),
        ("qwen2_5_vl", {"patch_size": 16}, "patch_size is 16, but the network's"),
        ("qwen3_vl", {"patch_size": 14}, "patch_size is 14, but the network's"),
        ("qwen2_5_vl", {"min_pixels": 1000, "max_pixels": 900}, "1000 to 900 pixels are no bounds"),
        ("qwen2_5_vl", {"min_pixels": -1}, "min_pixels must be an integer from 1"),
    ],
)
def test_impossible_settings_are_refused_by_name(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_image_processor(*write_folder(tmp_path, family, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_mean": [0.5, 0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be three numbers"),
        ({"rescale_factor": 0}, "rescale_factor must be a number above 0"),
    ],
)
def test_impossible_normalisations_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        normalisation_of(read_settings(*write_folder(tmp_path, "gemma3", **settings)))


def test_normalisation_may_be_left_out(tmp_path: Path) -> None:
    folder, config = write_folder(tmp_path, "gemma3", do_normalize=False, do_rescale=False)
    levels = np.arange(256, dtype=np.uint8)[:, None].repeat(3, axis=1)
    assert np.array_equal(normalisation_of(read_settings(folder, config)).rows(levels), levels)


def test_folders_without_the_files_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither preprocessor_config\.json nor a processor_config\.json"):
        read_image_processor(tmp_path, CONFIGS["llava"])
    (tmp_path / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, not list"):
        read_image_processor(tmp_path, CONFIGS["llava"])
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not readable JSON"):
        read_image_processor(tmp_path, CONFIGS["llava"])
    with pytest.raises(UnsupportedModelError, match="not for model_type 'llama'"):
        read_image_processor(tmp_path, {"model_type": "llama"})
