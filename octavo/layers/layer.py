"""The base class of layers: a tree that maps a checkpoint's tensors to layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from octavo.core.errors import WeightError
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.layers.lora import LoraLayer

LayerT = TypeVar("LayerT", bound="Layer")

WeightKind = Literal["linear", "head", "embedding", "vector"]


class Weight(NamedTuple):
    """A weight of a layer on this rank once it is loaded."""

    name: str
    #: [outputs, inputs] of a matrix.
    shape: tuple[int, ...]
    #: "linear" and "head" are matrices of products, "embedding" a table, "vector" a norm or bias.
    kind: WeightKind
    #: As in ``NUMBER_BYTES``.
    dtype: str
    #: Whether it may share the memory of another weight, as a tied head does.
    is_tied: bool = False
    #: Pieces in which a product sums the inputs; see ``Kernels.pack``.
    pieces: int = 1
    #: Share of the tokens for which it is read: of an expert, experts of a token / experts.
    active: float = 1.0


class Layer:
    """A node of the network.

    A layer with weights lists
    in ``expected`` the checkpoint's tensors that are not loaded yet, by their name below the layer's name, with their
    whole shape (not this rank's share), and in ``holds`` the weights that it makes of them.
    """

    def __init__(self) -> None:
        self.expected: dict[str, tuple[int, ...]] = {}
        self.holds: list[Weight] = []
        self._children: list[tuple[str, Layer]] = []

    def attach(self, name: str, child: LayerT) -> LayerT:
        """Adds a child under the dotted ``name``; if it is empty, the child's tensors are named as this layer's."""
        self._children.append((name, child))
        return child

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Layer, str]]:
        """(checkpoint name, layer, name for the layer's ``load``) of every tensor that is not loaded yet."""
        for shard in self.expected:
            yield f"{prefix}{shard}", self, shard
        for name, child in self._children:
            yield from child.tensors(f"{prefix}{name}." if name else prefix)

    def weights(self, prefix: str = "") -> Iterator[Weight]:
        """The weights of this rank in this tree, loaded or not, under dotted names."""
        for weight in self.holds:
            yield weight._replace(name=f"{prefix}{weight.name}")
        for name, child in self._children:
            yield from child.weights(f"{prefix}{name}." if name else prefix)

    def lora_layers(self, prefix: str = "") -> Iterator[tuple[str, LoraLayer]]:
        """The layers with slots for adapters of this rank in this tree, and their dotted names.

        A part of a layer is called as the layer, a dot and the part's name, unless that is empty.
        """
        if isinstance(self, LoraLayer) and self.low_rank is not None:
            yield prefix.removesuffix("."), self
        for name, child in self._children:
            yield from child.lora_layers(f"{prefix}{name}." if name else prefix)

    def load(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Loads one whole tensor of the checkpoint, of any floating type or in a checkpoint's own bits.

        After the last one the layer is ready.

        Raises:
            WeightError: its shape is not the expected one.
        """
        shape = self.expected[shard]
        if tuple(tensor.shape) != shape:
            raise WeightError(f"shape is {list(tensor.shape)}, expected {list(shape)}")
        self.place(shard, tensor)
        del self.expected[shard]
        if not self.expected:
            self.complete()

    def place(self, shard: str, tensor: Any) -> None:
        """Takes this rank's share of a tensor of the expected shape, mapped from a file perhaps until ``complete``."""
        raise NotImplementedError

    def complete(self) -> None:
        """Called after the last expected tensor is placed."""
