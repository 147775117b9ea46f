"""Resizing, cropping and padding, as the processors of transformers do it with Pillow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError
from octavo.images.pillow import pillow

#: Pixels, [height, width, 3].
Pixels = NDArray[np.uint8]
#: Beyond it, to bring the short side to a network's size makes of a few pixels an image that fills the memory.
MAX_RATIO = 200


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """An image [h, w, 3] with another size; ``resample``: one of Pillow's filters, which widen as an image shrinks."""
    resized = pillow().fromarray(image).resize((width, height), resample)
    return np.asarray(resized)


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width that keep the ratio, the shorter one being ``edge``."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def center_crop(image: Pixels, height: int, width: int) -> Pixels:
    """The middle of an image; what it lacks is black, one row more of it before than after."""
    cropped = np.zeros((height, width, 3), np.uint8)
    (to_row, from_row, rows), (to_column, from_column, columns) = (
        _overlap(size, wanted) for size, wanted in zip(image.shape, (height, width), strict=False)
    )
    cropped[to_row : to_row + rows, to_column : to_column + columns] = image[
        from_row : from_row + rows, from_column : from_column + columns
    ]
    return cropped


def _overlap(size: int, wanted: int) -> tuple[int, int, int]:
    """Along a side: where the image begins in its crop, where the crop in the image, and how much they share."""
    start = (size - wanted) // 2
    if start >= 0:
        return 0, start, wanted
    return -start, 0, size


def pad_to_square(image: Pixels, color: tuple[int, int, int]) -> Pixels:
    """The image in the middle of a square of this colour."""
    height, width, _ = image.shape
    side = max(height, width)
    padded = np.empty((side, side, 3), np.uint8)
    padded[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    padded[top : top + height, left : left + width] = image
    return padded


def check_ratio(image: Pixels) -> None:
    """Refuses images that are too long for this.

    Raises:
        InvalidRequestError: one side is more than ``MAX_RATIO`` times the other.
    """
    height, width, _ = image.shape
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequestError(
            f"an image of {width} x {height} pixels is too long: one side may be at most {MAX_RATIO} times the other"
        )
