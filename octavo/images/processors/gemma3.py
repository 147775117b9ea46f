"""Gemma 3 (Gemma Team 2025, section 2.1): one square of a fixed size for any image, whatever its shape."""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.image_input import ImageInput
from octavo.images.image_settings import MAX_SIDE, ImageSettings
from octavo.images.processor import ProcessedImage
from octavo.images.resizing import resize

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
