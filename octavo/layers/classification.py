"""Heads that make class scores of hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.core.dtypes import DType
from octavo.kernels.arrays import Array
from octavo.kernels.packed_weight import Activation
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.layers.norm import LayerNorm


class ClassificationHead(Layer):
    """out(norm(activation(dense(x)))), of which the matrix ``dense`` and the norm may be left out.

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
        """``dense``: the activation of the first matrix, if there is one."""
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
