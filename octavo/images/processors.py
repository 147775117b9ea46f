"""Image processors of the model families with vision. ``read_image_processor`` is the entry point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.files import MAX_TOKENIZER, JsonValues, read_object
from octavo.core.request import ImageInput, TileLayout
from octavo.images.image_files import MAX_RATIO, center_crop, check_ratio, pad_to_square, resize, shortest_edge_size

# Settings in preprocessor_config.json, processor_config.json and tokenizer.json.

#: Means and standard deviations of the channels in the training of CLIP, and of SigLIP.
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
#: Colours from 0 to 1 stay so.
_UNCHANGED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_CHANNELS = {
    **dict.fromkeys(("internvl", "llava", "llava_next", "mistral3"), _CLIP),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _CLIP),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _UNCHANGED),
    **dict.fromkeys(("gemma3", "granite4_vision", "idefics3", "lfm2_vl", "smolvlm"), _SIGLIP),
}
_FILTERS = 6
#: Maximum pixels of a side, and of an image.
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 28


@dataclass(frozen=True)
class ImageSettings(JsonValues):
    config: JsonValues

    def channels(self, name: str) -> tuple[float, float, float]:
        """``image_mean`` or ``image_std``: one number for each of red, green and blue, or for all."""
        if (value := self.raw.get(name)) is None:
            value = _CHANNELS[str(self.config.get("model_type"))][name == "image_std"]
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
        """Sizes such as ``{"height": 336, "width": 336}``; an integer is both, or the size ``for_integer``."""
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = {for_integer: value} if for_integer else {"height": value, "width": value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.file}: {name} must be an object of sizes in pixels, not {value!r}")
        sizes = JsonValues({key: size for key, size in value.items() if size is not None}, self.file)
        for key in sizes.raw:
            sizes.positive(key, most=MAX_PIXELS)
        return sizes

    def sides(self, name: str, edge: str, default: int) -> tuple[int, int]:
        """Height and width, or the size ``edge`` for both."""
        sizes = self.sizes(name, {edge: default})
        if edge not in sizes.raw:
            return self.square(name, {})
        side = sizes.positive(edge, most=MAX_SIDE)
        return side, side

    def square(self, name: str, default: Mapping[str, int]) -> tuple[int, int]:
        sizes = self.sizes(name, default)
        if not sizes.raw.keys() >= {"height", "width"}:
            raise ConfigError(f"{self.file}: {name} must have a height and a width, not {self.raw.get(name)!r}")
        return sizes.positive("height", most=MAX_SIDE), sizes.positive("width", most=MAX_SIDE)

    def resample(self, default: int) -> int:
        """The number of one of Pillow's filters; resizing must be on."""
        if not self.flag("do_resize", True):
            raise ConfigError(f"{self.file}: do_resize is false, so any image would be as large as it comes: set it")
        value = self.get("resample", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _FILTERS:
            raise ConfigError(f"{self.file}: resample must be a filter from 0 to {_FILTERS - 1}, not {value!r}")
        return value

    @property
    def vision(self) -> JsonValues:
        return JsonValues(self.config.table("vision_config"), self.config.file)

    def token(self, default: str, *names: str) -> str:
        """The text, by tokenizer.json, of the token whose id config.json has under one of the names, or ``default``."""
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
    """The settings in a model's folder, with its config.json; raises ConfigError if they are missing or invalid."""
    file = folder / "processor_config.json"
    # transformers 5 writes one file for all processors; earlier versions one for images.
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


# Processors: what happens to an image before the network gets it.


@dataclass(frozen=True)
class ProcessedImage:
    image: ImageInput
    #: The text that replaces the placeholder: an image token for each feature, with the family's texts around them.
    expansion: str
    #: Number of features, and so of image tokens in ``expansion``.
    num_features: int
    #: Features along time, height and width, for families with such positions.
    grid: tuple[int, int, int] | None = None


class ImageProcessor(Protocol):
    """The image processor of one model: plain data, which is sent to the sandbox."""

    @property
    def placeholder(self) -> str:
        """The text that stands for an image in the chat template's output or in a prompt."""

    @property
    def max_features(self) -> int:
        """Maximum features of an image of any size."""

    def process(self, image: np.ndarray) -> ProcessedImage:
        """Resizes and cuts an image uint8 [height, width, 3]; raises InvalidRequestError if it is not supported."""


# Gemma 3 (Gemma Team 2025, section 2.1): one square of fixed size.

_BILINEAR = 2
_SIDE = 224


class Gemma3Processor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder starts an image; its features have another token."""

    placeholder: str
    feature_token: str
    end_token: str
    height: int
    width: int
    resample: int
    num_features: int

    @property
    def max_features(self) -> int:
        return self.num_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        piece = resize(image, self.height, self.width, self.resample)
        expansion = f"\n\n{self.placeholder}{self.feature_token * self.num_features}{self.end_token}\n\n"
        return ProcessedImage(ImageInput.of(piece[None]), expansion, self.num_features)


def read_gemma3(settings: ImageSettings) -> Gemma3Processor:
    """Raises ConfigError for invalid settings, and for pan-and-scan."""
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
        height=height, width=width, resample=settings.resample(_BILINEAR),
        num_features=settings.config.positive("mm_tokens_per_image", 256, MAX_SIDE),
    )  # fmt: skip


# Gemma 4: any ratio, with as many features as a budget allows.

#: Default of the budget.
GEMMA4_FEATURES = 280


class Gemma4Processor(msgspec.Struct, frozen=True, tag=True):
    """One piece, whose sides are multiples of a feature's; the placeholder is the token of features."""

    placeholder: str
    start_token: str
    end_token: str
    #: Side of a feature in pixels: ``pooling_kernel_size`` x ``pooling_kernel_size`` patches of ``patch_size`` pixels.
    feature_side: int
    max_features: int
    resample: int

    def process(self, image: np.ndarray) -> ProcessedImage:
        height, width = self._resized(*image.shape[:2])
        piece = image if (height, width) == image.shape[:2] else resize(image, height, width, self.resample)
        features = height * width // self.feature_side**2
        expansion = f"{self.start_token}{self.placeholder * features}{self.end_token}"
        return ProcessedImage(ImageInput.of(piece[None]), expansion, features)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The largest multiples of a feature's side with about the same ratio; the shorter side has one at least."""
        side, most = self.feature_side, self.max_features
        factor = math.sqrt(most * side**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * side, columns * side


def read_gemma4(settings: ImageSettings) -> Gemma4Processor:
    """Raises ConfigError for invalid settings."""
    patch, pool = settings.positive("patch_size", 16, MAX_SIDE), settings.positive("pooling_kernel_size", 3, MAX_SIDE)
    for name, used, default in (("patch_size", patch, 16), ("pooling_kernel_size", pool, 3)):
        of_network = settings.vision.positive(name, default)
        if used != of_network:
            raise ConfigError(f"{settings.file}: {name} is {used}, but the network's (config.json) is {of_network}")
    return Gemma4Processor(
        placeholder=settings.token("<|image|>", "image_token_id"),
        start_token=settings.token("<|image>", "boi_token_id"),
        end_token=settings.token("<image|>", "eoi_token_id"),
        feature_side=patch * pool,
        max_features=settings.positive("max_soft_tokens", GEMMA4_FEATURES, MAX_SIDE),
        resample=settings.resample(_BICUBIC),
    )


# Idefics3 and SmolVLM (Laurençon et al. 2024, section 3.2): tiles, and the whole image as one more.

_LANCZOS = 1
_TILE = 364
#: Maximum length of the longer side, whatever the settings say.
_MAX_SIDE = 4096


class Idefics3Processor(msgspec.Struct, frozen=True, tag=True):
    """Tiles by row, then the whole image at the size of a tile; a text before each tile has its row and column."""

    placeholder: str
    #: Around images and before each tile; before the whole image.
    fake_token: str
    global_token: str
    #: New length of the longer side, and side of a tile.
    longest_edge: int
    tile: int
    is_split: bool
    resample: int
    tile_features: int

    @property
    def max_features(self) -> int:
        if not self.is_split:
            return self.tile_features
        side = min(self.longest_edge, _MAX_SIDE)
        longer, shorter = (math.ceil(pixels / self.tile) for pixels in (side, side + side % 2))
        tiles = longer * shorter
        return (tiles + 1 if tiles > 1 else 1) * self.tile_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        image = resize(image, *self._resized(*image.shape[:2]), self.resample)
        if self.is_split:
            image = resize(image, *self._whole_tiles(*image.shape[:2]), self.resample)
        whole = resize(image, self.tile, self.tile, self.resample)
        rows, columns = (side // self.tile if self.is_split else 1 for side in image.shape[:2])
        pieces = whole[None]
        if rows * columns > 1:
            tiles = image.reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
            pieces = np.concatenate([tiles.reshape(-1, self.tile, self.tile, 3), pieces])
        num_features = len(pieces) * self.tile_features
        return ProcessedImage(ImageInput.of(pieces), self._expansion(rows, columns), num_features)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Scales the longer side to ``longest_edge``; the other becomes even; both are at least 1."""
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
        """The next multiples of a tile; the shorter side grows with the longer one first."""
        ratio = width / height

        def up(side: int) -> int:
            return math.ceil(side / self.tile) * self.tile

        if width >= height:
            width = up(width)
            return up(int(width / ratio)), width
        height = up(height)
        return height, up(int(height * ratio))

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
        fake_token="<fake_token_around_image>", global_token="<global-img>",
        longest_edge=size.positive("longest_edge", most=MAX_SIDE), tile=tile,
        is_split=settings.flag("do_image_splitting", True), resample=settings.resample(_LANCZOS),
        tile_features=(tile // patch // scale) ** 2,
    )  # fmt: skip


# InternVL 3 (Zhu et al. 2025): tiles in the grid whose ratio is the nearest, and the whole image as one more.

_BICUBIC = 3
#: Maximum tiles of an image, whatever the settings say.
_MAX_TILES = 64


def cut_tiles(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The tiles of an image uint8 [rows * h, columns * w, 3], row by row: [rows * columns, h, w, 3]."""
    height, width = image.shape[0] // rows, image.shape[1] // columns
    return image.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)


def nearest_grid(height: int, width: int, grids: Sequence[tuple[int, int]], tile_pixels: int) -> tuple[int, int]:
    """The grid (columns, rows) whose ratio is nearest to the image's.

    Of equally near ones it is the last whose tiles have less than twice the pixels of the image.
    """
    best, least = (1, 1), math.inf
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        if difference < least:
            best, least = (columns, rows), difference
        elif difference == least and width * height > 0.5 * tile_pixels * columns * rows:
            best = (columns, rows)
    return best


class InternVLProcessor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder is the token of a feature."""

    placeholder: str
    start_token: str
    end_token: str
    #: Of a tile.
    height: int
    width: int
    resample: int
    tile_features: int
    min_tiles: int
    max_tiles: int

    @property
    def max_features(self) -> int:
        return self.tile_features * (self.max_tiles + 1 if self.max_tiles > 1 else 1)

    def process(self, image: np.ndarray) -> ProcessedImage:
        columns, rows = self._grid(*image.shape[:2])
        pieces = cut_tiles(resize(image, rows * self.height, columns * self.width, self.resample), rows, columns)
        if len(pieces) > 1:
            pieces = np.concatenate((pieces, resize(image, self.height, self.width, self.resample)[None]))
        features = len(pieces) * self.tile_features
        expansion = f"{self.start_token}{self.placeholder * features}{self.end_token}"
        return ProcessedImage(ImageInput.of(pieces), expansion, features)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        if self.max_tiles == 1:
            return 1, 1
        sides = range(1, self.max_tiles + 1)
        grids = [(w, h) for w in sides for h in sides if self.min_tiles <= w * h <= self.max_tiles]
        return nearest_grid(height, width, sorted(grids, key=math.prod), self.height * self.width)


def read_internvl(settings: ImageSettings) -> InternVLProcessor:
    height, width = settings.square("size", {"height": 448, "width": 448})
    least, most = settings.positive("min_patches", 1, _MAX_TILES), settings.positive("max_patches", 12, _MAX_TILES)
    if least > most:
        raise ConfigError(f"{settings.file}: min_patches ({least}) must be at most max_patches ({most})")
    patch = settings.vision.get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) and patch else patch
    side = height // JsonValues({"patch_size": patch}, settings.vision.file).positive("patch_size", most=MAX_SIDE)
    return InternVLProcessor(
        placeholder=settings.token("<IMG_CONTEXT>", "image_token_id"), start_token="<img>", end_token="</img>",
        height=height, width=width, resample=settings.resample(_BICUBIC),
        tile_features=round(side * settings.config.number("downsample_ratio", 0.5)) ** 2,
        min_tiles=least, max_tiles=most,
    )  # fmt: skip


# LFM2-VL: an image close to its own size, or tiles and the whole image in a size of its own.


class Lfm2VlProcessor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder is the token of a feature; a text before each tile has its row and column."""

    placeholder: str
    #: Sides in pixels: of a patch, of the square that makes a feature, and of a tile.
    patch: int
    feature_side: int
    tile: int
    #: Features of an image that is not cut, and of the whole image beside tiles.
    min_features: int
    max_whole: int
    #: An image is cut if it has this number of times the pixels of ``max_whole`` features.
    tolerance: float
    #: Of an image that is cut; ``max_tiles`` 1: none is.
    min_tiles: int
    max_tiles: int
    has_whole: bool
    resample: int

    @property
    def max_piece(self) -> int:
        """Maximum features of a piece."""
        side = self.feature_side
        return max(self._max_whole, (self.tile // side) ** 2 if self.max_tiles > 1 else 0)

    @property
    def max_features(self) -> int:
        if self.max_tiles == 1:
            return self._max_whole
        tiles = self.max_tiles * (self.tile // self.feature_side) ** 2
        return max(self._max_whole, tiles + (self._max_whole if self.has_whole else 0))

    @property
    def _max_whole(self) -> int:
        pixels = self.feature_side**2
        return most_features(self.min_features * pixels, self.max_whole * pixels, self.feature_side)

    def process(self, image: np.ndarray) -> ProcessedImage:
        check_ratio(image)
        height, width = image.shape[:2]
        side, features = self.feature_side, self.placeholder
        new_height, new_width = self._resized(height, width)
        num_features = new_height // side * (new_width // side)
        pixels = math.prod(max(self.patch, round(length / side) * side) for length in (height, width))
        is_large = pixels > self.max_whole * side**2 * self.tolerance
        columns, rows = self._grid(height, width) if is_large and self.max_tiles > 1 else (1, 1)
        if columns * rows == 1:
            whole = ImageInput.of(resize(image, new_height, new_width, self.resample)[None])
            return ProcessedImage(whole, self._expansion(features * num_features), num_features)
        tiles = cut_tiles(resize(image, rows * self.tile, columns * self.tile, self.resample), rows, columns)
        of_tile = (self.tile // side) ** 2
        text = "".join(
            f"<|img_row_{row}_col_{column}|>{features * of_tile}"
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        )
        if not self.has_whole:
            return ProcessedImage(ImageInput.of(tiles), self._expansion(text), len(tiles) * of_tile)
        text += f"<|img_thumbnail|>{features * num_features}"
        whole = ImageInput.of(resize(image, new_height, new_width, self.resample)[None])
        return ProcessedImage(ImageInput.of(tiles, whole), self._expansion(text), len(tiles) * of_tile + num_features)

    def _expansion(self, text: str) -> str:
        return f"<|image_start|>{text}<|image_end|>"

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The nearest multiples of a feature's side; out of bounds, those of the scaled sides."""
        side, least, most = self.feature_side, self.min_features, self.max_whole
        rows, columns = max(1, round(height / side)), max(1, round(width / side))
        if rows * columns > most:
            scale = math.sqrt(height * width / (most * side**2))
            rows, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
        elif rows * columns < least:
            scale = math.sqrt(least * side**2 / (height * width))
            rows, columns = (math.ceil(length * scale / side) for length in (height, width))
        return rows * side, columns * side

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        least, most = self.min_tiles, self.max_tiles
        # Grids of as many tiles stand in the order of a set, as in the processor that the models were trained with.
        grids = {
            (w, h)
            for n in range(least, most + 1)
            for w in range(1, n + 1)
            for h in range(1, n + 1)
            if least <= w * h <= most
        }
        return nearest_grid(height, width, sorted(grids, key=math.prod), self.tile**2)


def read_lfm2_vl(settings: ImageSettings) -> Lfm2VlProcessor:
    patch, merge = settings.positive("encoder_patch_size", 16, MAX_SIDE), settings.positive("downsample_factor", 2, 64)
    for name, used, of_network in (
        ("encoder_patch_size", patch, settings.vision.positive("patch_size", 16)),
        ("downsample_factor", merge, settings.config.positive("downsample_factor", 2)),
    ):
        if used != of_network:
            raise ConfigError(f"{settings.file}: {name} is {used}, but the network's (config.json) is {of_network}")
    tile, side = settings.positive("tile_size", 512, MAX_SIDE), patch * merge
    if tile % side:
        raise ConfigError(f"{settings.file}: tile_size is {tile}, which a feature's side ({side}) does not divide")
    least, most = (
        settings.positive(name, default, MAX_PIXELS // side**2)
        for name, default in (("min_image_tokens", 64), ("max_image_tokens", 256))
    )
    tiles = [settings.positive(name, default, _MAX_TILES) for name, default in (("min_tiles", 2), ("max_tiles", 10))]
    if least > most or tiles[0] > tiles[1]:
        raise ConfigError(
            f"{settings.file}: {least} to {most} image tokens, or {tiles[0]} to {tiles[1]} tiles, are no bounds"
        )
    if not settings.flag("do_image_splitting", True):
        tiles = [1, 1]
    return Lfm2VlProcessor(
        placeholder=settings.token("<image>", "image_token_id"), patch=patch, feature_side=side, tile=tile,
        min_features=least, max_whole=most, tolerance=settings.number("max_pixels_tolerance", 2.0),
        min_tiles=tiles[0], max_tiles=tiles[1], has_whole=settings.flag("use_thumbnail", True),
        resample=settings.resample(_BILINEAR),
    )  # fmt: skip


# LLaVA 1.5 (Liu et al. 2023): CLIP's centre crop, or padding to a square before resizing.


class LlavaProcessor(msgspec.Struct, frozen=True, tag=True):
    """One piece of fixed size; the placeholder is the image token."""

    placeholder: str
    height: int
    width: int
    resample: int
    #: Size after resizing: the shorter side, or height and width.
    shortest_edge: int
    resized: tuple[int, int] | None
    #: Colour of the padding to a square.
    padding: tuple[int, int, int] | None
    num_features: int

    @property
    def max_features(self) -> int:
        return self.num_features

    def process(self, image: np.ndarray) -> ProcessedImage:
        check_ratio(image)
        if self.padding is not None:
            image = pad_to_square(image, self.padding)
        height, width = self.resized or shortest_edge_size(image.shape[0], image.shape[1], self.shortest_edge)
        piece = center_crop(resize(image, height, width, self.resample), self.height, self.width)
        return ProcessedImage(ImageInput.of(piece[None]), self.placeholder * self.num_features, self.num_features)


def read_llava(settings: ImageSettings) -> LlavaProcessor:
    """Raises ConfigError for invalid settings, of LLaVA's own processor or of CLIP's."""
    size = settings.sizes("size", {"shortest_edge": _SIDE}, for_integer="shortest_edge")
    shortest, resized = 0, None
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
    # CLIP's class token is a feature only if config.json says so.
    strategy = settings.config.get("vision_feature_select_strategy")
    features = (height // patch) * (width // patch) + (strategy == "full")
    # ``do_pad`` of CLIP's processor, which LLaVA 1.5 uses, means something else.
    padding = None
    pads = str(settings.raw.get("image_processor_type")).startswith("LlavaImageProcessor")
    if pads and settings.flag("do_pad", False):
        red, green, blue = (int(mean * 255) for mean in settings.channels("image_mean"))
        padding = (red, green, blue)
    placeholder, resample = (
        settings.token("<image>", "image_token_index", "image_token_id"),
        settings.resample(_BICUBIC),
    )
    return LlavaProcessor(placeholder, height, width, resample, shortest, resized, padding, features)


# LLaVA-NeXT (Liu et al. 2024): the whole image, and tiles of it in the best of some larger sizes.

#: Heights and widths where a file has none.
_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNextProcessor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder is the token of a feature; lines of the tiled image end with one more."""

    placeholder: str
    tile: int
    #: Features along the side of a tile.
    tile_side: int
    #: Heights and widths of tiled images.
    sizes: list[tuple[int, int]]
    resample: int

    @property
    def max_features(self) -> int:
        grids = ((height // self.tile, width // self.tile) for height, width in self.sizes)
        side = self.tile_side
        return side**2 + max(rows * side * (columns * side + 1) for rows, columns in grids)

    def process(self, image: np.ndarray) -> ProcessedImage:
        check_ratio(image)
        height, width = image.shape[:2]
        full_height, full_width = self._best_size(height, width)
        scale_y, scale_x = full_height / height, full_width / width
        if scale_x < scale_y:
            new_height, new_width = min(math.ceil(height * scale_x), full_height), full_width
        else:
            new_height, new_width = full_height, min(math.ceil(width * scale_y), full_width)
        canvas = np.zeros((full_height, full_width, 3), np.uint8)
        top, left = (full_height - new_height) // 2, (full_width - new_width) // 2
        resized = resize(image, new_height, new_width, self.resample)
        canvas[top : top + new_height, left : left + new_width] = resized
        rows, columns = full_height // self.tile, full_width // self.tile
        whole = resize(image, self.tile, self.tile, self.resample)
        pieces = np.concatenate((whole[None], cut_tiles(canvas, rows, columns)))
        layout = self._layout(height, width, rows, columns)
        lines, places = rows * self.tile_side - 2 * layout.top, columns * self.tile_side - 2 * layout.left
        if lines * places < 1:
            raise InvalidRequestError(f"an image of {width} x {height} pixels is too long for this model's tiles")
        features = self.tile_side**2 + lines * (places + 1)
        return ProcessedImage(ImageInput.of(pieces, layout=layout), self.placeholder * features, features)

    def _best_size(self, height: int, width: int) -> tuple[int, int]:
        """The size in which most pixels of the image are left, and of these the one with the least padding."""
        best: tuple[int, int, tuple[int, int]] | None = None
        for size in self.sizes:
            scale = min(size[1] / width, size[0] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            rank = (used, used - size[0] * size[1], size)
            if used and (best is None or rank[:2] > best[:2]):
                best = rank
        if best is None:
            raise InvalidRequestError(f"an image of {width} x {height} pixels is too long for this model's tiles")
        return best[2]

    def _layout(self, height: int, width: int, rows: int, columns: int) -> TileLayout:
        """The padding in patches, as the image is resized to its whole grid of them with the same ratio."""
        lines, places = rows * self.tile_side, columns * self.tile_side
        if width / height > places / lines:
            return TileLayout(rows, columns, (lines - int(round(height * (places / width), 7))) // 2, 0)
        return TileLayout(rows, columns, 0, (places - int(round(width * (lines / height), 7))) // 2)


def read_llava_next(settings: ImageSettings) -> LlavaNextProcessor:
    size = settings.sides("size", "shortest_edge", _SIDE)
    tile = settings.square("crop_size", {"height": _SIDE, "width": _SIDE})
    if size != tile or size[0] != size[1]:
        raise ConfigError(f"{settings.file}: size {size} and crop_size {tile} must be the same square")
    given = settings.get("image_grid_pinpoints", _SIZES)
    sizes = []
    for pair in given if isinstance(given, list) else [given]:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or any(type(side) is not int or side % tile[0] or not 0 < side <= MAX_SIDE for side in pair)
        ):
            raise ConfigError(
                f"{settings.file}: image_grid_pinpoints must be a list of heights and widths that {tile[0]} divides, "
                f"not {given!r}"
            )
        sizes.append((pair[0], pair[1]))
    if not sizes:
        raise ConfigError(f"{settings.file}: image_grid_pinpoints must have a size")
    placeholder = settings.token("<image>", "image_token_index", "image_token_id")
    patch = settings.vision.positive("patch_size", 14, MAX_SIDE)
    return LlavaNextProcessor(placeholder, tile[0], tile[0] // patch, sizes, settings.resample(_BICUBIC))


def read_granite4_vision(settings: ImageSettings) -> LlavaNextProcessor:
    """Its features are of squares of 2 x 2 patches."""
    processor = read_llava_next(settings)
    return msgspec.structs.replace(processor, tile_side=processor.tile_side // 2)


# Pixtral (Agrawal et al. 2024, section 2.1): the image's own size, rounded up to whole features.


class PixtralProcessor(msgspec.Struct, frozen=True, tag=True):
    """The placeholder is the token of a feature; lines of features end with another token, and the last one with an
    end token.
    """

    placeholder: str
    line_token: str
    end_token: str
    #: Larger images are made smaller.
    max_height: int
    max_width: int
    #: Side of a feature in pixels.
    feature_side: int
    resample: int

    @property
    def max_features(self) -> int:
        side = self.feature_side
        return math.ceil(self.max_height / side) * math.ceil(self.max_width / side)

    def process(self, image: np.ndarray) -> ProcessedImage:
        height, width = image.shape[:2]
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        side = self.feature_side
        rows, columns = math.ceil(height / side), math.ceil(width / side)
        piece = resize(image, rows * side, columns * side, self.resample)
        expansion = self.line_token.join([self.placeholder * columns] * rows) + self.end_token
        return ProcessedImage(ImageInput.of(piece[None]), expansion, rows * columns)


def read_pixtral(settings: ImageSettings) -> PixtralProcessor:
    height, width = longest_sides(settings)
    patch = settings.vision.positive("patch_size", 16, MAX_SIDE)
    is_merged = settings.config.get("model_type") == "mistral3"
    merge = settings.config.positive("spatial_merge_size", 2, MAX_SIDE) if is_merged else 1
    placeholder = settings.token("[IMG]", "image_token_index", "image_token_id")
    return PixtralProcessor(
        placeholder, "[IMG_BREAK]", "[IMG_END]", height, width, patch * merge, settings.resample(_BICUBIC)
    )


def longest_sides(settings: ImageSettings) -> tuple[int, int]:
    """Maximum height and width of an image of Pixtral; raises ConfigError if they are invalid."""
    return settings.sides("size", "longest_edge", 1024)


# Qwen2.5-VL (Bai et al. 2025, section 2.1) and Qwen3-VL: the image's own size, as near as whole features allow.


class Qwen2_5_VLProcessor(msgspec.Struct, frozen=True, tag=True):
    """One piece whose sides are multiples of a feature's, with bounds of pixels; the placeholder is the image token."""

    placeholder: str
    #: Side of a feature in pixels: ``merge_size`` x ``merge_size`` patches of ``patch_size`` pixels.
    feature_side: int
    min_pixels: int
    max_pixels: int
    resample: int

    @property
    def max_features(self) -> int:
        return most_features(self.min_pixels, self.max_pixels, self.feature_side)

    def process(self, image: np.ndarray) -> ProcessedImage:
        check_ratio(image)
        height, width = self._resized(*image.shape[:2])
        piece = resize(image, height, width, self.resample)
        grid = (1, height // self.feature_side, width // self.feature_side)
        features = grid[1] * grid[2]
        return ProcessedImage(ImageInput.of(piece[None]), self.placeholder * features, features, grid)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """The nearest multiples of both sides; out of bounds, those of the scaled sides."""
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


def most_features(min_pixels: int, max_pixels: int, side: int) -> int:
    """Maximum features, of ``side`` pixels along each axis, of an image that is scaled to such numbers of pixels."""
    # Long images, whose shorter side is one feature, may exceed ``max_pixels``.
    longest = math.sqrt(MAX_RATIO * max_pixels) + side
    grown = (math.sqrt(min_pixels * MAX_RATIO) + side) * (math.sqrt(min_pixels / MAX_RATIO) + side)
    return int(max(max_pixels, side * longest, grown)) // side**2


def read_qwen2_5_vl(settings: ImageSettings) -> Qwen2_5_VLProcessor:
    """Raises ConfigError for invalid settings, as transformers 4 or 5 spell them."""
    smallest, largest = pixel_bounds(settings)
    tower_patch = settings.vision.positive(
        "patch_size", 14 if settings.config.get("model_type") == "qwen2_5_vl" else 16
    )
    patch, merge = settings.positive("patch_size", tower_patch, MAX_SIDE), settings.positive("merge_size", 2, MAX_SIDE)
    for name, used, of_network in (
        ("patch_size", patch, tower_patch),
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
    placeholder = settings.token("<|image_pad|>", "image_token_id")
    return Qwen2_5_VLProcessor(placeholder, side, smallest, largest, settings.resample(_BICUBIC))


def pixel_bounds(settings: ImageSettings) -> tuple[int, int]:
    """Minimum and maximum pixels of a scaled image; raises ConfigError if one is invalid."""
    size = settings.sizes("size", {})
    smallest = settings.positive("min_pixels", size.positive("shortest_edge", 56 * 56), MAX_PIXELS)
    return smallest, settings.positive("max_pixels", size.positive("longest_edge", 28 * 28 * 1280), MAX_PIXELS)


#: An ``ImageProcessor``; msgspec writes which one it is.
AnyProcessor: TypeAlias = (
    LlavaProcessor | Idefics3Processor | Gemma3Processor | Gemma4Processor | Qwen2_5_VLProcessor
    | InternVLProcessor | Lfm2VlProcessor | LlavaNextProcessor | PixtralProcessor
)  # fmt: skip

#: By ``model_type`` of config.json.
_READERS: dict[str, Callable[[ImageSettings], AnyProcessor]] = {
    "llava": read_llava, "idefics3": read_idefics3, "smolvlm": read_idefics3, "gemma3": read_gemma3,
    "gemma4": read_gemma4, "gemma4_unified": read_gemma4,
    "internvl": read_internvl, "lfm2_vl": read_lfm2_vl, "mistral3": read_pixtral,
    "granite4_vision": read_granite4_vision, "llava_next": read_llava_next,
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), read_qwen2_5_vl),
}  # fmt: skip


def read_image_processor(folder: Path, config: Mapping[str, Any]) -> AnyProcessor:
    """The processor of the model in a folder; raises ConfigError, and UnsupportedModelError for other families."""
    family = config.get("model_type")
    if (read := _READERS.get(str(family))) is None:
        raise UnsupportedModelError(f"images are processed for {', '.join(_READERS)}, not for model_type {family!r}")
    settings = read_settings(folder, config)
    # Pixtral 12B is a LLaVA by its model_type.
    return read_pixtral(settings) if settings.vision.get("model_type") == "pixtral" else read(settings)
