"""Feed-forward networks: of two matrices, gated ones of three, and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.interface import Activation, Array, PackedExperts, PackedWeight, RoutingSpec, Xielu
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.layers.linear import (
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    Part,
    RowParallelLinear,
)


class MLP(Layer):
    """fc2(activation(fc1(x))): Vaswani et al. 2017, section 3.3."""

    def __init__(self, context: LayerContext, hidden: int, inner: int, bias: bool, activation: Activation) -> None:
        super().__init__()
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], hidden, bias, activation=activation)
        )
        self.fc2 = self.attach("fc2", RowParallelLinear(context, inner, hidden, bias))

    def __call__(self, x: Array) -> Array:
        return self.fc2(self.fc1(x))

    def add_to(self, residual: Array, x: Array) -> Array:
        return self.fc2.add_to(residual, self.fc1(x))


class XieluMLP(Layer):
    """fc2(xielu(fc1(x))) with learned parameters of the activation (Huang & Schlag 2024).

    Tensors ``act_fn.alpha_p`` and ``act_fn.alpha_n`` [1] are logarithms of e^a - 1 for the slopes a, of the negative
    side less ``act_fn.beta``; that and ``act_fn.eps`` are numbers.
    """

    def __init__(self, context: LayerContext, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.fc1 = self.attach("fc1", MergedColumnParallelLinear(context, [("", inner)], hidden, bias))
        self.fc2 = self.attach("fc2", RowParallelLinear(context, inner, hidden, bias))
        shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        self.expected = {f"act_fn.{name}": shape for name, shape in shapes.items()}
        self.holds = [Weight(name, shape, "vector", DType.FLOAT32) for name, shape in self.expected.items()]
        self._numbers: dict[str, float] = {}
        self._xielu = Xielu(1.0, 1.0, 0.5, 0.0)

    def add_to(self, residual: Array, x: Array) -> Array:
        inner = self.fc1.packed(x, DType.FLOAT32, self.fc1.with_adapters(x))
        return self.fc2.add_to(residual, self.kernels.xielu(inner, self._xielu))

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        self._numbers[shard.removeprefix("act_fn.")] = float(to_values(tensor).astype(np.float64).reshape(()))

    def complete(self) -> None:
        numbers, beta = self._numbers, self._numbers["beta"]
        slopes = [float(np.logaddexp(0.0, numbers[name])) for name in ("alpha_p", "alpha_n")]
        self._xielu = Xielu(slopes[0], beta + slopes[1], beta, numbers["eps"])


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

_CHOICE_BIAS = "gate.e_score_correction_bias"
_BIAS = "gate.bias"


class SparseMoE(Layer):
    """A router and its experts, feed-forward networks (Shazeer et al. 2017; Fedus et al. 2021).

    Each rank holds a share of the inner dimension of every expert, and the whole router. As in other layers 1, 2 and 4
    ranks give the same bits if the inner dimension divides. The router is never quantised: it is small, and its errors
    choose other experts. A shared expert, which every token has, is weighted by the sigmoid of a logit of its own
    (Qwen2-MoE), or is added as it is (DeepSeek-V2, section 2.2).
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
        shared_bias: bool = False,
        choice_bias: bool = False,
        bias: bool = False,
        activation: Activation = "silu",
        gated: bool = True,
        latent: int = 0,
        latent_bias: bool = False,
    ) -> None:
        """Creates the experts, with the router's tensors under ``gate``.

        Args:
            num_experts: without the shared one.
            routing: ``shared`` is 1 if there is a shared expert with a weight.
            shared_inner: inner size of the shared expert, ``shared_expert`` with a weight and ``shared_experts``
                without; 0: there is none.
            shared_bias: whether the one without a weight has biases.
            choice_bias: whether the checkpoint has ``e_score_correction_bias``, see ``Kernels.route``.
            bias: whether the router and the experts' matrices have biases; not with a shared expert.
            activation: of the experts.
            gated: whether the experts have gates; if not, neither has the shared one, and none a weight or biases.
            latent: width of the experts' inputs and results, which ``fc1_latent_proj`` makes of x and
                ``fc2_latent_proj`` expands; 0: that of x. The router and the shared expert have x itself.
            latent_bias: whether these two have biases.
        """
        super().__init__()
        routing.check(num_experts)
        assert not (bias and routing.shared), "a shared expert has no bias"
        assert gated or not (bias or routing.shared)
        self.kernels = context.kernels
        self._context = context
        self._routing = routing
        self._router: PackedWeight
        self._experts: PackedExperts
        self._rows: dict[str, np.ndarray] = {}
        self._bias: Array | None = None
        self._activation: Activation = activation
        #: float32 [experts, hidden], added once by every rank, whatever its share of the inner dimension.
        self._down_bias: Array | None = None
        self._down_bias_names = [f"experts.{index}.down_proj.bias" for index in range(num_experts) if bias]
        self._shared: GatedMLP | MLP | None = None
        if shared_inner and not routing.shared:
            kind = GatedMLP if gated else MLP
            shared = kind(context, hidden, shared_inner, shared_bias, activation)
            self._shared = self.attach("shared_experts", shared)
        context = replace(context, max_loras=0)  # adapters of experts are refused
        self._latent: tuple[ParallelLinear, ParallelLinear] | None = None
        if latent:
            compress, expand = (Part("", width, slice(0, width)) for width in (latent, hidden))
            self._latent = (
                self.attach("fc1_latent_proj", ParallelLinear(context, [compress], hidden, latent_bias)),
                self.attach("fc2_latent_proj", ParallelLinear(context, [expand], latent, latent_bias)),
            )
        width = latent or hidden

        def make_first() -> MergedColumnParallelLinear:
            if gated:
                return GateUpParallelLinear(context, width, inner, bias)
            return MergedColumnParallelLinear(context, [("up_proj", inner)], width, bias=False)

        #: Gate and up, or up, and down, of each expert, until they are packed together.
        self._gate_up = [make_first() for _ in range(num_experts)]
        self._down = [RowParallelLinear(context, inner, width, bias=False) for _ in range(num_experts)]
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
        if bias:
            biases = {_BIAS: (num_experts,), **dict.fromkeys(self._down_bias_names, (hidden,))}
            self.expected |= biases
            for name, shape in biases.items():
                share = 1.0 if name == _BIAS else routing.top_k / num_experts
                self.holds.append(Weight(name, shape, "vector", "float32", active=share))
        if choice_bias:
            self.expected[_CHOICE_BIAS] = (num_experts,)
            self.holds.append(Weight(_CHOICE_BIAS, (num_experts,), "vector", "float32"))

    def __call__(self, x: Array) -> Array:
        """The weighted sum of the results of each token's experts for x, float32 [T, hidden]."""
        shared = None if self._shared is None else self._shared(x)
        return self._add_routed(shared, x)

    def add_to(self, residual: Array, x: Array) -> Array:
        """residual + the result for x, float32 [T, hidden]; the residual's memory may be reused."""
        if self._shared is not None:
            residual = self._shared.add_to(residual, x)
        return self._add_routed(residual, x)

    def _add_routed(self, residual: Array | None, x: Array) -> Array:
        experts, weights = self.kernels.route(self._router(x, DType.FLOAT32), self._routing, self._bias)
        if self._down_bias is not None:
            assert residual is not None, "experts with biases are added to a residual stream"
            residual = self.kernels.add_expert_bias(residual, experts, weights, self._down_bias)
        if self._latent is not None:
            compress, expand = self._latent
            return expand.packed(self._sum(compress(x), experts, weights, None), DType.FLOAT32, residual)
        return self._sum(x, experts, weights, residual)

    def _sum(self, x: Array, experts: Array, weights: Array, residual: Array | None) -> Array:
        """residual + the sum of the routed experts over all ranks."""
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
        if _CHOICE_BIAS in self._rows:
            self._bias = self.kernels.array(self._rows.pop(_CHOICE_BIAS), DType.FLOAT32)
        if self._down_bias_names:
            biases = [self._rows.pop(name) for name in self._down_bias_names]
            self._down_bias = self.kernels.array(np.stack(biases), DType.FLOAT32)
        bias = self._rows.pop(_BIAS, None)
        routers = [self._rows[name] for name in sorted(self._rows)]
        self._router = self.kernels.pack(routers, bias, dtype=self._context.dtype)
        self._experts = self.kernels.pack_experts(
            [linear.packed for linear in self._gate_up],
            [linear.packed for linear in self._down],
            self._routing.shared,
            self._activation,
            weighs_input=self._routing.weighs_input,
        )
        self._rows, self._linears, self._gate_up, self._down = {}, {}, [], []
