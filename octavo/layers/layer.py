"""The base classes of layers: a tree that maps a checkpoint's tensors to layers, and the context of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError, ConfigError, WeightError
from octavo.kernels.interface import (
    Array,
    Kernels,
    LowRank,
    LowRankEmbedding,
    LowRankPart,
    LowRankShape,
    PackedAdapter,
    check_part,
)
from octavo.kernels.weight_rows import QuantizedRows

#: An adapter's matrices for a part of a layer: A [rank, in], and B [out, rank] times the adapter's scale.
LoraMatrices = tuple[np.ndarray, np.ndarray]

LayerT = TypeVar("LayerT", bound="Layer")


class Weight(NamedTuple):
    """A weight of a layer on this rank once it is loaded."""

    name: str
    #: [outputs, inputs] of a matrix.
    shape: tuple[int, ...]
    #: "linear" and "head" are matrices of products, "embedding" a table, "vector" a norm or bias.
    kind: Literal["linear", "head", "embedding", "vector"]
    #: A key of ``NUMBER_BYTES``.
    dtype: str
    #: Whether it may share the memory of another weight, such as a tied head.
    is_tied: bool = False
    #: See ``Kernels.pack``.
    pieces: int = 1
    #: Share of the tokens for which it is read: of an expert, experts of a token / experts.
    active: float = 1.0
    #: Whether it may stay in the mapped file, see ``Kernels.keep_table``: it then takes no memory of its own.
    is_mapped: bool = False


class Layer:
    """A node of the network."""

    def __init__(self) -> None:
        #: Checkpoint tensors that are not loaded yet: whole shapes (of all ranks) by their names below the layer's.
        self.expected: dict[str, tuple[int, ...]] = {}
        #: The weights of this rank, made of these tensors.
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
        """(dotted name, layer) of the layers with slots for adapters in this tree."""
        if isinstance(self, LoraLayer) and self.low_rank is not None:
            yield prefix.removesuffix("."), self
        for name, child in self._children:
            yield from child.lora_layers(f"{prefix}{name}." if name else prefix)

    def load(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Loads one whole tensor, of any floating type or in a checkpoint's own bits; then perhaps ``complete``.

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


class LoraLayer(ABC):
    """A layer to whose product adapters may add low-rank products."""

    #: (outputs, inputs) of all ranks together by the part's name below the layer's; empty for the layer's own matrix.
    lora_parts: Mapping[str, tuple[int, int]]
    #: None without slots for adapters.
    low_rank: LowRank | LowRankEmbedding | None = None

    @abstractmethod
    def pack_lora(self, weights: Mapping[str, LoraMatrices]) -> PackedAdapter:
        """This rank's share of an adapter's matrices in host memory, for ``place_lora``; any thread may call it.

        Args:
            weights: whole matrices by part; a part may be absent.

        Raises:
            AdapterError: a shape does not fit the layer, or a rank is above ``LayerContext.max_lora_rank``.
        """

    def check_lora(self, weights: Mapping[str, LoraMatrices], max_rank: int) -> dict[str, LowRankPart]:
        """The matrices of ``pack_lora``, checked."""
        for name, (down, up) in weights.items():
            if name not in self.lora_parts:
                names = ", ".join(self.lora_parts) or "none"
                raise AdapterError(f"the layer has no part {name!r}; its parts: {names}")
            outputs, inputs = self.lora_parts[name]
            check_part(LowRankPart(down, up), inputs, outputs, max_rank)
        return {name: LowRankPart(*matrices) for name, matrices in weights.items()}

    def place_lora(self, slot: int, packed: PackedAdapter | None) -> None:
        """Replaces a slot's adapter by a result of ``pack_lora``, or empties the slot; between steps."""
        assert self.low_rank is not None
        self.low_rank.place(slot, packed)


# The context of layers.


