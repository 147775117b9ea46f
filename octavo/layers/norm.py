"""Norms; every rank holds all of their weights."""

from __future__ import annotations

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.arrays import Array
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight


class _Norm(Layer):
    """Vectors [size] under their checkpoint names."""

    def __init__(self, context: LayerContext, size: int, eps: float, names: tuple[str, ...], dtype: DType) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.eps = eps
        self.dtype = context.dtype
        self.weight: Array
        self.bias: Array | None = None
        self._stored = dtype
        for name in names:
            self.expected[name] = (size,)
            self.holds.append(Weight(name, (size,), "vector", dtype))

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Copies the vector."""
        setattr(self, shard, self.kernels.array(tensor, self._stored))


class RMSNorm(_Norm):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019).

    With ``unit_offset`` the checkpoint holds the weight less 1. The weight is float32 then: 1 + w would lose most of
    the bits of a small w in bfloat16.
    """

    def __init__(self, context: LayerContext, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__(context, size, eps, ("weight",), DType.FLOAT32 if unit_offset else context.dtype)
        self._unit_offset = unit_offset

    def __call__(self, x: Array) -> Array:
        """The norm of x, of the same shape and of the network's type."""
        return self.kernels.rms_norm(x, self.weight, self.eps, out_dtype=self.dtype)

    def float32(self, x: Array) -> Array:
        """The norm of x in float32, as a residual stream."""
        return self.kernels.rms_norm(x, self.weight, self.eps, out_dtype=DType.FLOAT32)

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + the norm of x, float32 [T, E]; the residual's memory may be reused."""
        return self.kernels.rms_norm(x, self.weight, self.eps, add=residual)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Copies the weight."""
        super().place(shard, tensor.astype(np.float32) + np.float32(1.0) if self._unit_offset else tensor)


class LayerNorm(_Norm):
    """Layer norm over the last dimension (Ba et al. 2016)."""

    def __init__(self, context: LayerContext, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(context, size, eps, ("weight", "bias") if bias else ("weight",), context.dtype)

    def __call__(self, x: Array) -> Array:
        """The norm of x, of the same shape and of the network's type."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, out_dtype=self.dtype)

    def float32(self, x: Array) -> Array:
        """The norm of x in float32, as a residual stream."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, out_dtype=DType.FLOAT32)
