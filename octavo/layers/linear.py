"""Linear layers and their shares in a tensor-parallel group (Shoeybi et al. 2019, section 3).

A layer keeps this rank's share of its checkpoint tensors, mapped from their files if possible, until the last one is
there. Then the backend packs them as one matrix, and they are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.interface import Activation, Array, LowRank, LowRankPart, PackedAdapter, PackedWeight
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, LoraLayer, LoraMatrices, Weight

#: Unit of outputs and inputs that ranks cannot share equally: values with a scale of quantised formats.
_UNIT = 32
#: Number of pieces of K in a row-parallel product, joined as a binary tree. Each rank's share is a subtree, so 1, 2 and
#: 4 ranks give the same bits (arXiv 2511.17826).
_PIECES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of the checkpoint and this rank's share of it."""

    #: Such as ``q_proj``; empty if the matrix has the layer's name.
    name: str
    #: Rows (outputs) in the checkpoint, and those of this rank.
    full_rows: int
    rows: slice
    #: Columns (inputs) of this rank.
    columns: slice = field(default_factory=lambda: slice(None))

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def tensor_name(self, kind: str) -> str:
        return f"{self.name}.{kind}" if self.name else kind


class ParallelLinear(Layer, LoraLayer):
    """One matrix product; the matrix is the rows of one or more checkpoint matrices."""

    low_rank: LowRank | None = None

    def __init__(
        self,
        context: LayerContext,
        parts: list[Part],
        in_features: int,
        bias: bool,
        *,
        prefix: str = "",
        gated: bool = False,
        pieces: int = 1,
    ) -> None:
        """``prefix``: of the names of the stacked weights, with a dot, if the layer is attached without a name.

        ``gated``: whether the two matrices are gate and up projections. ``pieces``: see ``Kernels.pack``.
        """
        super().__init__()
        self.kernels, self.dtype = context.kernels, context.dtype
        self.packed: PackedWeight
        self._parts = parts
        self._shards = {part.tensor_name(kind): part for part in parts for kind in ("weight", "bias")}
        self.out_features = sum(part.size for part in parts)
        own_in_features = len(range(in_features)[parts[0].columns])
        for part in parts:
            self.expected[part.tensor_name("weight")] = (part.full_rows, in_features)
            if bias:
                self.expected[part.tensor_name("bias")] = (part.full_rows,)
        dtype = context.quantization or context.dtype
        shape = (self.out_features, own_in_features)
        self.holds.append(Weight(f"{prefix}weight", shape, "linear", dtype, pieces=pieces))
        if bias:
            self.holds.append(Weight(f"{prefix}bias", (self.out_features,), "vector", context.dtype))
        self._context, self._gated, self._pieces = context, gated, pieces
        #: Shares of this rank, by the parts' names.
        self._weights: dict[str, np.ndarray | QuantizedRows] = {}
        self._biases: dict[str, np.ndarray] = {}
        self.lora_parts = {part.name: (part.full_rows, in_features) for part in parts}
        if context.max_loras:
            slots = context.low_rank_shape(own_in_features, *(part.size for part in parts))
            self.low_rank = context.kernels.adapters.make_low_rank(slots)

    def __call__(self, x: Array) -> Array:
        """x [T, in], of the network's type or float32, to [T, out] of the network's type."""
        return self.packed(x, self._context.dtype, self.with_adapters(x))

    def with_adapters(self, x: Array, add: Array | None = None) -> Array | None:
        """``add`` + the low-rank products of x, both [T, out], as ``add`` of the product; None if there are neither."""
        return add if self.low_rank is None else self.low_rank(x, add)

    def pack_lora(self, weights: Mapping[str, LoraMatrices]) -> PackedAdapter:
        assert self.low_rank is not None
        whole = self.check_lora(weights, self.low_rank.max_rank)
        return self.low_rank.pack(
            [
                LowRankPart(whole[part.name].down[:, part.columns], whole[part.name].up[part.rows])
                if part.name in whole
                else None
                for part in self._parts
            ]
        )

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        part = self._shards[shard]
        if isinstance(tensor, QuantizedRows):
            self._weights[part.name] = tensor.take(part.rows, part.columns)
        elif tensor.ndim == 1:
            self._biases[part.name] = tensor[part.rows]
        else:
            self._weights[part.name] = tensor[part.rows, part.columns]

    def complete(self) -> None:
        self.packed = self._pack(self._take_matrices(), self._take_bias(), self._pieces)

    def _take_matrices(self) -> list[np.ndarray | QuantizedRows]:
        """This rank's share of each part, in order: all in the checkpoint's own bits, or none."""
        parts, self._weights = [self._weights[part.name] for part in self._parts], {}
        if all(isinstance(part, QuantizedRows) for part in parts):
            return parts
        # Some checkpoints have both quantised and plain matrices in one layer.
        return [to_values(part) for part in parts]

    def _take_bias(self) -> np.ndarray | None:
        parts, self._biases = [self._biases[part.name] for part in self._parts if part.name in self._biases], {}
        return np.concatenate(parts) if parts else None

    def _pack(
        self, parts: Sequence[np.ndarray | QuantizedRows], bias: np.ndarray | None, pieces: int = 1
    ) -> PackedWeight:
        context = self._context
        return self.kernels.pack(
            parts, bias, context.tensor_quantization, dtype=context.dtype, gated=self._gated, pieces=pieces
        )


