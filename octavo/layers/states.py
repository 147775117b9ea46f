"""Layers that keep a recurrent state of fixed size instead of keys and values: gated short convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache, conv_numbers
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class StateLayer(Layer, ABC):
    """A layer in the place of attention; ``kv_spec`` is ``KVSpec.state``, of this rank's share of the state."""

    kv_spec: KVSpec

    @abstractmethod
    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + the layer's output for x [T, E], float32 [T, E]; the residual's memory may be reused."""


class CausalConv(Layer):
    """The weights of ``Kernels.causal_conv``: tensors ``weight`` [C, 1, K] or [C, K], and ``bias`` [C]."""

    def __init__(
        self,
        context: LayerContext,
        channels: int,
        taps: int,
        bias: bool,
        own: slice | np.ndarray,
        factors: np.ndarray | None = None,
    ) -> None:
        """``own``: this rank's channels; ``factors``: float32 [channels] of the inputs, kept in the weight."""
        super().__init__()
        self.kernels, self.taps, self._own, self._factors = context.kernels, taps, own, factors
        self.channels = len(np.arange(channels)[own])
        #: Numbers in a block of states.
        self.numbers = conv_numbers(taps, self.channels, context.draft_tokens)
        self.weight: Array
        self.bias: Array | None = None
        self.expected["weight"] = (channels, 1, taps)
        self.holds.append(Weight("weight", (self.channels, taps), "vector", DType.FLOAT32))
        if bias:
            self.expected["bias"] = (channels,)
            self.holds.append(Weight("bias", (self.channels,), "vector", DType.FLOAT32))

    def load(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Files of GGUF have no dimension of size 1."""
        values = to_values(tensor)
        super().load(shard, values[:, None] if shard == "weight" and values.ndim == 2 else values)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = tensor.astype(np.float32)
        if shard == "weight" and self._factors is not None:
            values = values * self._factors[:, None, None]
        own = values[self._own]
        setattr(self, shard, self.kernels.array(np.ascontiguousarray(own[:, 0].T if shard == "weight" else own)))


class ShortConv(StateLayer):
    """out(c * conv(b * x)) with b, c and x from one projection (LFM2)."""

    def __init__(self, context: LayerContext, hidden: int, taps: int, bias: bool) -> None:
        """Tensors are ``in_proj`` [3 * hidden, hidden], ``conv`` and ``out_proj``; ``bias``: of all three."""
        super().__init__()
        self.kernels = context.kernels
        parts = [(name, hidden) for name in ("b_proj", "c_proj", "x_proj")]
        self.projection = self.attach("", MergedColumnParallelLinear(context, parts, hidden, bias, prefix="in_proj."))
        self.out = self.attach("out_proj", RowParallelLinear(context, hidden, hidden, bias))
        self.conv = self.attach("conv", CausalConv(context, hidden, taps, bias, self.out.columns))
        self.kv_spec = KVSpec.state(self.conv.numbers, context.draft_tokens)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``StateLayer``."""
        conv, width = self.conv, self.conv.channels
        projected = self.projection(x)
        b, c, x = (projected[:, i * width : (i + 1) * width] for i in range(3))
        return self.out.add_to(
            residual, self.kernels.causal_conv(x, conv.weight, conv.bias, cache, batch, in_gate=b, out_gate=c)
        )
