"""Attention with its projections, as decoder-only transformers have it."""

from __future__ import annotations

from torch import Tensor

from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.linear import QKVParallelLinear, RowParallelLinear


class Attention(Layer):
    """Grouped-query attention over a paged cache; positions are rotary, linear biases, or not its business."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        *,
        cos_sin: Tensor | None = None,
        alibi_slopes: tuple[float, ...] | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        """Tensors are named q_proj, k_proj, v_proj and o_proj.

        Args:
            config: sizes and biases.
            context: as for all layers.
            cos_sin: the rotary table, see ``rotary_table``; None: queries and keys are not rotated.
            alibi_slopes: of all heads of the network, see ``AttentionSpec``.
            scale: of the scores; by default head_dim ** -0.5.
            window: see ``AttentionSpec``.
        """
        super().__init__()
        heads, kv_heads, head_dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.kernels = context.kernels
        self.qkv = self.attach("", QKVParallelLinear(context, hidden, heads, kv_heads, head_dim, config.qkv_bias))
        columns = self.qkv.query_columns
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.head_dim = head_dim
        self.heads = [self.qkv.heads, self.qkv.kv_heads, self.qkv.kv_heads]
        self.kv_spec = KVSpec(
            "full" if window is None else "sliding", self.qkv.kv_heads, head_dim, context.kv_dtype_name, window
        )
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes[columns.start // head_dim : columns.stop // head_dim]
        self.spec = AttentionSpec(scale or head_dim**-0.5, window, alibi_slopes=alibi_slopes)
        context.kernels.check_attention(self.spec)
        self.cos_sin = cos_sin

    def add_to(self, residual: Tensor, x: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """residual + attention of x, both [T, E]; writes the tokens' keys and values to the cache."""
        tokens, kernels = x.shape[0], self.kernels
        q, k, v = self.qkv(x).view(tokens, -1, self.head_dim).split(self.heads, dim=1)
        if self.cos_sin is None:
            kernels.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        else:
            q = kernels.rotary_and_cache(q, k, v, batch, self.cos_sin, cache)
        attended = kernels.paged_attention(q, cache, batch, self.spec)
        return self.out.add_to(residual, attended.view(tokens, -1))
