"""The feed-forward network of two matrices."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.packed_weight import Activation
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class MLP(Layer):
    """fc2(activation(fc1(x))): Vaswani et al. 2017, section 3.3."""

    def __init__(self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation) -> None:
        super().__init__()
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], hidden, bias, activation=activation)
        )
        self.fc2 = self.attach("fc2", RowParallelLinear(context, inner, hidden, bias))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the network's output for x, both [T, E]."""
        return self.fc2.add_to(residual, self.fc1(x))
