"""Positions that are sines and cosines, which no checkpoint needs to hold (Vaswani et al. 2017, section 3.5)."""

from __future__ import annotations

import numpy as np

from octavo.layers.context import LayerContext
from octavo.layers.vocabulary import PositionEmbedding


class SinusoidalPositions(PositionEmbedding):
    """A table that is computed; the first half of a row are sines, the second cosines."""

    def __init__(self, context: LayerContext, rows: int, hidden_size: int) -> None:
        super().__init__(context, rows, hidden_size)
        self.load("weight", sinusoids(rows, hidden_size))


def sinusoids(rows: int, width: int) -> np.ndarray:
    """float32 [rows, width]: position / 10000 ** (2 i / width) is the angle of sine i and of cosine i.

    Angles are computed in float64; an odd width has one sine more than cosines.
    """
    angles = np.outer(np.arange(rows), 10000.0 ** (-2.0 * np.arange((width + 1) // 2) / width))
    return np.concatenate((np.sin(angles), np.cos(angles[:, : width // 2])), axis=1).astype(np.float32)
