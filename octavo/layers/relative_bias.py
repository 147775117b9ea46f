"""Relative position bias: what is added to scores depends on the distance of query and key, in buckets."""

from __future__ import annotations

import math

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.interface import PositionBias
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight


class RelativeBias(Layer):
    """A table [buckets, heads] of the checkpoint, spread over the distances; layers may share it.

    Half of the buckets are for keys before the query, half for those after it, or all are for those before it where
    none after it are seen (``causal``). Half of those of one side have one distance each, and the others grow by the
    logarithm up to ``longest``: the last one has all distances beyond (Raffel et al. 2020, section 2.1).
    """

    def __init__(
        self, context: LayerContext, heads: int, buckets: int, longest: int = 128, *, causal: bool = False
    ) -> None:
        """Raises ConfigError for fewer buckets than that needs, or a ``longest`` that has a bucket of its own."""
        super().__init__()
        sides = 1 if causal else 2
        exact = buckets // sides // 2
        if exact == 0 or longest <= exact:
            raise ConfigError(
                f"{buckets} buckets of relative positions up to {longest} are not possible: there must be at least "
                f"{2 * sides} buckets, and distances of more than {exact}"
            )
        self.expected["weight"] = (buckets, heads)
        self.holds.append(Weight("weight", (buckets, heads), "vector", DType.FLOAT32))
        self.bias = PositionBias.zeros(heads, longest)
        self._buckets, self._longest, self._causal = buckets, longest, causal

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Spreads the table."""
        reach = self.bias.reach
        index = buckets_of(np.arange(-reach, reach + 1), self._buckets, self._longest, causal=self._causal)
        self.bias.values[:] = tensor.astype(np.float32)[index].T


def buckets_of(distance: np.ndarray, buckets: int, longest: int, *, causal: bool = False) -> np.ndarray:
    """The bucket of each distance, position of the key - position of the query; int64. See ``RelativeBias``."""
    half = buckets if causal else buckets // 2
    exact, size = half // 2, np.maximum(-distance, 0) if causal else np.abs(distance)
    # In float32, as models were trained with it: the logarithm decides where buckets begin.
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(longest / exact))
    large = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    after = 0 if causal else np.where(distance > 0, half, 0)
    return after + np.where(size < exact, size, large)
