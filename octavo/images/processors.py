"""The processors of the families that see images, one file each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.files import MAX_TOKENIZER, JsonValues, read_object
from octavo.core.request import ImageInput
from octavo.images.image_files import MAX_RATIO, center_crop, check_ratio, pad_to_square, resize, shortest_edge_size

# What the files of a model say of its images: preprocessor_config.json, processor_config.json, tokenizer.json.

#: Means and deviations of the channels that CLIP was trained with, and those of SigLIP.
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
#: What a family's processor has where its file says nothing.
_CHANNELS = {"llava": _CLIP, "qwen2_5_vl": _CLIP, "idefics3": _SIGLIP, "smolvlm": _SIGLIP, "gemma3": _SIGLIP}
_FILTERS = 6
#: Largest numbers of pixels, along a side and in all.
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 28


@dataclass(frozen=True)
class ImageSettings(JsonValues):
    """The settings of one model's processor of images."""

    #: Those of config.json, in the model's folder.
    config: JsonValues

    def channels(self, name: str) -> tuple[float, float, float]:
        """``image_mean`` or ``image_std``: one number for each of red, green and blue, or one for all."""
        value = self.raw.get(name)
        if value is None:
            value = _CHANNELS[self.family][name == "image_std"]
        values = [value] * 3 if isinstance(value, int | float) else value
        if (
            not isinstance(values, list | tuple)
            or len(values) != 3
            or not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
            or (name == "image_std" and not all(v > 0 for v in values))
        ):
            raise ConfigError(f"{self.file}: {name} must be three numbers, for red, green and blue, not {value!r}")
        return (float(values[0]), float(values[1]), float(values[2]))

    def sizes(self, name: str, default: Mapping[str, int], for_integer: str = "") -> JsonValues:
        """An object of sizes such as ``{"height": 336, "width": 336}``.

        ``for_integer``: which size one integer is; by default height and width.
        """
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = {for_integer: value} if for_integer else {"height": value, "width": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {name} must be an object of sizes in pixels, not {value!r}")
        sizes = JsonValues({key: size for key, size in value.items() if size is not None}, self.file)
        for key in sizes.raw:
            sizes.positive(key, most=MAX_PIXELS)
        return sizes

    def square(self, name: str, default: Mapping[str, int]) -> tuple[int, int]:
        """Height and width of an object of sizes that must have both."""
        sizes = self.sizes(name, default)
        if not sizes.raw.keys() >= {"height", "width"}:
            raise ConfigError(f"{self.file}: {name} must have a height and a width, not {self.raw.get(name)!r}")
        return sizes.positive("height", most=MAX_SIDE), sizes.positive("width", most=MAX_SIDE)

    def resample(self, default: int) -> int:
        """The number of one of Pillow's filters; refuses what leaves images as they are."""
        if not self.flag("do_resize", True):
            raise ConfigError(f"{self.file}: do_resize is false, so any image would be as large as it comes: set it")
        value = self.get("resample", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _FILTERS:
            raise ConfigError(f"{self.file}: resample must be a filter from 0 to {_FILTERS - 1}, not {value!r}")
        return value

    @property
    def family(self) -> str:
        """``model_type`` of config.json."""
        return str(self.config.get("model_type"))

    @property
    def vision(self) -> JsonValues:
        """``vision_config`` of config.json."""
        return JsonValues(self.config.table("vision_config"), self.config.file)

    def token(self, default: str, *names: str) -> str:
        """The text of the token whose id config.json has under one of these names.

        It is that of tokenizer.json; without one, ``default``, which the family's tokenizers have.
        """
        id = next((token for name in names if (token := self.config.get(name)) is not None), None)
        return self._added_tokens.get(id, default)

    @cached_property
    def _added_tokens(self) -> dict[Any, str]:
        file = self.config.file.parent / "tokenizer.json"
        tokens = read_object(file, most=MAX_TOKENIZER).get("added_tokens") if file.is_file() else None
        return {
            token["id"]: token["content"]
            for token in (tokens if isinstance(tokens, list) else [])
            if isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token
        }


def read_settings(folder: Path, config: Mapping[str, Any]) -> ImageSettings:
    """The settings of a model's folder; ``config``: the content of its config.json.

    Raises:
        ConfigError: a file is no JSON object, or there is none.
    """
    file = folder / "processor_config.json"
    # transformers 5 writes one file; before, images had a file of their own.
    raw = read_object(file).get("image_processor") if file.is_file() else None
    if not isinstance(raw, dict):
        file = folder / "preprocessor_config.json"
        if not file.exists():
            raise ConfigError(
                f"{folder} has neither preprocessor_config.json nor a processor_config.json with image_processor, "
                "which say how images become pixels: add the one that the model was published with"
            )
        raw = read_object(file)
    return ImageSettings(raw, file, JsonValues(config, folder / "config.json"))


# What a family makes of an image before its network sees it.


@dataclass(frozen=True)
class ProcessedImage:
    """One image, ready for a prompt."""

    image: ImageInput
    #: The text that takes the place of the placeholder: the model's image token once for each feature, with the
    #: family's texts around and between.
    expansion: str
    #: Features of the image: how often the image token is in the expansion.
    num_features: int
    #: Of families with positions in time, height and width: how many features there are along each.
    grid: tuple[int, int, int] | None = None


class ImageProcessor(Protocol):
    """One model's, read from the files of its folder by ``octavo.images.processors.read_image_processor``.

    Plain data, which the sandbox's processes are sent.
    """

    @property
    def placeholder(self) -> str:
        """The text that the model's chat template, or a prompt, has in place of each image."""
        ...

    @property
    def max_features(self) -> int:
        """Most features of one image, whatever its size."""
        ...

    def process(self, image: np.ndarray) -> ProcessedImage:
        """Resizes and cuts an image uint8 [height, width, 3].

        Raises:
            InvalidRequestError: the family cannot take it, such as one that is 300 times wider than high.
        """
        ...


# Gemma 3 (Gemma Team 2025, section 2.1): one square of a fixed size for any image, whatever its shape.

_BILINEAR = 2
_SIDE = 224


class Gemma3Processor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder begins an image; what marks its features in the prompt is another token."""

    placeholder: str
    feature_token: str
    end_token: str
    height: int
    width: int
    resample: int
    num_features: int

    @property
    def max_features(self) -> int:
        """See ``ImageProcessor``."""
        return self.num_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        """See ``ImageProcessor``."""
        piece = resize(image, self.height, self.width, self.resample)
        features = self.feature_token * self.num_features
        expansion = f"\n\n{self.placeholder}{features}{self.end_token}\n\n"
        return ProcessedImage(ImageInput.of(piece[None]), expansion, self.num_features)


def read_gemma3(settings: ImageSettings) -> Gemma3Processor:
    """From preprocessor_config.json.

    Raises:
        ConfigError: see ``read_image_processor``; also if it asks for pan-and-scan.
    """
    if settings.flag("do_pan_and_scan", False):
        raise ConfigError(
            f"{settings.file}: do_pan_and_scan (crops of long images as further images) is not supported; set it to "
            "false"
        )
    height, width = settings.square("size", {"height": _SIDE, "width": _SIDE})
    return Gemma3Processor(
        placeholder=settings.token("<start_of_image>", "boi_token_index", "boi_token_id"),
        feature_token=settings.token("<image_soft_token>", "image_token_index", "image_token_id"),
        end_token=settings.token("<end_of_image>", "eoi_token_index", "eoi_token_id"),
        height=height,
        width=width,
        resample=settings.resample(_BILINEAR),
        num_features=settings.config.positive("mm_tokens_per_image", 256, MAX_SIDE),
    )


# Idefics3 and SmolVLM (Laurençon et al. 2024, section 3.2): an image in tiles, and the whole of it as one more.

_LANCZOS = 1
_TILE = 364
#: Whatever the settings say, the longer side becomes no longer.
_MAX_SIDE = 4096


class Idefics3Processor(msgspec.Struct, frozen=True, tag=True):
    """Tiles by row, then the whole image in the size of a tile; a text before each names its row and column."""

    placeholder: str
    #: What stands around images and before each tile, and what names the whole image.
    fake_token: str
    global_token: str
    #: What the longer side becomes, and the side of a tile.
    longest_edge: int
    tile: int
    is_split: bool
    resample: int
    #: Features of a tile.
    tile_features: int

    @property
    def max_features(self) -> int:
        """See ``ImageProcessor``."""
        if not self.is_split:
            return self.tile_features
        side = min(self.longest_edge, _MAX_SIDE)
        longer, shorter = (math.ceil(pixels / self.tile) for pixels in (side, side + side % 2))
        tiles = longer * shorter
        return (tiles + 1 if tiles > 1 else 1) * self.tile_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        """See ``ImageProcessor``."""
        image = resize(image, *self._resized(*image.shape[:2]), self.resample)
        if self.is_split:
            image = resize(image, *self._whole_tiles(*image.shape[:2]), self.resample)
        whole = resize(image, self.tile, self.tile, self.resample)
        rows, columns = (side // self.tile if self.is_split else 1 for side in image.shape[:2])
        pieces = whole[None]
        if rows * columns > 1:
            tiles = image.reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
            pieces = np.concatenate([tiles.reshape(-1, self.tile, self.tile, 3), pieces])
        expansion = self._expansion(rows, columns)
        return ProcessedImage(ImageInput.of(pieces), expansion, len(pieces) * self.tile_features)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The longer side as the settings have it, the other one even; both at least 1."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            height, width = int(_MAX_SIDE / ratio), _MAX_SIDE
        elif height > width and height > _MAX_SIDE:
            height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """The next multiples of a tile; the shorter side's is that of the length it has once the longer one grew."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return self._up(int(width / ratio)), width
        height = self._up(height)
        return height, self._up(int(height * ratio))

    def _up(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile

    def _expansion(self, rows: int, columns: int) -> str:
        features = self.placeholder * self.tile_features
        whole = f"{self.fake_token}{self.global_token}{features}{self.fake_token}"
        if rows * columns == 1:
            return whole
        lines = (
            "".join(f"{self.fake_token}<row_{row}_col_{column}>{features}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + whole


def read_idefics3(settings: ImageSettings) -> Idefics3Processor:
    """From preprocessor_config.json of either family.

    Raises:
        ConfigError: see ``read_image_processor``.
    """
    size = settings.sizes("size", {"longest_edge": 4 * _TILE}, for_integer="longest_edge")
    tiles = settings.sizes("max_image_size", {"longest_edge": _TILE}, for_integer="longest_edge")
    for name, sizes in (("size", size), ("max_image_size", tiles)):
        if sizes.raw.keys() != {"longest_edge"}:
            raise ConfigError(f"{settings.file}: {name} must have longest_edge, not {sizes.raw!r}")
    tile = tiles.positive("longest_edge", most=MAX_SIDE)
    patch = settings.vision.positive("patch_size", 32, MAX_SIDE)
    scale = settings.config.positive("scale_factor", 2, MAX_SIDE)
    if tile % (patch * scale):
        raise ConfigError(
            f"{settings.file}: max_image_size is {tile}, which {patch * scale} does not divide: patches of {patch} "
            f"pixels, {scale} x {scale} of which make a feature"
        )
    return Idefics3Processor(
        placeholder=settings.token("<image>", "image_token_id"),
        fake_token="<fake_token_around_image>",
        global_token="<global-img>",
        longest_edge=size.positive("longest_edge", most=MAX_SIDE),
        tile=tile,
        is_split=settings.flag("do_image_splitting", True),
        resample=settings.resample(_LANCZOS),
        tile_features=(tile // patch // scale) ** 2,
    )


# LLaVA 1.5 (Liu et al. 2023): CLIP's crop from the middle, or a square that is padded before it is resized.

_BICUBIC = 3


class LlavaProcessor(msgspec.Struct, frozen=True, tag=True):
    """One piece of one size for any image; the placeholder is the image token."""

    placeholder: str
    #: Height and width of the piece.
    height: int
    width: int
    resample: int
    #: What the image is resized to: its shorter side, or height and width.
    shortest_edge: int
    resized: tuple[int, int] | None
    #: Of the square that it becomes first.
    padding: tuple[int, int, int] | None
    num_features: int

    @property
    def max_features(self) -> int:
        """See ``ImageProcessor``."""
        return self.num_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        """See ``ImageProcessor``."""
        check_ratio(image)
        if self.padding is not None:
            image = pad_to_square(image, self.padding)
        height, width = self.resized or shortest_edge_size(image.shape[0], image.shape[1], self.shortest_edge)
        piece = center_crop(resize(image, height, width, self.resample), self.height, self.width)
        return ProcessedImage(ImageInput.of(piece[None]), self.placeholder * self.num_features, self.num_features)


def read_llava(settings: ImageSettings) -> LlavaProcessor:
    """From preprocessor_config.json, of LLaVA's own processor or of CLIP's.

    Raises:
        ConfigError: see ``read_image_processor``.
    """
    size = settings.sizes("size", {"shortest_edge": _SIDE}, for_integer="shortest_edge")
    shortest = 0
    resized = None
    if "shortest_edge" in size.raw and "longest_edge" not in size.raw:
        shortest = size.positive("shortest_edge", most=MAX_SIDE)
    elif size.raw.keys() >= {"height", "width"}:
        resized = (size.positive("height", most=MAX_SIDE), size.positive("width", most=MAX_SIDE))
    else:
        raise ConfigError(f"{settings.file}: size must have shortest_edge, or height and width, not {size.raw!r}")
    if settings.flag("do_center_crop", True):
        height, width = settings.square("crop_size", {"height": _SIDE, "width": _SIDE})
    elif resized is not None:
        height, width = resized
    else:
        raise ConfigError(f"{settings.file}: do_center_crop is false, so images would differ in size: set it")
    patch = settings.vision.positive("patch_size", 14, MAX_SIDE)
    # What CLIP's network has beside the patches, its class token, is a feature only if config.json says so.
    strategy = settings.config.get("vision_feature_select_strategy")
    features = (height // patch) * (width // patch) + (strategy == "full")
    return LlavaProcessor(
        placeholder=settings.token("<image>", "image_token_index", "image_token_id"),
        height=height,
        width=width,
        resample=settings.resample(_BICUBIC),
        shortest_edge=shortest,
        resized=resized,
        padding=_padding(settings),
        num_features=features,
    )


def _padding(settings: ImageSettings) -> tuple[int, int, int] | None:
    """The mean colour, if images are padded. ``do_pad`` of CLIP's processor, which LLaVA 1.5 uses, is another thing."""
    kind = str(settings.raw.get("image_processor_type"))
    if not kind.startswith("LlavaImageProcessor") or not settings.flag("do_pad", False):
        return None
    red, green, blue = (int(mean * 255) for mean in settings.channels("image_mean"))
    return (red, green, blue)


# Qwen2.5-VL (Bai et al. 2025, section 2.1): an image in the size it has, as near as whole features allow.


class Qwen2_5_VLProcessor(msgspec.Struct, frozen=True, tag=True):
    """One piece whose sides are multiples of a feature's, with pixels within bounds; placeholder: the image token."""

    placeholder: str
    #: Side of what makes a feature: patches of ``patch_size`` pixels, merged ``merge_size`` by ``merge_size``.
    feature_side: int
    min_pixels: int
    max_pixels: int
    resample: int

    @property
    def max_features(self) -> int:
        """See ``ImageProcessor``; more than ``max_pixels`` are long images whose shorter side is one feature's."""
        side = self.feature_side
        longest = math.sqrt(MAX_RATIO * self.max_pixels) + side
        grown = (math.sqrt(self.min_pixels * MAX_RATIO) + side) * (math.sqrt(self.min_pixels / MAX_RATIO) + side)
        return int(max(self.max_pixels, side * longest, grown)) // side**2

    def process(self, image: np.ndarray) -> ProcessedImage:
        """See ``ImageProcessor``."""
        check_ratio(image)
        height, width = self._resized(*image.shape[:2])
        piece = resize(image, height, width, self.resample)
        grid = (1, height // self.feature_side, width // self.feature_side)
        features = grid[1] * grid[2]
        return ProcessedImage(ImageInput.of(piece[None]), self.placeholder * features, features, grid)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The multiples nearest to both sides; beyond the bounds of pixels, those of the sides scaled to it."""
        side = self.feature_side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif rows * columns * side * side < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        return rows * side, columns * side


def read_qwen2_5_vl(settings: ImageSettings) -> Qwen2_5_VLProcessor:
    """From preprocessor_config.json, in the spellings of both transformers 4 and 5.

    Raises:
        ConfigError: see ``read_image_processor``.
    """
    smallest, largest = pixel_bounds(settings)
    patch, merge = settings.positive("patch_size", 14, MAX_SIDE), settings.positive("merge_size", 2, MAX_SIDE)
    for name, used, of_network in (
        ("patch_size", patch, settings.vision.positive("patch_size", 14)),
        ("merge_size", merge, settings.vision.positive("spatial_merge_size", 2)),
    ):
        if used != of_network:
            raise ConfigError(f"{settings.file}: {name} is {used}, but the network's (config.json) is {of_network}")
    side = patch * merge
    if not side * side <= smallest <= largest:
        raise ConfigError(
            f"{settings.file}: {smallest} to {largest} pixels are no bounds of images; the least is a feature's "
            f"{side * side}"
        )
    return Qwen2_5_VLProcessor(
        placeholder=settings.token("<|image_pad|>", "image_token_id"),
        feature_side=side,
        min_pixels=smallest,
        max_pixels=largest,
        resample=settings.resample(_BICUBIC),
    )


def pixel_bounds(settings: ImageSettings) -> tuple[int, int]:
    """The least and the most pixels that images are scaled to.

    Raises:
        ConfigError: one is of the wrong type or impossible.
    """
    size = settings.sizes("size", {})
    smallest = settings.positive("min_pixels", size.positive("shortest_edge", 56 * 56), MAX_PIXELS)
    return smallest, settings.positive("max_pixels", size.positive("longest_edge", 28 * 28 * 1280), MAX_PIXELS)


#: All that there are; which one it is stands in what msgspec writes of it.
AnyProcessor: TypeAlias = LlavaProcessor | Idefics3Processor | Gemma3Processor | Qwen2_5_VLProcessor

#: By ``model_type`` of config.json.
_READERS: dict[str, Callable[[ImageSettings], AnyProcessor]] = {
    "llava": read_llava,
    "idefics3": read_idefics3,
    "smolvlm": read_idefics3,
    "gemma3": read_gemma3,
    "qwen2_5_vl": read_qwen2_5_vl,
}


def read_image_processor(folder: Path, config: Mapping[str, Any]) -> AnyProcessor:
    """The processor of the model in a folder; ``config``: the content of its config.json.

    Raises:
        ConfigError: a file is missing, or has a value that is of the wrong type, impossible or not supported.
        UnsupportedModelError: no family that sees images.
    """
    family = config.get("model_type")
    read = _READERS.get(str(family))
    if read is None:
        raise UnsupportedModelError(f"images are processed for {', '.join(_READERS)}, not for model_type {family!r}")
    return read(read_settings(folder, config))