class MergedColumnParallelLinear(ParallelLinear):
    """Matrices with the same input in one product; each rank holds a share of the outputs of each matrix.

    The outputs of the parts (name, outputs) are concatenated and have the activation. For shares see
    ``LayerContext.share``; unequal ones are in units of 32.
    """

    def __init__(
        self,
        context: LayerContext,
        parts: list[tuple[str, int]],
        in_features: int,
        bias: bool,
        activation: Activation | None = None,
        *,
        prefix: str = "",
        gated: bool = False,
    ) -> None:
        shares = []
        for name, out_features in parts:
            rows = context.share(out_features, f"outputs of {name or 'a linear layer'}", _UNIT)
            shares.append(Part(name, out_features, rows))
        super().__init__(context, shares, in_features, bias, prefix=prefix, gated=gated)
        self._activation = activation

    def __call__(self, x: Array) -> Array:
        """activation(x W^T + b): x [T, in] to [T, out], [T, out / 2] of gate and up."""
        return self.packed(x, self._context.dtype, self.with_adapters(x), self._activation)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """The first two matrices of a gated feed-forward network and the activation between them."""

    def __init__(
        self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation = "silu"
    ) -> None:
        parts = [("gate_proj", inner), ("up_proj", inner)]
        super().__init__(context, parts, hidden, bias, activation, prefix="gate_up_proj.", gated=True)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections in one product; output [T, (heads + 2 * kv_heads) * head_dim].

    Each rank holds a share of the KV heads, as even as possible, and the query heads that attend to them. With more
    ranks than KV heads, neighbouring ranks hold the same one and equal shares of its query heads; the number of ranks
    must then be a multiple of the KV heads and a divisor of the query heads.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        *,
        whole_qk: bool = False,
    ) -> None:
        """``whole_qk``: every rank computes all heads of q and k, for a norm over them, and its share of v."""
        own, own_kv = share_heads(context, heads, kv_heads)
        self.heads, self.kv_heads = own.stop - own.start, own_kv.stop - own_kv.start
        #: This rank's heads, and the number of query heads in the product.
        self.own, self.own_kv = own, own_kv
        self.num_queries = heads if whole_qk else self.heads
        #: This rank's columns of q, and of the input of the projection after attention.
        self.query_columns = slice(own.start * head_dim, own.stop * head_dim)
        kv_rows = slice(own_kv.start * head_dim, own_kv.stop * head_dim)
        parts = [
            Part("q_proj", heads * head_dim, slice(0, heads * head_dim) if whole_qk else self.query_columns),
            Part("k_proj", kv_heads * head_dim, slice(0, kv_heads * head_dim) if whole_qk else kv_rows),
            Part("v_proj", kv_heads * head_dim, kv_rows),
        ]
        super().__init__(context, parts, hidden_size, bias, prefix="qkv_proj.")


