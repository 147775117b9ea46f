"""Relative position bias: what is added to scores depends on the distance of query and key, in buckets."""

from __future__ import annotations

import math

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.interface import PositionBias
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight


class RelativeBias(Layer):
    """A table [buckets, heads] of the checkpoint, spread over all distances; layers may share it.

    Half of the buckets are for keys before the query, half for those after it; of each half the first half has one
    distance each, and the others grow by the logarithm up to ``longest`` (Raffel et al. 2020, section 2.1).
    """

    def __init__(self, context: LayerContext, heads: int, buckets: int, positions: int, longest: int = 128) -> None:
        """``positions``: of the longest text."""
        super().__init__()
        self.expected["weight"] = (buckets, heads)
        self.holds.append(Weight("weight", (buckets, heads), "vector", DType.FLOAT32))
        self.bias = PositionBias.zeros(heads, max(1, positions))
        self._buckets, self._longest = buckets, longest

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Spreads the table."""
        reach = self.bias.reach
        index = buckets_of(np.arange(-reach, reach + 1), self._buckets, self._longest)
        self.bias.values[:, : 2 * reach + 1] = tensor.astype(np.float32)[index].T


def buckets_of(distance: np.ndarray, buckets: int, longest: int) -> np.ndarray:
    """The bucket of each distance, position of the key - position of the query; int64."""
    half = buckets // 2
    exact, size = half // 2, np.abs(distance)
    # In float32, as models were trained with it: the logarithm decides where buckets begin.
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(longest / exact))
    large = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(distance > 0, half, 0) + np.where(size < exact, size, large)
