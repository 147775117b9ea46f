"""Root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.base import Layer, Weight
from octavo.layers.context import LayerContext


class RMSNorm(Layer):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019); every rank holds all of it."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.expected["weight"] = (size,)
        self.holds.append(Weight("weight", (size,), "vector", context.dtype_name))
        self.kernels = context.kernels
        self.eps = eps
        self.weight = torch.empty(size, dtype=context.dtype, device=context.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, of the same shape and of the weight's type."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def place(self, shard: str, tensor: Tensor) -> None:
        """Copies the weight."""
        self.weight.copy_(tensor)