class ConcatenatedInputs(ParallelLinear):
    """One matrix product with the concatenation of several inputs, as the sum of a product with each of them.

    A recorded step has no concatenation, and an input can be used before the next one is computed. Only for layers
    without adapters. It comes first among the base classes of a layer.
    """

    #: Columns of each input.
    widths: Sequence[int]

    def product(self, index: int, x: Array, out_dtype: DType, add: Array | None = None) -> Array:
        """add + the product with input ``index``, x [T, width]: [T, out]; the bias comes with the last input."""
        return self._each[index](x, out_dtype, add)

    def complete(self) -> None:
        parts, bias = self._take_matrices(), self._take_bias()
        matrices = [to_values(part) for part in parts]
        ends = [*itertools.accumulate(self.widths)]
        self._each = [
            self._pack([matrix[:, end - width : end] for matrix in matrices], bias if end == ends[-1] else None)
            for width, end in zip(self.widths, ends, strict=True)
        ]


class ReplicatedConcatLinear(ConcatenatedInputs):
    """A product of several inputs; every rank has all outputs."""

    def __init__(self, context: LayerContext, widths: Sequence[int], out_features: int, bias: bool) -> None:
        self.widths = widths
        super().__init__(context, [Part("", out_features, slice(0, out_features))], sum(widths), bias)


class ConcatQKVParallelLinear(ConcatenatedInputs, QKVParallelLinear):
    """Query, key and value projections of several inputs."""

    def __init__(
        self, context: LayerContext, widths: Sequence[int], heads: int, kv_heads: int, head_dim: int, bias: bool
    ) -> None:
        self.widths = widths
        QKVParallelLinear.__init__(self, context, sum(widths), heads, kv_heads, head_dim, bias)


