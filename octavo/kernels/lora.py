"""Low-rank products of adapters (LoRA, Hu et al. 2021, section 4.1): the interface.

A layer has so many slots, each empty or with one adapter's pair of matrices for each part of the layer's outputs. Every
row of a step names a slot or none, and gets up(down(x)) of its own adapter: rows of different adapters share a step
(Chen et al. 2023, "Punica", section 4; Sheng et al. 2023, "S-LoRA").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError
from octavo.kernels.arrays import Array
from octavo.kernels.forward_batch import ForwardBatch

#: What rows without an adapter get where nothing else is added: x + -0.0 has the bits of x for every x, zeros included.
NOTHING = -0.0


class LowRankShape(NamedTuple):
    """The slots of one layer."""

    #: Of this rank; of an embedding the rows of its table.
    inputs: int
    #: Of this rank, of each part; of an embedding its width.
    outputs: tuple[int, ...]
    #: How many adapters are held at once.
    slots: int
    #: The greatest rank of one.
    max_rank: int
    #: Of the network.
    dtype: DType


class LowRankPart(NamedTuple):
    """The two matrices of an adapter for one part of a layer's outputs."""

    #: [rank, inputs] of any floating type.
    down: np.ndarray
    #: [outputs, rank] of any floating type, multiplied by the adapter's scale.
    up: np.ndarray


class PackedAdapter(Protocol):
    """What ``pack`` makes of the matrices of one adapter, in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


class Adapters(ABC):
    """The low-rank products of a backend: makes them, and tells them which adapter each row of the current step has."""

    def __init__(self) -> None:
        self._tokens: Array | None = None
        self._sampled: Array | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Called before a step's network: its low-rank products are of the adapters in ``batch.adapters``."""
        tokens = batch.adapters if batch.has_adapters else None
        self.use(tokens, None if tokens is None or batch.all_sampled else self._take(tokens, batch.sampled_rows))

    @abstractmethod
    def _take(self, slots: Array, rows: Array) -> Array:
        """The slots of these rows."""

    def use(self, tokens: Array | None, sampled: Array | None = None) -> None:
        """As ``begin``, for products of any rows.

        Args:
            tokens: int32 [n], their slots; None: none has an adapter.
            sampled: of the rows that logits are computed for; None: they are the same.
        """
        self._tokens, self._sampled = tokens, tokens if sampled is None else sampled

    def slots(self, *, sampled: bool = False) -> Array | None:
        """The slots of the step's tokens, int32 [T], or of its sampled rows, [N], -1 of a row without an adapter.

        None if no row has one, and in recorded steps, whose slots are found by the recording.
        """
        return self._sampled if sampled else self._tokens

    @abstractmethod
    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRank:
        """Empty slots for the low-rank products of a linear layer.

        ``sampled``: whether the rows of x are the step's sampled rows, not its tokens.
        """

    @abstractmethod
    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankEmbedding:
        """Empty slots for the low-rank products of a token embedding."""


class LowRank(ABC):
    """The low-rank products of a linear layer, made by ``Adapters.make_low_rank``."""

    def __init__(self, shape: LowRankShape) -> None:
        """See ``Adapters.make_low_rank``."""
        self.inputs, self.outputs, self.slots, self.max_rank, self.dtype = shape

    def check(self, parts: Sequence[LowRankPart | None]) -> None:
        """Refuses matrices that do not fit the layer.

        Raises:
            AdapterError: a shape or a rank is wrong.
        """
        if len(parts) != len(self.outputs):
            raise AdapterError(f"a layer of {len(self.outputs)} parts has no low-rank products of {len(parts)}")
        for part, outputs in zip(parts, self.outputs, strict=True):
            if part is not None:
                check_part(part, self.inputs, outputs, self.max_rank)

    @abstractmethod
    def pack(self, parts: Sequence[LowRankPart | None]) -> PackedAdapter:
        """The matrices of an adapter in host memory, rounded to the layer's type, as ``place`` takes them.

        Any thread may call it beside running steps.

        Args:
            parts: for each part of the outputs, or None where the adapter has none. Ranks may differ.

        Raises:
            AdapterError: see ``check``.
        """

    @abstractmethod
    def place(self, slot: int, packed: Any | None) -> None:
        """Puts what ``pack`` made into a slot, in the place of what it held, or empties it; between steps."""

    @abstractmethod
    def __call__(self, x: Array, add: Array | None = None) -> Array | None:
        """add + up(down(x)) of each row's adapter, as ``Adapters.begin`` says; what a product is to add.

        Rows whose slot is -1 or empty, and columns of parts that their adapter does not have, keep the bits of ``add``;
        without it they are -0.0, which changes no bit of what it is added to. x and down(x) are rounded to the layer's
        type. On batch-invariant backends a row's bits do not depend on the other rows.

        Args:
            x: [T, inputs], rows may be strided; of the layer's type or float32.
            add: float32 [T, sum of outputs]; its memory may be reused.

        Returns:
            Float32 [T, sum of outputs]; ``add`` as it is, perhaps None, if no row of the step has an adapter. Of a
            recorded step it is a buffer, which products ignore in steps without adapters.
        """


class LowRankEmbedding(ABC):
    """The low-rank products of a token embedding, made by ``Adapters.make_low_rank_embedding``."""

    def __init__(self, shape: LowRankShape) -> None:
        """See ``Adapters.make_low_rank_embedding``."""
        self.rows, (self.outputs,), self.slots, self.max_rank, self.dtype = shape

    @abstractmethod
    def pack(self, part: LowRankPart) -> PackedAdapter:
        """As ``LowRank.pack``, of down [rank, rows] and up [outputs, rank]."""

    @abstractmethod
    def place(self, slot: int, packed: Any | None) -> None:
        """As ``LowRank.place``."""

    @abstractmethod
    def __call__(self, ids: Array, add: Array, first: int = 0) -> Array:
        """add + up(column id - first of down) of each token's adapter; ids outside ``down`` add nothing.

        Args:
            ids: int64 [T], the batch's token ids.
            add: float32 [T, outputs]; its memory is reused.
            first: the id of column 0.
        """


def check_part(part: LowRankPart, inputs: int, outputs: int, max_rank: int) -> None:
    """Refuses a pair of matrices with other shapes than [rank, inputs] and [outputs, rank].

    Raises:
        AdapterError: they have, or the rank is greater than ``max_rank``.
    """
    down, up = tuple(part.down.shape), tuple(part.up.shape)
    rank = down[0] if down else 0
    if down != (rank, inputs) or up != (outputs, rank):
        raise AdapterError(
            f"low-rank matrices of shapes {list(down)} and {list(up)} do not fit a layer of {inputs} inputs and "
            f"{outputs} outputs: they must be [rank, {inputs}] and [{outputs}, rank]"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"rank {rank} is not within 1 and max_lora_rank, {max_rank}")


def rounded_part(part: LowRankPart, dtype: DType) -> LowRankPart:
    """Both matrices of this type, contiguous, in memory of their own."""
    return LowRankPart(*(np.array(matrix, dtype.numpy, order="C") for matrix in part))
