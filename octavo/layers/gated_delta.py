"""Gated delta networks (Yang et al. 2024, arXiv 2412.06464) and attention with an output gate, as in Qwen3-Next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, DeltaHeads, LayerCache, delta_numbers
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm, Weight
from octavo.layers.linear import ParallelLinear, Part, RowParallelLinear
from octavo.layers.rope import RotaryRows
from octavo.layers.states import CausalConv, StateLayer


@dataclass(frozen=True)
class DeltaShape:
    """The heads of a gated delta network, and the inputs of its convolution with a token's own."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    #: See ``DeltaHeads``.
    beta_scale: float = 1.0

    @property
    def width(self) -> int:
        """Numbers of a token in a layer: projected, convolved, and the heads' results."""
        return 4 * self.key_heads * self.key_dim + 4 * self.value_heads * self.value_dim + 2 * self.value_heads


class DeltaNet(StateLayer, ABC):
    """The gated delta rule over convolved queries, keys and values, with a gated norm of each head.

    Each rank has a share of the key heads, and the value heads that use them. A block of states has the numbers
    of the convolution and then those of the value heads.
    """

    #: Names of the last projection and of the norm of heads.
    out_name: ClassVar[str] = "out_proj"
    norm_name: ClassVar[str] = "norm"
    #: See ``DeltaHeads``.
    per_channel: ClassVar[bool] = False
    gate: ClassVar[Literal["silu", "sigmoid"]] = "silu"

    def __init__(self, context: LayerContext, hidden: int, shape: DeltaShape, eps: float) -> None:
        """Tensors: conv1d, A_log, dt_bias, the last projection and the norm; and those of ``project``."""
        super().__init__()
        self.kernels, self._shape, self._eps = context.kernels, shape, eps
        own = context.share(shape.key_heads, "key heads of linear attention", 1)
        group = shape.value_heads // shape.key_heads
        #: This rank's value heads, and its rows of queries and of keys, and of values.
        self.own = slice(own.start * group, own.stop * group)
        self.heads = own.stop - own.start, self.own.stop - self.own.start
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        self.key_rows = slice(own.start * shape.key_dim, own.stop * shape.key_dim)
        self.value_rows = slice(self.own.start * shape.value_dim, self.own.stop * shape.value_dim)
        starts = ((0, self.key_rows), (keys, self.key_rows), (2 * keys, self.value_rows))
        channels = np.concatenate([np.arange(start + rows.start, start + rows.stop) for start, rows in starts])
        self.conv = self.attach("conv1d", CausalConv(context, 2 * keys + values, shape.taps, False, channels))
        out = RowParallelLinear(context, values, hidden, False, self.value_rows)
        self.out = self.attach(self.out_name, out)
        self._vectors: dict[str, Array] = {}
        self._norm = f"{self.norm_name}.weight"
        decays = shape.key_dim if self.per_channel else 1
        for name, each in (("A_log", 1), ("dt_bias", decays), (self._norm, 0)):
            self.expected[name] = (each * shape.value_heads or shape.value_dim,)
            held = each * self.heads[1] or shape.value_dim
            self.holds.append(Weight(name, (held,), "vector", DType.FLOAT32))
        sizes = self.heads[1], shape.key_dim, shape.value_dim, context.draft_tokens
        matrices = delta_numbers(*sizes, per_channel=self.per_channel)
        self.kv_spec = KVSpec.state(self.conv.numbers + matrices, context.draft_tokens)

    @abstractmethod
    def project(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Queries, keys and values before the convolution; and z, b and a of ``Kernels.gated_delta_rule``."""

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``StateLayer``."""
        conv, kernels = self.conv, self.kernels
        qkv, z, b, a = self.project(x)
        qkv = kernels.causal_conv(qkv, conv.weight, None, cache, batch, activation="silu")
        heads = kernels.gated_delta_rule(qkv, z, b, a, self._delta, cache, batch, offset=conv.numbers)
        return self.out.add_to(residual, heads)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = np.asarray(tensor, np.float32)
        if shard == "A_log":
            values = -np.exp(values)
        if shard != self._norm:
            values = values.reshape(self._shape.value_heads, -1)[self.own].reshape(-1)
        self._vectors[shard] = self.kernels.array(np.ascontiguousarray(values), DType.FLOAT32)

    def complete(self) -> None:
        shape = self._shape
        decay, dt_bias, norm = (self._vectors[name] for name in ("A_log", "dt_bias", self._norm))
        self._delta = DeltaHeads(
            *self.heads,
            shape.key_dim,
            shape.value_dim,
            self._eps,
            decay,
            dt_bias,
            norm,
            shape.beta_scale,
            self.per_channel,
            self.gate,
        )


class GatedDeltaNet(DeltaNet):
    """A decay for each head, with every input projected from x: in_proj_{q, k, v, z, b, a}."""

    def __init__(self, context: LayerContext, hidden: int, shape: DeltaShape, eps: float) -> None:
        super().__init__(context, hidden, shape, eps)
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        parts = [Part(f"in_proj_{name}", keys, self.key_rows) for name in "qk"]
        parts += [Part(f"in_proj_{name}", values, self.value_rows) for name in "vz"]
        self.projection = self.attach("", ParallelLinear(context, parts, hidden, False, prefix="in_proj_qkvz."))
        gates = [Part(f"in_proj_{name}", shape.value_heads, self.own) for name in "ba"]
        self.gates = self.attach("", ParallelLinear(context, gates, hidden, False, prefix="in_proj_ba."))

    def project(self, x: Array) -> tuple[Array, Array, Array, Array]:
        width, values = self.conv.channels, self.heads[1]
        projected, gates = self.projection(x), self.gates(x)
        return projected[:, :width], projected[:, width:], gates[:, :values], gates[:, values:]


class KimiDeltaNet(DeltaNet):
    """Kimi delta attention (arXiv 2510.26692): a decay for each key channel; it and the output's gate have low rank.

    Tensors: {q, k, v, b}_proj, and f_a_proj and f_b_proj of decays, g_a_proj and g_b_proj of gates.
    """

    out_name, norm_name = "o_proj", "o_norm"
    per_channel, gate = True, "sigmoid"

    def __init__(self, context: LayerContext, hidden: int, shape: DeltaShape, eps: float) -> None:
        super().__init__(context, hidden, shape, eps)
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        parts = [
            *(Part(f"{name}_proj", keys, self.key_rows) for name in "qk"),
            Part("v_proj", values, self.value_rows),
        ]
        self.projection = self.attach("", ParallelLinear(context, parts, hidden, False, prefix="qkv_proj."))
        ranks = {"f_a_proj": shape.key_dim, "g_a_proj": shape.value_dim}
        parts = [Part(name, rank, slice(0, rank)) for name, rank in ranks.items()]
        parts.append(Part("b_proj", shape.value_heads, self.own))
        self.down = self.attach("", ParallelLinear(context, parts, hidden, False, prefix="fgb_proj."))
        decays = slice(self.own.start * shape.key_dim, self.own.stop * shape.key_dim)
        up = Part("", shape.value_heads * shape.key_dim, decays)
        self.decays = self.attach("f_b_proj", ParallelLinear(context, [up], shape.key_dim, False))
        up = Part("", values, self.value_rows)
        self.gates = self.attach("g_b_proj", ParallelLinear(context, [up], shape.value_dim, False))

    def project(self, x: Array) -> tuple[Array, Array, Array, Array]:
        decay, gate = self._shape.key_dim, self._shape.key_dim + self._shape.value_dim
        down = self.down(x)
        return self.projection(x), self.gates(down[:, decay:gate]), down[:, gate:], self.decays(down[:, :decay])


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of another projection of its input, ``gate_proj``."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        spec: AttentionSpec,
        rotary: RotaryRows | None,
        norm: type[RMSNorm],
    ) -> None:
        super().__init__(config, context, spec, rotary, norm)
        gate = Part("gate_proj", config.num_heads * config.head_dim, self.qkv.query_columns)
        linear = ParallelLinear(context, [gate], config.hidden_size, config.qkv_bias, prefix="gate_proj.")
        self.gate = self.attach("", linear)

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.out(self._gated(x, cache, batch))

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.out.add_to(residual, self._gated(x, cache, batch))

    def _gated(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        gate = self.gate(x)
        return self.kernels.sigmoid_gate(self.attend(self.qkv(x), cache, batch), gate)
