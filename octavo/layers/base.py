"""The tree of layers: how a checkpoint's tensors find the layer that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from octavo.core.errors import WeightError
from octavo.kernels.gguf_rows import GGUFRows

LayerT = TypeVar("LayerT", bound="Layer")

WeightKind = Literal["linear", "head", "embedding", "vector"]


class Weight(NamedTuple):
    """What a layer holds on this rank once it is loaded."""

    name: str
    #: Of a matrix [outputs, inputs].
    shape: tuple[int, ...]
    #: A matrix of a layer or of the head, a table of which a step reads a few rows, or a norm or bias.
    kind: WeightKind
    #: As in ``NUMBER_BYTES``.
    dtype: str
    #: Whether these numbers may be the memory of another weight, as those of a tied head are.
    is_tied: bool = False


class Layer:
    """A node of the network.

    Not a ``torch.nn.Module``: its attribute look-up costs more than some of our kernels at batch 1. A layer that holds
    weights lists in ``expected`` the tensors it still waits for, by their name in the checkpoint below the layer's own
    name, with the shape they have there (the whole, not this rank's share), and in ``holds`` what it makes of them.
    """

    def __init__(self) -> None:
        self.expected: dict[str, tuple[int, ...]] = {}
        self.holds: list[Weight] = []
        self._children: list[tuple[str, Layer]] = []

    def attach(self, name: str, child: LayerT) -> LayerT:
        """Hangs a child into the tree under the dotted ``name``; empty: its tensors stand directly under this layer."""
        self._children.append((name, child))
        return child

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Layer, str]]:
        """(checkpoint name, layer, name for the layer's ``load``) of every tensor still expected in this tree."""
        for shard in self.expected:
            yield f"{prefix}{shard}", self, shard
        for name, child in self._children:
            yield from child.tensors(f"{prefix}{name}." if name else prefix)

    def weights(self, prefix: str = "") -> Iterator[Weight]:
        """What the layers of this tree hold on this rank, loaded or not, under dotted names."""
        for weight in self.holds:
            yield weight._replace(name=f"{prefix}{weight.name}")
        for name, child in self._children:
            yield from child.weights(f"{prefix}{name}." if name else prefix)

    def load(self, shard: str, tensor: Tensor | GGUFRows) -> None:
        """Takes one whole tensor of the checkpoint, of any floating type or in blocks.

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
        """Copies this rank's share of a tensor of the right shape to where it belongs."""
        raise NotImplementedError

    def complete(self) -> None:
        """Called when the last expected tensor is in place."""
