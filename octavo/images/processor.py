"""What a family makes of an image before its network sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.image_input import ImageInput


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
