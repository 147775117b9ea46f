"""Low-rank products of adapters (LoRA, Hu et al. 2021, section 4.1): the interface, and it in plain torch.

A layer has so many slots, each empty or with one adapter's pair of matrices for each part of the layer's outputs. Every
row of a step names a slot or none, and gets up(down(x)) of its own adapter: rows of different adapters share a step
(Chen et al. 2023, "Punica", section 4; Sheng et al. 2023, "S-LoRA").
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.core.errors import AdapterError
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
    dtype: torch.dtype


class LowRankPart(NamedTuple):
    """The two matrices of an adapter for one part of a layer's outputs."""

    #: [rank, inputs] of any floating type.
    down: Tensor
    #: [outputs, rank] of any floating type, multiplied by the adapter's scale.
    up: Tensor


class PackedAdapter(Protocol):
    """What ``pack`` makes of the matrices of one adapter, in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


class Adapters:
    """The low-rank products of a backend: makes them, and tells them which adapter each row of the current step has."""

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._sampled: Tensor | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Called before a step's network: its low-rank products are of the adapters in ``batch.adapters``."""
        tokens = batch.adapters if batch.has_adapters else None
        self.use(tokens, tokens if tokens is None or batch.all_sampled else tokens.index_select(0, batch.sampled_rows))

    def use(self, tokens: Tensor | None, sampled: Tensor | None = None) -> None:
        """As ``begin``, for products of any rows.

        Args:
            tokens: int32 [n], their slots; None: none has an adapter.
            sampled: of the rows that logits are computed for; None: they are the same.
        """
        self._tokens, self._sampled = tokens, tokens if sampled is None else sampled

    def slots(self, *, sampled: bool = False) -> Tensor | None:
        """The slots of the step's tokens, int32 [T], or of its sampled rows, [N], -1 of a row without an adapter.

        None if no row has one, and in recorded steps, whose slots are found by the recording.
        """
        return self._sampled if sampled else self._tokens

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRank:
        """Empty slots for the low-rank products of a linear layer.

        ``sampled``: whether the rows of x are the step's sampled rows, not its tokens.
        """
        return PlainLowRank(self, shape, sampled=sampled)

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankEmbedding:
        """Empty slots for the low-rank products of a token embedding."""
        return PlainLowRankEmbedding(self, shape)


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
    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
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
    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
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


def rounded_part(part: LowRankPart, dtype: torch.dtype) -> LowRankPart:
    """Both matrices in host memory, of this type, copied."""
    return LowRankPart(*(tensor.to("cpu", dtype, copy=True).contiguous() for tensor in part))


@dataclass(frozen=True)
class PlainAdapter:
    """Matrices as they are."""

    parts: tuple[LowRankPart | None, ...]

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts if part is not None)


class PlainLowRank(LowRank):
    """Low-rank products by torch on any device; the rows of an adapter in one product."""

    def __init__(self, adapters: Adapters, shape: LowRankShape, *, sampled: bool = False) -> None:
        """See ``Adapters.make_low_rank``."""
        super().__init__(shape)
        self._adapters, self._sampled = adapters, sampled
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, parts: Sequence[LowRankPart | None]) -> PlainAdapter:
        """Copies the matrices."""
        self.check(parts)
        return PlainAdapter(tuple(None if part is None else rounded_part(part, self.dtype) for part in parts))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        """Keeps a reference."""
        self._held[slot] = packed

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor | None:
        """A loop over the adapters of the step."""
        slots = self._adapters.slots(sampled=self._sampled)
        if slots is None:
            return add
        out = x.new_full((len(x), sum(self.outputs)), NOTHING, dtype=torch.float32) if add is None else add
        x = x.to(self.dtype).float()
        starts = [0, *itertools.accumulate(self.outputs)]
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            for part, start in zip(adapter.parts, starts, strict=False):
                if part is not None:
                    columns = slice(start, start + len(part.up))
                    shrunk = x[chosen] @ part.down.to(x.device).float().T
                    out[chosen, columns] += _expand(shrunk, part.up)
        return out


class PlainLowRankEmbedding(LowRankEmbedding):
    """Low-rank products of an embedding by torch on any device."""

    def __init__(self, adapters: Adapters, shape: LowRankShape) -> None:
        """See ``Adapters.make_low_rank_embedding``."""
        super().__init__(shape)
        self._adapters = adapters
        self._held: list[PlainAdapter | None] = [None] * shape.slots

    def pack(self, part: LowRankPart) -> PlainAdapter:
        """Copies the matrices."""
        check_part(part, self.rows, self.outputs, self.max_rank)
        return PlainAdapter((rounded_part(part, self.dtype),))

    def place(self, slot: int, packed: PlainAdapter | None) -> None:
        """Keeps a reference."""
        self._held[slot] = packed

    def __call__(self, ids: Tensor, add: Tensor, first: int = 0) -> Tensor:
        """A loop over the adapters of the step."""
        slots = self._adapters.slots()
        if slots is None:
            return add
        ids = ids - first
        slots = slots.masked_fill((ids < 0) | (ids >= self.rows), -1)
        for chosen, adapter in _rows_by_adapter(slots, self._held):
            (part,) = adapter.parts
            assert part is not None
            add[chosen] += _expand(part.down.to(add.device).float().T[ids[chosen]], part.up)
        return add


def _rows_by_adapter(slots: Tensor, held: Sequence[PlainAdapter | None]) -> list[tuple[Tensor, PlainAdapter]]:
    """The rows of each slot that holds an adapter, and it."""
    found = []
    for slot in slots.unique().tolist():
        adapter = held[slot] if slot >= 0 else None
        if adapter is not None:
            found.append(((slots == slot).nonzero().squeeze(1), adapter))
    return found


def _expand(shrunk: Tensor, up: Tensor) -> Tensor:
    """Rounded to the type of ``up`` first: [n, rank] to float32 [n, outputs]."""
    return shrunk.to(up.dtype).float() @ up.to(shrunk.device).float().T
