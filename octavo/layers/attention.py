"""Attention with its projections, as decoder-only transformers have it."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.linear import QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryRows


class Attention(Layer):
    """Grouped-query attention over a paged cache; positions are rotary, linear biases, or not its business."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        spec: AttentionSpec,
        rotary: RotaryRows | None = None,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        """Tensors are named q_proj, k_proj, v_proj, o_proj, and q_norm and k_norm if the configuration has ``qk_norm``.

        Args:
            config: sizes, biases, and whether heads of q and k are normalised before the rotation.
            context: as for all layers.
            spec: scale, window and soft cap; the ALiBi slopes are those of all heads of the network.
            rotary: the table of angles; None: queries and keys are not rotated.
            norm: of queries and keys.
        """
        super().__init__()
        heads, head_dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        self.kernels = context.kernels
        self.qkv = self.attach("", self.make_qkv(config, context))
        columns = self.qkv.query_columns
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = self.attach("q_norm", norm(context, head_dim, config.rms_norm_eps))
            self.k_norm = self.attach("k_norm", norm(context, head_dim, config.rms_norm_eps))
        self.head_dim = head_dim
        self.heads, self.kv_heads = self.qkv.heads, self.qkv.kv_heads
        self.kv_spec = KVSpec(
            "full" if spec.window is None else "sliding",
            self.qkv.kv_heads,
            head_dim,
            context.kv_dtype_name,
            spec.window,
        )
        if spec.alibi_slopes is not None:
            own = spec.alibi_slopes[columns.start // head_dim : columns.stop // head_dim]
            spec = replace(spec, alibi_slopes=own)
        if spec.bias is not None:
            spec = replace(spec, bias=spec.bias.of_heads(slice(columns.start // head_dim, columns.stop // head_dim)))
        self.spec = spec
        context.kernels.check_attention(spec)
        self.rotary = rotary

    def make_qkv(self, config: ModelConfig, context: LayerContext) -> QKVParallelLinear:
        """The projections to queries, keys and values."""
        return QKVParallelLinear(
            context, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias
        )

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Attention of x [T, E], float32 [T, E]; writes the tokens' keys and values to the cache."""
        return self.out(self.attend(self.qkv(x), cache, batch))

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + self(x, cache, batch), float32 [T, E]; the residual's memory may be reused."""
        return self.out.add_to(residual, self.attend(self.qkv(x), cache, batch))

    def attend(self, qkv: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """What ``qkv`` [T, all heads] attends to, before the output projection; writes keys and values."""
        tokens, kernels = qkv.shape[0], self.kernels
        heads, queries, keys = qkv.reshape(tokens, -1, self.head_dim), self.heads, self.heads + self.kv_heads
        q, k, v = heads[:, :queries], heads[:, queries:keys], heads[:, keys:]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is None:
            kernels.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        else:
            q = kernels.rotary_and_cache(q, k, v, batch, self.rotary.array, cache, self.rotary.sections)
        return kernels.paged_attention(q, cache, batch, self.spec).reshape(tokens, -1)
