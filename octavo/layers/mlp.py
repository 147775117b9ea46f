"""Feed-forward networks: of two matrices, gated ones of three, and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.interface import Activation, Array, PackedExperts, PackedWeight, RoutingSpec
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.layers.linear import GateUpParallelLinear, MergedColumnParallelLinear, ParallelLinear, RowParallelLinear


class MLP(Layer):
    """fc2(activation(fc1(x))): Vaswani et al. 2017, section 3.3."""

    def __init__(self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation) -> None:
        super().__init__()
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], hidden, bias, activation=activation)
        )
        self.fc2 = self.attach("fc2", RowParallelLinear(context, inner, hidden, bias))

    def add_to(self, residual: Array, x: Array) -> Array:
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
        return self.down(self.gate_up(x))

    def add_to(self, residual: Array, x: Array) -> Array:
        return self.down.add_to(residual, self.gate_up(x))


# The mixture of experts: a router chooses a few feed-forward networks for each token.

_BIAS = "gate.e_score_correction_bias"


class SparseMoE(Layer):
    """A router and its experts, gated feed-forward networks (Shazeer et al. 2017; Fedus et al. 2021).

    Each rank holds a share of the inner dimension of every expert, and the whole router. As in other layers 1, 2 and 4
    ranks give the same bits if the inner dimension divides. The router is never quantised: it is small, and its errors
    choose other experts. Every token has a shared expert (Qwen2-MoE), weighted by the sigmoid of a logit of its own.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden: int,
        inner: int,
        num_experts: int,
        routing: RoutingSpec,
        *,
        shared_inner: int = 0,
        choice_bias: bool = False,
    ) -> None:
        """Creates the experts, with the router's tensors under ``gate``.

        Args:
            num_experts: without the shared one.
            routing: ``shared`` is 1 if there is a shared expert.
            shared_inner: inner size of the shared expert, if there is one.
            choice_bias: whether the checkpoint has ``e_score_correction_bias``, see ``Kernels.route``.
        """
        super().__init__()
        routing.check(num_experts)
        self.kernels = context.kernels
        self._context = context
        self._routing = routing
        self._router: PackedWeight
        self._experts: PackedExperts
        self._rows: dict[str, np.ndarray] = {}
        self._bias: Array | None = None
        context = replace(context, max_loras=0)  # adapters of experts are refused
        #: Gate and up, and down, of each expert, until they are packed together.
        self._gate_up = [GateUpParallelLinear(context, hidden, inner, bias=False) for _ in range(num_experts)]
        self._down = [RowParallelLinear(context, inner, hidden, bias=False) for _ in range(num_experts)]
        names = [f"experts.{index}." for index in range(num_experts)]
        routers = {"gate.weight": (num_experts, hidden)}
        if routing.shared:
            self._gate_up.append(GateUpParallelLinear(context, hidden, shared_inner, bias=False))
            self._down.append(RowParallelLinear(context, shared_inner, hidden, bias=False))
            names.append("shared_expert.")
            routers["shared_expert_gate.weight"] = (1, hidden)
        self._linears: dict[str, tuple[ParallelLinear, str]] = {}
        active = [routing.top_k / num_experts] * num_experts + [1.0] * routing.shared
        for name, share, gate_up, down in zip(names, active, self._gate_up, self._down, strict=True):
            for prefix, linear in ((name, gate_up), (f"{name}down_proj.", down)):
                self._linears |= {f"{prefix}{shard}": (linear, shard) for shard in linear.expected}
                self.expected |= {f"{prefix}{shard}": shape for shard, shape in linear.expected.items()}
                self.holds += [weight._replace(active=share) for weight in linear.weights(prefix)]
        self.expected |= routers
        self.holds += [Weight(name, shape, "linear", context.dtype) for name, shape in routers.items()]
        if choice_bias:
            self.expected[_BIAS] = (num_experts,)
            self.holds.append(Weight(_BIAS, (num_experts,), "vector", "float32"))

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + the weighted sum of the results of each token's experts for x, float32 [T, hidden]."""
        experts, weights = self.kernels.route(self._router(x, DType.FLOAT32), self._routing, self._bias)
        if self._context.tp_size == 1:
            return self._experts(x, experts, weights, residual)
        return self.kernels.all_reduce(self._experts(x, experts, weights), add=residual)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Takes a tensor of an expert, which is packed after its last one, or of the router."""
        if shard in self._linears:
            linear, name = self._linears[shard]
            linear.load(name, tensor)
        else:
            self._rows[shard] = to_values(tensor)

    def complete(self) -> None:
        if _BIAS in self._rows:
            self._bias = self.kernels.array(self._rows.pop(_BIAS), DType.FLOAT32)
        routers = [self._rows[name] for name in sorted(self._rows)]
        self._router = self.kernels.pack(routers, dtype=self._context.dtype)
        self._experts = self.kernels.pack_experts(
            [linear.packed for linear in self._gate_up], [linear.packed for linear in self._down], self._routing.shared
        )
        self._rows, self._linears, self._gate_up, self._down = {}, {}, [], []
