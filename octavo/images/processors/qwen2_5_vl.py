"""Qwen2.5-VL (Bai et al. 2025, section 2.1): an image in the size it has, as near as whole features allow."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.image_input import ImageInput
from octavo.images.image_settings import MAX_PIXELS, MAX_SIDE, ImageSettings
from octavo.images.processor import ProcessedImage
from octavo.images.resizing import MAX_RATIO, check_ratio, resize

_BICUBIC = 3


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
