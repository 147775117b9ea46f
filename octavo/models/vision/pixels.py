"""Pixels of an image as rows of patches, normalised as a checkpoint's files say."""

from __future__ import annotations

import numpy as np

from octavo.core.json_values import JsonValues
from octavo.images.image_settings import ImageSettings, read_settings
from octavo.images.normalise import Normalisation, normalisation_of
from octavo.models.config_reader import ConfigReader

#: Files of a model's folder that may say how images become pixels.
_FILES = ("processor_config.json", "preprocessor_config.json")


def read_pixels(reader: ConfigReader, family: str) -> Normalisation:
    """What the files beside config.json say; what the family has where there are none, as text needs none.

    ``family``: ``model_type`` of a config.json that has none.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
    """
    folder, config = reader.file.parent, {**reader.raw, "model_type": reader.raw.get("model_type") or family}
    if any((folder / name).is_file() for name in _FILES):
        return normalisation_of(read_settings(folder, config))
    return normalisation_of(ImageSettings({}, folder / _FILES[-1], JsonValues(config, reader.file)))


def patch_rows(pixels: np.ndarray, patch: int, merge: int = 1) -> np.ndarray:
    """The patches of a piece [height, width, 3], as rows [patches, 3 * patch * patch] by colour, line and column.

    They follow each other from left to right, line by line; with ``merge``, so do squares of ``merge * merge`` patches,
    and the patches within each. Height and width are multiples of ``merge * patch``.
    """
    height, width, colours = pixels.shape
    side = merge * patch
    cut = pixels.reshape(height // side, merge, patch, width // side, merge, patch, colours)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, colours * patch * patch)


def patch_places(rows: int, columns: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Line and column of each patch of a grid, int64 [patches] both, in the order of ``patch_rows``."""
    lines, places = np.divmod(np.arange(rows * columns, dtype=np.int64).reshape(rows, columns), columns)
    shape = (rows // merge, merge, columns // merge, merge)
    order = np.arange(rows * columns).reshape(shape).transpose(0, 2, 1, 3).reshape(-1)
    return lines.reshape(-1)[order], places.reshape(-1)[order]
