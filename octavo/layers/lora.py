"""Layers that can hold adapters' low-rank matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from octavo.core.errors import AdapterError
from octavo.kernels.lora import LowRank, LowRankEmbedding, LowRankPart, PackedAdapter, check_part

#: The matrices of one adapter for a part of a layer: A [rank, in] and B [out, rank], times the adapter's scale.
LoraMatrices = tuple[np.ndarray, np.ndarray]


class LoraLayer(ABC):
    """A layer to whose product adapters may add low-rank ones; without slots for them it has no ``low_rank``."""

    #: Whole sizes, of all ranks together, of the parts that adapters name: (outputs, inputs) by the part's name below
    #: the layer's, empty if it is the layer's own.
    lora_parts: Mapping[str, tuple[int, int]]
    low_rank: LowRank | LowRankEmbedding | None = None

    @abstractmethod
    def pack_lora(self, weights: Mapping[str, LoraMatrices]) -> PackedAdapter:
        """This rank's share of an adapter's matrices in host memory, for ``place_lora``.

        Any thread may call it beside running steps.

        Args:
            weights: whole matrices by part; a part may be absent.

        Raises:
            AdapterError: a shape does not fit the layer, or a rank is above ``LayerContext.max_lora_rank``.
        """

    def check_lora(self, weights: Mapping[str, LoraMatrices], max_rank: int) -> dict[str, LowRankPart]:
        """The same, if all of them are whole matrices of this layer's parts.

        Raises:
            AdapterError: see ``pack_lora``.
        """
        for name, (down, up) in weights.items():
            if name not in self.lora_parts:
                known = ", ".join(self.lora_parts) or "none"
                raise AdapterError(f"the layer has no part {name!r}; its parts: {known}")
            outputs, inputs = self.lora_parts[name]
            check_part(LowRankPart(down, up), inputs, outputs, max_rank)
        return {name: LowRankPart(*matrices) for name, matrices in weights.items()}

    def place_lora(self, slot: int, packed: PackedAdapter | None) -> None:
        """Puts what ``pack_lora`` made into a slot, in the place of what it held, or empties it; between steps."""
        assert self.low_rank is not None
        self.low_rank.place(slot, packed)