@dataclass(frozen=True)
class LayerContext:
    """Common to all layers of a network. Collectives of the ranks are operations of ``kernels``."""

    kernels: Kernels
    #: Type of weights and activations.
    dtype: DType
    #: Format of the matrices of linear layers and of the head: "int8", "int4", "fp8", that of the checkpoint ("gguf" or
    #: ``CheckpointQuantization.name``), or None (``dtype``).
    quantization: str | None = None
    #: See ``KVSpec.dtype``; "auto": ``dtype``.
    kv_cache_dtype: str = "auto"
    #: Initial length of tables of positions, see ``Network.extend_positions``; None: all of the model's.
    positions: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    #: Indices of the network's layers in this pipeline stage; None: all.
    layers: range | None = None
    #: Slots for adapters, and the maximum rank of one; 0: layers have no slots.
    max_loras: int = 0
    max_lora_rank: int = 0
    #: Rows of the embedding for virtual tokens of prompt adapters.
    virtual_tokens: int = 0
    #: Maximum draft tokens of a sequence in a step, whose changes blocks of recurrent states keep.
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank must be 0 to {self.tp_size - 1} (tp_size - 1), not {self.tp_rank}")

    @property
    def tensor_quantization(self) -> str | None:
        """Format to which arrays are quantised, see ``Kernels.pack``: "int8", "int4", "fp8", or None (``dtype``)."""
        return self.quantization if self.quantization in ("int8", "int4", "fp8") else None

    @property
    def kv_dtype_name(self) -> str:
        """See ``KVSpec.dtype``."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def low_rank_shape(self, inputs: int, *outputs: int) -> LowRankShape:
        """The slots for adapters of a layer with these sizes on this rank."""
        return LowRankShape(inputs, outputs, self.max_loras, self.max_lora_rank, self.dtype)

    def layers_of(self, num_layers: int) -> range:
        """The layers of this stage, in a network of ``num_layers``."""
        layers = range(num_layers) if self.layers is None else self.layers
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ConfigError(f"a pipeline stage has a run of the layers 0 to {num_layers - 1}, not {layers}")
        return layers

    def share(self, size: int, what: str, unit: int) -> slice:
        """This rank's part of 0 to ``size``, in rank order; ``what`` names the quantity in errors.

        The parts are equal if the number of ranks divides ``size``. Otherwise, and where MXFP4 has blocks that equal
        parts would divide, each has whole units (the last one may be smaller), and the first ranks have one more.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        rank, ranks = self.tp_rank, self.tp_size
        if size % ranks == 0 and (self.quantization != "mxfp4" or size // ranks % unit == 0):
            unit = size // ranks
        units = -(-size // unit)
        if units < ranks:
            raise ConfigError(
                f"{what} ({size}) cannot be shared by {ranks} tensor-parallel workers: each needs at least {unit}"
            )
        each, larger = divmod(units, ranks)
        start = rank * each + min(rank, larger)
        stop = start + each + (rank < larger)
        return slice(start * unit, min(stop * unit, size))


# Norms; every rank holds all of their weights.


class _Norm(Layer):
    """A norm over the last dimension, with vectors [size] under their checkpoint names."""

    def __init__(
        self,
        context: LayerContext,
        size: int,
        eps: float,
        names: tuple[str, ...],
        dtype: DType,
        *,
        unit_offset: bool = False,
    ) -> None:
        """``unit_offset``: the checkpoint holds the weight less 1; ``dtype``: of the vectors in memory."""
        super().__init__()
        self.kernels = context.kernels
        self.eps = eps
        self.dtype = context.dtype
        self.weight: Array
        self.bias: Array | None = None
        self._stored, self._unit_offset = dtype, unit_offset
        for name in names:
            self.expected[name] = (size,)
            self.holds.append(Weight(name, (size,), "vector", dtype))

    def __call__(self, x: Array) -> Array:
        """The norm of x, of the same shape and of the network's type."""
        return self._compute(x, self.dtype)

    def float32(self, x: Array) -> Array:
        """The norm of x in float32, as a residual stream."""
        return self._compute(x, DType.FLOAT32)

    def _compute(self, x: Array, dtype: DType) -> Array:
        raise NotImplementedError

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Copies the vector."""
        if self._unit_offset and shard == "weight":
            tensor = tensor.astype(np.float32) + np.float32(1.0)
        setattr(self, shard, self.kernels.array(tensor, self._stored))


class RMSNorm(_Norm):
    """Root mean square norm (Zhang & Sennrich 2019).

    With ``unit_offset`` the checkpoint holds the weight less 1. The weight is float32 then: 1 + w would lose most of
    the bits of a small w in bfloat16.
    """

    def __init__(self, context: LayerContext, size: int, eps: float, *, unit_offset: bool = False) -> None:
        dtype = DType.FLOAT32 if unit_offset else context.dtype
        super().__init__(context, size, eps, ("weight",), dtype, unit_offset=unit_offset)

    def _compute(self, x: Array, dtype: DType) -> Array:
        return self.kernels.rms_norm(x, self.weight, self.eps, out_dtype=dtype)

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + the norm of x, float32 [T, E]; the residual's memory may be reused."""
        return self.kernels.rms_norm(x, self.weight, self.eps, add=residual)


class PlainRMSNorm(RMSNorm):
    """An RMS norm without a weight."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps)
        self.weight = context.kernels.array(np.ones(size, np.float32), context.dtype)
        self.expected.clear()
        self.holds.clear()


class LayerNorm(_Norm):
    """Layer norm (Ba et al. 2016); ``unit_offset`` as in ``RMSNorm``."""

    def __init__(
        self, context: LayerContext, size: int, eps: float, *, bias: bool = True, unit_offset: bool = False
    ) -> None:
        names, dtype = ("weight", "bias") if bias else ("weight",), DType.FLOAT32 if unit_offset else context.dtype
        super().__init__(context, size, eps, names, dtype, unit_offset=unit_offset)

    def _compute(self, x: Array, dtype: DType) -> Array:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, out_dtype=dtype)


class PlainLayerNorm(LayerNorm):
    """A norm without weight and bias."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps, bias=False)
        self.weight = context.kernels.array(np.ones(size, np.float32), context.dtype)
        self.expected.clear()
        self.holds.clear()
