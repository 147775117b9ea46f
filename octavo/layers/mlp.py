"""Feed-forward networks, of two matrices and of three."""

from __future__ import annotations

from octavo.kernels.arrays import Array
from octavo.kernels.packed_weight import Activation
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.linear import GateUpParallelLinear, MergedColumnParallelLinear, RowParallelLinear


class MLP(Layer):
    """fc2(activation(fc1(x))): Vaswani et al. 2017, section 3.3."""

    def __init__(self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation) -> None:
        super().__init__()
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], hidden, bias, activation=activation)
        )
        self.fc2 = self.attach("fc2", RowParallelLinear(context, inner, hidden, bias))

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + the network's output for x, both [T, E]."""
        return self.fc2.add_to(residual, self.fc1(x))


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)): Shazeer 2020."""

    def __init__(
        self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.gate_up = self.attach("", GateUpParallelLinear(context, hidden, inner, bias, activation))
        self.down = self.attach("down_proj", RowParallelLinear(context, inner, hidden, bias))

    def __call__(self, x: Array) -> Array:
        """The network's output for x [T, E], float32 [T, E]."""
        return self.down(self.gate_up(x))

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + self(x), float32 [T, E]; the residual's memory may be reused."""
        return self.down.add_to(residual, self.gate_up(x))