def share_heads(
    context: LayerContext, heads: int, kv_heads: int, names: tuple[str, str] = ("query heads", "KV heads")
) -> tuple[slice, slice]:
    """This rank's query heads and KV heads, or what errors call by ``names``; see ``QKVParallelLinear``."""
    rank, size = context.tp_rank, context.tp_size
    if size <= kv_heads:
        own_kv = context.share(kv_heads, names[1], 1)
        return slice(own_kv.start * heads // kv_heads, own_kv.stop * heads // kv_heads), own_kv
    if size % kv_heads == 0 and heads % size == 0:
        own_kv = slice(rank * kv_heads // size, rank * kv_heads // size + 1)
        return context.share(heads, names[0], 1), own_kv
    raise ConfigError(
        f"{heads} {names[0]} and {kv_heads} {names[1]} cannot be shared by {size} tensor-parallel workers: "
        f"there can be at most as many as {names[1]}, or a multiple of them that divides the {names[0]}"
    )


class RowParallelLinear(ParallelLinear):
    """Each rank holds a share of the inputs; the results are summed over the ranks.

    1, 2 and 4 ranks give the same bits if float32 or bfloat16 inputs divide into that many pieces of pairs, on backends
    with batch-invariant results: the product's pieces and ``all_reduce`` make one tree of sums, and bias and residual
    are added after it.
    """

    def __init__(
        self, context: LayerContext, in_features: int, out_features: int, bias: bool, columns: slice | None = None
    ) -> None:
        """``columns``: this rank's inputs, by default those of ``LayerContext.share`` in units of 32."""
        self.columns = columns = columns or context.share(in_features, "inputs of a linear layer", _UNIT)
        share, size = columns.stop - columns.start, context.tp_size
        part = Part("", out_features, slice(0, out_features), columns)
        is_subtree = in_features % (2 * _PIECES) == 0 and _PIECES % size == 0 and share * size == in_features
        super().__init__(context, [part], in_features, bias, pieces=_PIECES // size if is_subtree else 1)
        #: float32 [out] if there are several ranks: each adds it after the sum.
        self._late_bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        """This rank's columns of x [T, in] to float32 [T, out]."""
        return self.kernels.all_reduce(self.packed(x, DType.FLOAT32, self.with_adapters(x)), self._late_bias)

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + self(x), float32 [T, out]; the residual's memory may be reused."""
        if self._context.tp_size == 1:
            return self.packed(x, DType.FLOAT32, self.with_adapters(x, residual))
        return self.kernels.all_reduce(self.packed(x, DType.FLOAT32, self.with_adapters(x)), self._late_bias, residual)

    def complete(self) -> None:
        """Packs the matrix; with several ranks without the bias."""
        if self._context.tp_size > 1 and (bias := self._take_bias()) is not None:
            # Rounded to the weights' type, as in the product of a single rank.
            rounded = bias.astype(self._context.dtype.numpy)
            self._late_bias = self.kernels.array(rounded, DType.FLOAT32)
        super().complete()


# Two convolutions over time as matrix products over rows: the first layers of a speech encoder.

#: Width of both convolutions.
TAPS = 3
#: Multiple of the numbers of a window, for the registers of kernels.
_ALIGNMENT = 16


def window_size(channels: int) -> int:
    """Numbers of a window: the channels of three frames, a one, and zeros."""
    return (TAPS * channels // _ALIGNMENT + 1) * _ALIGNMENT


def convolution_rows(frames: np.ndarray) -> np.ndarray:
    """The input of ``TwoConvolutions`` for frames [2 T, channels] of any float type: float32 [T, 3 * window_size].

    Row p has the windows of frames 2 p - 1, 2 p and 2 p + 1. A window has a frame with its two neighbours, zero outside
    the input, and a one as the factor of the bias. Frame -1 is padding of the second convolution, and no output of the
    first: its window is all zero, and so is its output.
    """
    count, channels = frames.shape
    padded = np.zeros((count + 2, channels), np.float32)
    padded[1:-1] = frames
    windows = np.zeros((count + 1, window_size(channels)), np.float32)  # of the frames from -1 on
    windows[1:, : TAPS * channels] = np.lib.stride_tricks.sliding_window_view(padded, (TAPS, channels)).reshape(
        count, -1
    )
    windows[1:, TAPS * channels] = 1.0
    width = windows.shape[1]
    rows = np.empty((count // 2, TAPS, width), np.float32)
    for tap in range(TAPS):
        rows[:, tap] = windows[tap : tap + count - 1 : 2]
    return rows.reshape(count // 2, -1)


class TwoConvolutions(Layer):
    """activation(convolution of activation(convolution of x)), of width 3 both, the second with stride 2.

    Tensors are conv1.{weight, bias} and conv2.{weight, bias}, weights [outputs, inputs, 3]. Every rank computes all.
    """

    def __init__(self, context: LayerContext, channels: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.kernels, self.dtype = context.kernels, context.dtype
        self._channels, self._activation = channels, activation
        self._placed: dict[str, np.ndarray] = {}
        self._first: PackedWeight
        self._second: list[PackedWeight]
        for name, inputs in (("conv1", channels), ("conv2", hidden)):
            self.expected[f"{name}.weight"] = (hidden, inputs, TAPS)
            self.expected[f"{name}.bias"] = (hidden,)
        window = window_size(channels)
        self.holds.append(Weight("conv1.weight", (hidden, window), "linear", context.dtype))
        self.holds.append(Weight("conv2.weight", (hidden, TAPS * hidden), "linear", context.dtype))
        self.holds.append(Weight("conv2.bias", (hidden,), "vector", context.dtype))

    def __call__(self, rows: Array) -> Array:
        """The result of ``convolution_rows`` to float32 [T, hidden]."""
        window, out = window_size(self._channels), None
        for tap, weight in enumerate(self._second):
            x = self._first(rows[:, tap * window : (tap + 1) * window], self.dtype, None, self._activation)
            out = weight(x, DType.FLOAT32, out, self._activation if tap == TAPS - 1 else None)
        return out

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._placed[shard] = tensor

    def complete(self) -> None:
        """Packs the first matrix with its bias as a column, and the second one tap by tap."""
        first, bias = self._placed["conv1.weight"], self._placed["conv1.bias"]
        matrix = np.zeros((len(first), window_size(self._channels)), np.float32)
        size = TAPS * self._channels
        matrix[:, :size] = first.transpose(0, 2, 1).reshape(len(first), size)
        matrix[:, size] = bias
        pack = self.kernels.pack
        self._first = pack([matrix], dtype=self.dtype)
        second, bias = self._placed["conv2.weight"], self._placed["conv2.bias"]
        self._second = [
            pack([np.ascontiguousarray(second[:, :, tap])], bias if tap == TAPS - 1 else None, dtype=self.dtype)
            for tap in range(TAPS)
        ]
        self._placed.clear()
