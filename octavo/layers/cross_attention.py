"""Attention of a decoder's tokens over the output of an encoder (Vaswani et al. 2017, section 3.2.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.linear import ParallelLinear, Part, RowParallelLinear, share_heads


class QueryParallelLinear(ParallelLinear):
    """The query projection alone: this rank's heads."""

    def __init__(self, context: LayerContext, hidden: int, outputs: int, rows: slice, bias: bool) -> None:
        super().__init__(context, [Part("", outputs, rows, slice(None))], hidden, hidden, bias)


class KVParallelLinear(ParallelLinear):
    """Key and value projections in one product: this rank's KV heads."""

    prefix = "kv_proj."

    def __init__(self, context: LayerContext, inputs: int, outputs: int, rows: slice, bias: bool) -> None:
        parts = [Part(name, outputs, rows, slice(None)) for name in ("k_proj", "v_proj")]
        super().__init__(context, parts, inputs, inputs, bias)


@dataclass(frozen=True)
class CrossQueries:
    """Queries of a layer's cross attention."""

    #: [T, H, D] of this rank's heads.
    values: Array
    #: Which those are of all.
    heads: slice
    num_heads: int
    spec: AttentionSpec


class CrossAttention(Layer):
    """Queries of the decoder's tokens, keys and values of the encoder's output.

    The keys and values lie in the cache of the layer's self-attention, in blocks of their own: ``write`` puts them
    there once, and every later step reads them over the batch's cross tables. So they have the shape of the decoder's.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        scale: float | None = None,
        *,
        width: int | None = None,
    ) -> None:
        """Tensors are named q_proj, k_proj, v_proj and o_proj.

        Args:
            config: heads and biases of the decoder.
            context: as for all layers.
            scale: of the scores; None: that of the head size.
            width: of the encoder's output; None: that of the decoder.
        """
        super().__init__()
        heads, kv_heads, head_dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        context = replace(context, max_loras=0)
        own, own_kv = share_heads(context, heads, kv_heads)
        columns = slice(own.start * head_dim, own.stop * head_dim)
        rows = slice(own_kv.start * head_dim, own_kv.stop * head_dim)
        self.kernels, self.head_dim = context.kernels, head_dim
        query = QueryParallelLinear(context, hidden, heads * head_dim, columns, config.qkv_bias)
        self.query = self.attach("q_proj", query)
        kv = KVParallelLinear(context, width or hidden, kv_heads * head_dim, rows, config.qkv_bias)
        self.kv = self.attach("", kv)
        self.kv_heads = own_kv.stop - own_kv.start
        self._own, self._num_heads = own, heads
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.spec = AttentionSpec(head_dim**-0.5 if scale is None else scale, causal=False, cross=True)
        context.kernels.check_attention(self.spec)

    def write(self, states: Array, cache: LayerCache, batch: ForwardBatch) -> None:
        """Writes keys and values of the encoder's output [T, E], whose batch this is, to the slots of the cache."""
        heads = self.kv(states).reshape(states.shape[0], -1, self.head_dim)
        keys, values = heads[:, : self.kv_heads], heads[:, self.kv_heads :]
        self.kernels.reshape_and_cache(keys, values, cache, batch.slot_mapping[cache.group])

    def queries(self, x: Array) -> CrossQueries:
        """The queries of x [T, E]."""
        values = self.query(x).reshape(x.shape[0], -1, self.head_dim)
        return CrossQueries(values, self._own, self._num_heads, self.spec)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + the attention of x [T, E], float32 [T, E]; the residual's memory may be reused."""
        attended = self.kernels.paged_attention(self.queries(x).values, cache, batch, self.spec)
        return self.out.add_to(residual, attended.reshape(x.shape[0], -1))
