"""Gated delta networks (Yang et al. 2024, arXiv 2412.06464) and attention with an output gate, as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, DeltaHeads, LayerCache
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


class GatedDeltaNet(StateLayer):
    """The gated delta rule over convolved queries, keys and values, with a gated norm of each head.

    Each rank has a share of the key heads, and the value heads that use them. A state has the inputs of the convolution
    and then the matrices [key_dim, value_dim] of the value heads.
    """

    def __init__(self, context: LayerContext, hidden: int, shape: DeltaShape, eps: float) -> None:
        """Tensors: in_proj_{q, k, v, z, b, a}, conv1d, A_log, dt_bias, norm.weight and out_proj."""
        super().__init__()
        self.kernels, self._shape, self._eps = context.kernels, shape, eps
        own = context.share(shape.key_heads, "key heads of linear attention", 1)
        group = shape.value_heads // shape.key_heads
        self._own = slice(own.start * group, own.stop * group)
        self.heads = own.stop - own.start, self._own.stop - self._own.start
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        key_rows = slice(own.start * shape.key_dim, own.stop * shape.key_dim)
        value_rows = slice(self._own.start * shape.value_dim, self._own.stop * shape.value_dim)
        parts = [Part(f"in_proj_{name}", keys, key_rows) for name in "qk"]
        parts += [Part(f"in_proj_{name}", values, value_rows) for name in "vz"]
        self.projection = self.attach("", ParallelLinear(context, parts, hidden, False, prefix="in_proj_qkvz."))
        gates = [Part(f"in_proj_{name}", shape.value_heads, self._own) for name in "ba"]
        self.gates = self.attach("", ParallelLinear(context, gates, hidden, False, prefix="in_proj_ba."))
        starts = ((0, key_rows), (keys, key_rows), (2 * keys, value_rows))
        channels = np.concatenate([np.arange(start + rows.start, start + rows.stop) for start, rows in starts])
        self.conv = self.attach("conv1d", CausalConv(context, 2 * keys + values, shape.taps, False, channels))
        self.out = self.attach("out_proj", RowParallelLinear(context, values, hidden, False, value_rows))
        self._vectors: dict[str, Array] = {}
        for name, size in (
            ("A_log", shape.value_heads),
            ("dt_bias", shape.value_heads),
            ("norm.weight", shape.value_dim),
        ):
            self.expected[name] = (size,)
            held = size if name == "norm.weight" else self.heads[1]
            self.holds.append(Weight(name, (held,), "vector", DType.FLOAT32))
        self.kv_spec = KVSpec.state(self.conv.numbers + self.heads[1] * shape.key_dim * shape.value_dim)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``StateLayer``."""
        conv, width, values = self.conv, self.conv.channels, self.heads[1]
        projected, gates = self.projection(x), self.gates(x)
        qkv = self.kernels.causal_conv(projected[:, :width], conv.weight, None, cache, batch, activation="silu")
        z, b, a = projected[:, width:], gates[:, :values], gates[:, values:]
        heads = self.kernels.gated_delta_rule(qkv, z, b, a, self._delta, cache, batch, offset=conv.numbers)
        return self.out.add_to(residual, heads)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        values = np.asarray(tensor, np.float32)
        if shard == "A_log":
            values = -np.exp(values)
        values = values if shard == "norm.weight" else values[self._own]
        self._vectors[shard] = self.kernels.array(np.ascontiguousarray(values), DType.FLOAT32)

    def complete(self) -> None:
        names = ("A_log", "dt_bias", "norm.weight")
        decay, dt_bias, norm = (self._vectors[name] for name in names)
        shape = self._shape
        self._delta = DeltaHeads(*self.heads, shape.key_dim, shape.value_dim, self._eps, decay, dt_bias, norm)


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
