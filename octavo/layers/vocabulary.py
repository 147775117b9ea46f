"""Embeddings and heads. Ranks split the token embedding and the language-model head along the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.interface import (
    Activation,
    Array,
    LowRank,
    LowRankEmbedding,
    LowRankPart,
    PackedAdapter,
    PackedWeight,
)
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, LayerNorm, LoraLayer, LoraMatrices, Weight
from octavo.layers.linear import MergedColumnParallelLinear


class _VocabularyShare(Layer):
    """This rank's rows of a table [vocab, E], the same number on all ranks; rows past the vocabulary are zero."""

    def __init__(self, context: LayerContext, vocab_size: int) -> None:
        super().__init__()
        self.kernels = context.kernels
        self._context = context
        rows = -(-vocab_size // context.tp_size)
        self.rows = rows
        self.start = min(context.tp_rank * rows, vocab_size)
        self.end = min(self.start + rows, vocab_size)

    def keeps_bits(self, tensor: np.ndarray | QuantizedRows) -> bool:
        """Whether a head packs this rank's rows in the checkpoint's own bits: only if none are past the vocabulary."""
        return isinstance(tensor, QuantizedRows) and self.end - self.start == self.rows

    def _take(self, tensor: np.ndarray | QuantizedRows) -> np.ndarray:
        return self._pad(to_values(tensor)[self.start : self.end])

    def _pad(self, own: np.ndarray) -> np.ndarray:
        """This rank's rows within the vocabulary, followed by zeros up to ``rows``."""
        if len(own) == self.rows:
            return own
        return np.concatenate((own, np.zeros((self.rows - len(own), *own.shape[1:]), own.dtype)))


class VocabParallelEmbedding(_VocabularyShare, LoraLayer):
    """Token embedding, multiplied by ``scale``, which a network may set before adapters are packed.

    Ids past the vocabulary are virtual tokens (``LayerContext.virtual_tokens``) with rows from prompt tuning, which all
    ranks hold and which are not multiplied.
    """

    low_rank: LowRankEmbedding | None = None

    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__(context, vocab_size)
        self.scale = 1.0
        self.expected["weight"] = (vocab_size, hidden_size)
        self.holds.append(Weight("weight", (self.rows, hidden_size), "embedding", context.dtype))
        self.table: Array | None = None
        #: The matrix of a tied head that replaces the table.
        self._shared: PackedWeight | None = None
        self._heads: list[ParallelLMHead] = []
        self.lora_parts = {"": (hidden_size, vocab_size)}
        if context.max_loras:
            slots = context.low_rank_shape(self.rows, hidden_size)
            self.low_rank = self.kernels.adapters.make_low_rank_embedding(slots)
        self._vocab_size = vocab_size
        #: [virtual tokens, E]; zero until they are written.
        self.virtual: Array | None = None
        if context.virtual_tokens:
            shape = context.virtual_tokens, hidden_size
            self.virtual = self.kernels.zeros(shape, context.dtype)
            self.holds.append(Weight("virtual_tokens", shape, "embedding", context.dtype))

    def tie(self, head: ParallelLMHead) -> None:
        """Makes this table the matrix of ``head``, once it is loaded."""
        self._heads.append(head)

    def __call__(self, ids: Array) -> Array:
        """Ids int64 [T] to float32 [T, E]."""
        if self._shared is not None:
            rows = self._shared.rows(ids, self.start, scale=self.scale, dtype=self._context.dtype)
        else:
            assert self.table is not None
            rows = self.kernels.embedding(ids, self.table, self.start, scale=self.scale)
        if self.low_rank is not None:
            rows = self.low_rank(ids, rows, self.start)
        rows = self.kernels.all_reduce(rows)
        return rows if self.virtual is None else self.kernels.embedding(ids, self.virtual, self._vocab_size, add=rows)

    def pack_lora(self, weights: Mapping[str, LoraMatrices]) -> PackedAdapter:
        """See ``LoraLayer``; the matrices are [rank, vocab] and [E, rank]."""
        assert self.low_rank is not None
        part = self.check_lora(weights, self.low_rank.max_rank)[""]
        down = self._pad(part.down[:, self.start : self.end].T).T
        return self.low_rank.pack(LowRankPart(down, part.up.astype(np.float32) * np.float32(self.scale)))

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Packs this rank's rows for tied heads, and copies them, not quantised, unless a head has the exact values."""
        table = None if self.keeps_bits(tensor) else self._take(tensor)
        for head in self._heads:
            head.tie_rows(table, tensor)
            if head.is_packed and head.packed.has_rows:
                self._shared = head.packed
                if not head.holds[0].is_tied:  # one of the two is counted
                    self.holds[0] = self.holds[0]._replace(is_tied=True)
        if self._shared is None:
            self.table = self.kernels.array(self._take(tensor) if table is None else table, self._context.dtype)


class LayerFeatures(Layer):
    """Vectors of virtual tokens that are added to the residual stream before a layer; all ranks hold them."""

    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.kernels, self._first = context.kernels, vocab_size
        shape = context.virtual_tokens, hidden_size
        #: Zero until they are written.
        self.table: Array = self.kernels.zeros(shape, context.dtype)
        self.holds.append(Weight("virtual_tokens", shape, "embedding", context.dtype))

    def add_to(self, residual: Array, ids: Array) -> Array:
        """residual float32 [T, E] + the rows of ids int64 [T]; the residual's memory may be reused."""
        return self.kernels.embedding(ids, self.table, self._first, add=residual)


class MappedEmbedding(Layer):
    """A large table of token embeddings, whole on every rank, which stays in the mapped file if the kernels read it.

    Of ids past the table, such as those of virtual tokens, row ``otherwise`` is the embedding.
    """

    def __init__(self, context: LayerContext, rows: int, width: int, *, scale: float, otherwise: int) -> None:
        super().__init__()
        self.kernels, self._dtype = context.kernels, context.dtype
        self._scale, self._otherwise = scale, otherwise
        self.expected["weight"] = (rows, width)
        self.holds.append(Weight("weight", (rows, width), "embedding", context.dtype, is_mapped=True))
        self.table: Array

    def __call__(self, ids: Array) -> Array:
        """Ids int64 [T], those of the batch, to float32 [T, width], multiplied by ``scale``."""
        return self.kernels.embedding(ids, self.table, scale=self._scale, otherwise=self._otherwise)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        self.table = self.kernels.keep_table(tensor, self._dtype)


class PositionEmbedding(Layer):
    """Learned embedding of positions, whole on every rank; row ``offset`` is that of position 0."""

    def __init__(self, context: LayerContext, rows: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.kernels = context.kernels
        self._first = -offset
        self.expected["weight"] = (rows, hidden_size)
        self.holds.append(Weight("weight", (rows, hidden_size), "embedding", context.dtype))
        self.table: Array
        self._dtype = context.dtype

    def add_to(self, residual: Array, positions: Array) -> Array:
        """residual float32 [T, E] + the rows of positions int64 [T]; the residual's memory may be reused."""
        return self.kernels.embedding(positions, self.table, self._first, add=residual)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        self.table = self.kernels.array(to_values(tensor), self._dtype)


class ParallelLMHead(_VocabularyShare, LoraLayer):
    """The language-model head; with ``tied`` its matrix is the embedding's, and no tensor is expected."""

    low_rank: LowRank | None = None

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        hidden_size: int,
        tied: VocabParallelEmbedding | None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(context, vocab_size)
        self.packed: PackedWeight
        #: This rank's rows, or None if the checkpoint's bits are kept; and the checkpoint's tensor.
        self._placed: tuple[np.ndarray | None, np.ndarray | QuantizedRows] | None = None
        self._bias: np.ndarray | None = None
        self._vocab_size = vocab_size
        # 8 bits even if other matrices have 4: errors of the head are errors of the logits.
        self._quantization = {"int8": "int8", "int4": "int8", "gguf": "gguf"}.get(context.quantization or "")
        dtype = self._quantization or context.dtype
        is_tied = tied is not None and self._quantization is None
        self.holds.append(Weight("weight", (self.rows, hidden_size), "head", dtype, is_tied))
        if tied is None:
            self.expected["weight"] = (vocab_size, hidden_size)
        else:
            tied.tie(self)
        if bias:
            self.expected["bias"] = (vocab_size,)
            self.holds.append(Weight("bias", (self.rows,), "vector", context.dtype))
        self.lora_parts = {"": (vocab_size, hidden_size)}
        if context.max_loras:
            slots = context.low_rank_shape(hidden_size, self.rows)
            self.low_rank = self.kernels.adapters.make_low_rank(slots, sampled=True)

    def __call__(self, hidden: Array) -> Array:
        """Hidden [n, E] to logits float32 [n, vocab]."""
        add = None if self.low_rank is None else self.low_rank(hidden)
        logits = self.kernels.all_gather(self.packed(hidden, DType.FLOAT32, add))
        return logits if self._context.tp_size == 1 else logits[:, : self._vocab_size]

    def pack_lora(self, weights: Mapping[str, LoraMatrices]) -> PackedAdapter:
        """See ``LoraLayer``; the rows past the vocabulary are zero."""
        assert self.low_rank is not None
        part = self.check_lora(weights, self.low_rank.max_rank)[""]
        return self.low_rank.pack([LowRankPart(part.down, self._pad(part.up[self.start : self.end]))])

    def tie_rows(self, table: np.ndarray | None, source: np.ndarray | QuantizedRows) -> None:
        """Takes the rows of the embedding, and packs them once the bias, if there is one, is loaded too."""
        self._placed = table, source
        if not self.expected:
            self.complete()

    @property
    def is_packed(self) -> bool:
        return hasattr(self, "packed")

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        if shard == "bias":
            self._bias = self._take(tensor)
        else:
            self._placed = (None if self.keeps_bits(tensor) else self._take(tensor), tensor)

    def complete(self) -> None:
        """Packs this rank's rows, unless they are those of an embedding that is not loaded yet."""
        if self._placed is None:
            return
        table, source = self._placed
        if isinstance(source, QuantizedRows) and table is None:
            rows = source.take(slice(self.start, self.end), slice(None))
            self.packed = self.kernels.pack([rows], self._bias, dtype=self._context.dtype)
        else:
            quantized = isinstance(source, QuantizedRows) or self._context.quantization in ("int8", "int4")
            assert table is not None
            kind = "int8" if quantized else None
            self.packed = self.kernels.pack([table], self._bias, kind, dtype=self._context.dtype)
        self._placed = self._bias = None


class ClassificationHead(Layer):
    """Class scores of hidden states, out(norm(activation(dense(x)))); ``dense`` and the norm are optional.

    Every rank has all of it, and it is not quantised: errors of the head are errors of the scores.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden: int,
        labels: int,
        *,
        dense: Activation | Literal["tanh"] | None = None,
        dense_bias: bool = True,
        norm: LayerNorm | None = None,
        out_bias: bool = True,
    ) -> None:
        """``dense``: activation of the first matrix; None: there is none."""
        super().__init__()
        self.kernels = context.kernels
        alone = replace(context, tp_rank=0, tp_size=1, quantization=None, max_loras=0)
        self.dense: MergedColumnParallelLinear | None = None
        self._is_tanh = dense == "tanh"
        if dense is not None:
            fused = None if dense == "tanh" else dense
            linear = MergedColumnParallelLinear(alone, [("", hidden)], hidden, dense_bias, activation=fused)
            self.dense = self.attach("dense", linear)
        self.norm = None if norm is None else self.attach("norm", norm)
        self.out = self.attach("out", MergedColumnParallelLinear(alone, [("", labels)], hidden, out_bias))

    def __call__(self, x: Array) -> Array:
        """Hidden states [n, E] to class scores float32 [n, labels]."""
        if self.dense is not None:
            x = self.kernels.soft_cap(self.dense.packed(x, DType.FLOAT32), 1.0) if self._is_tanh else self.dense(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out.packed(x, DType.FLOAT32)
