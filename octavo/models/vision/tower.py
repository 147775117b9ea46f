"""The interface of towers.

A tower sees each piece of an image alone. Its layers attend without a mask, over a workspace that is no memory of what
was computed. What it makes of a piece does not depend on what else is computed, and is the same on every rank: a tower
is not divided among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.image_input import ImageInput
from octavo.core.kv_spec import KVSpec
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight


@dataclass(frozen=True)
class TowerInput:
    """One piece, as rows for the tower: made on the host, beside the steps."""

    #: float32 [T, ``Tower.row_width``]: normalised pixels of each patch, in the order in which the tower wants them.
    rows: np.ndarray
    #: int64 [T]: ``ForwardBatch.positions``, such as rows of a table of positions or of a rotary table.
    positions: np.ndarray
    #: int64 [N]: ``ForwardBatch.sampled_rows``, the first row of each that makes a feature.
    feature_rows: np.ndarray
    #: Rows that attend to each other, which lie behind each other; their sum is T. The sequences of the batch.
    segments: tuple[int, ...]
    #: int64 [``Tower.rotary_axes``, T]: ``ForwardBatch.rotary_positions``, of a tower that has any.
    rotary_positions: np.ndarray | None = None


class Tower(Layer, ABC):
    """One network's tower, with the projection to the width of its embeddings."""

    #: Numbers of a row.
    row_width: int
    #: Most rows of a piece; None: as many as the image has.
    max_rows: int | None = None
    #: Positions of a row that sections of a head are rotated by, such as line and column.
    rotary_axes: int = 0
    #: Keys and values of a layer for the rows of one batch. Group 0 has block tables by segment; group 1 has one
    #: context of all rows, which ``AttentionSpec.cross`` sees whole (the batch's cross tables).
    workspace: KVSpec

    def weights(self, prefix: str = "") -> Iterator[Weight]:
        """See ``Layer``; no token's step reads them."""
        return (weight._replace(active=0.0) for weight in super().weights(prefix))

    @abstractmethod
    def prepare(self, image: ImageInput) -> list[TowerInput]:
        """The pieces of an image; called in a thread beside the steps. Their features follow each other."""

    @abstractmethod
    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        """Rows float32 [T, row_width] to features float32 [N, E]; recorded, and run in parts between steps.

        ``caches``: the workspace as group 0 and as group 1, which are different memory.
        """


def tower_context(context: LayerContext) -> LayerContext:
    """What the layers of a tower are built with: all of each on every rank, not quantised, without adapters.

    They are layers whose products need nothing of other ranks: ``all_reduce`` would add the whole several times.
    """
    return replace(
        context,
        quantization=None,
        kv_cache_dtype="auto",
        tp_rank=0,
        tp_size=1,
        layers=None,
        max_loras=0,
        virtual_tokens=0,
    )
