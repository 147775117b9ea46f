"""Norms; every rank holds all of their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight


class _Norm(Layer):
    """Vectors [size] under their checkpoint names."""

    def __init__(
        self, context: LayerContext, size: int, eps: float, names: tuple[str, ...], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.eps = eps
        self.dtype = context.dtype
        self._vectors = {name: torch.empty(size, dtype=dtype, device=context.device) for name in names}
        for name in names:
            self.expected[name] = (size,)
            self.holds.append(Weight(name, (size,), "vector", str(dtype).removeprefix("torch.")))
        self.weight = self._vectors["weight"]

    def place(self, shard: str, tensor: Tensor) -> None:
        """Copies the vector."""
        self._vectors[shard].copy_(tensor)


class RMSNorm(_Norm):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019).

    With ``unit_offset`` the checkpoint holds the weight less 1. The weight is float32 then: 1 + w would lose most of
    the bits of a small w in bfloat16.
    """

    def __init__(self, context: LayerContext, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__(context, size, eps, ("weight",), torch.float32 if unit_offset else context.dtype)
        self._offset = 1.0 if unit_offset else 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, of the same shape and of the network's type."""
        return self.kernels.rms_norm(x, self.weight, self.eps, out_dtype=self.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """The norm of x in float32, as a residual stream."""
        return self.kernels.rms_norm(x, self.weight, self.eps, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the norm of x, float32 [T, E]; the residual's memory may be reused."""
        return self.kernels.rms_norm(x, self.weight, self.eps, add=residual)

    def place(self, shard: str, tensor: Tensor) -> None:
        """Copies the weight."""
        self.weight.copy_(tensor)
        self.weight += self._offset


class LayerNorm(_Norm):
    """Layer norm over the last dimension (Ba et al. 2016)."""

    def __init__(self, context: LayerContext, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(context, size, eps, ("weight", "bias") if bias else ("weight",), context.dtype)
        self.bias = self._vectors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, of the same shape and of the network's type."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, out_dtype=self.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """The norm of x in float32, as a residual stream."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps, out_dtype=torch.float32)
