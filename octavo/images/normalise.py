"""From levels of colour to the numbers that a tower sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octavo.images.image_settings import ImageSettings


@dataclass(frozen=True)
class Normalisation:
    """``(level * rescale - mean) / std`` in float32, by channel.

    The order of operations, and where they are rounded, is that of transformers' processors on Pillow.
    """

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    rescale: float = 1.0

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """What each level becomes, float32 [256, 3]."""
        levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)[:, None]
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.asarray((levels - mean) / std, np.float32)

    def rows(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [..., 3] to float32 [..., 3]."""
        return self.table[pixels, np.arange(3)]


def normalisation_of(settings: ImageSettings) -> Normalisation:
    """That of a processor's settings.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
    """
    rescale = settings.number("rescale_factor", 1 / 255) if settings.flag("do_rescale", True) else 1.0
    if not settings.flag("do_normalize", True):
        return Normalisation(rescale=rescale)
    return Normalisation(settings.channels("image_mean"), settings.channels("image_std"), rescale)
