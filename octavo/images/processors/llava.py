"""LLaVA 1.5 (Liu et al. 2023): CLIP's crop from the middle, or a square that is padded before it is resized."""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.image_input import ImageInput
from octavo.images.image_settings import MAX_SIDE, ImageSettings
from octavo.images.processor import ProcessedImage
from octavo.images.resizing import center_crop, check_ratio, pad_to_square, resize, shortest_edge_size

_BICUBIC = 3
_SIDE = 224


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
