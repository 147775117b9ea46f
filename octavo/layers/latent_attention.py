"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), in its absorbed form.

A token's keys and values of all heads are expanded from one latent vector, which is all that is cached, beside the
dimensions of the key that are rotated, which the heads share. Expanding is linear. So it is not done to the context:
each head's query is multiplied by the matrix of its keys, attends to the latents themselves, as all heads do to one KV
head, and what it gets is multiplied by the matrix of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.core.kv_spec import KVSpec
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import PackedHeads
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight
from octavo.layers.linear import ParallelLinear, Part, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryTable

#: Of the norms of latents, whatever that of the network is.
_EPS = 1e-6
_ALL = slice(None)


@dataclass(frozen=True)
class LatentShape:
    """The dimensions of latent attention, under the names of the paper's symbols."""

    heads: int
    #: Dimensions of the latent that queries are expanded from (d_c'); None: they are projected directly.
    q_rank: int | None
    #: Of the latent of keys and values (d_c).
    kv_rank: int
    #: Of a head's query and key: those without positions (d_h), and those that are rotated (d_h^R).
    nope: int
    rope: int
    #: Of a head's value.
    value: int

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache."""
        return self.kv_rank + self.rope


class LatentAttention(Layer):
    """The attention of a layer; each rank has a share of the heads, and all of the cache."""

    def __init__(
        self, context: LayerContext, hidden: int, shape: LatentShape, scale: float, rotary: RotaryTable
    ) -> None:
        super().__init__()
        own = context.share(shape.heads, "query heads", 1)
        head = shape.nope + shape.rope
        rows, columns = slice(own.start * head, own.stop * head), slice(own.start * shape.value, own.stop * shape.value)
        query = Part("q_proj", shape.heads * head, rows, _ALL)
        self.q_norm = self.q_up = None
        if shape.q_rank is not None:
            self.q_norm = self.attach("q_a_layernorm", RMSNorm(context, shape.q_rank, _EPS))
            up = Part("", shape.heads * head, rows, _ALL)
            self.q_up = self.attach("q_b_proj", ParallelLinear(context, [up], shape.q_rank, shape.q_rank, False))
            query = Part("q_a_proj", shape.q_rank, slice(0, shape.q_rank), _ALL)
        self.down = self.attach("", _DownProjection(context, query, shape, hidden))
        self.kv_norm = self.attach("kv_a_layernorm", RMSNorm(context, shape.kv_rank, _EPS))
        self.kv_up = self.attach("kv_b_proj", _UpProjection(context, shape, own))
        out = RowParallelLinear(context, shape.heads * shape.value, hidden, False, columns)
        self.out = self.attach("o_proj", out)
        self.kernels, self.rotary, self._head = context.kernels, rotary, head
        #: Columns of the first product: the queries', then the latent's, then the rotated key's.
        self._latent, self._rope = query.size, query.size + shape.kv_rank
        self.kv_spec = KVSpec("latent", 1, shape.cached, context.kv_dtype_name)
        self.spec = AttentionSpec(scale, value_dim=shape.kv_rank)
        context.kernels.check_attention(self.spec)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + attention of x, both [T, E]; writes the tokens' latents and rotated keys to the cache."""
        tokens, kernels = x.shape[0], self.kernels
        down = self.down(x)
        q, latent, k_rope = down[:, : self._latent], down[:, self._latent : self._rope], down[:, self._rope :]
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = kernels.latent_rotary_and_cache(
            q.reshape(tokens, -1, self._head),
            self.kv_norm(latent),
            k_rope,
            self.kv_up.keys,
            batch,
            self.rotary.array,
            cache,
        )
        attended = kernels.paged_attention(q, cache, batch, self.spec)
        return self.out.add_to(residual, self.kv_up.values(attended).reshape(tokens, -1))


class _DownProjection(ParallelLinear):
    """Queries, or the latent that they are expanded from, and the latent and rotated key, in one product."""

    prefix = "q_kv_a_proj."

    def __init__(self, context: LayerContext, query: Part, shape: LatentShape, hidden: int) -> None:
        kv = Part("kv_a_proj_with_mqa", shape.cached, slice(0, shape.cached), _ALL)
        super().__init__(context, [query, kv], hidden, hidden, False)


class _UpProjection(Layer):
    """The matrices that would expand latents to the heads' keys and values; never quantised."""

    def __init__(self, context: LayerContext, shape: LatentShape, own: slice) -> None:
        super().__init__()
        #: To multiply queries by, [heads, kv_rank, nope], and what they attend to, [heads, value, kv_rank].
        self.keys: PackedHeads
        self.values: PackedHeads
        self._context, self._own, self._nope, self._value = context, own, shape.nope, shape.value
        head = shape.nope + shape.value
        self.expected["weight"] = (shape.heads * head, shape.kv_rank)
        self.holds.append(Weight("weight", ((own.stop - own.start) * head, shape.kv_rank), "linear", context.dtype))

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Packs the matrices of this rank's heads."""
        rows = tensor.dequantize() if isinstance(tensor, QuantizedRows) else tensor
        heads = rows.reshape(-1, self._nope + self._value, rows.shape[1])[self._own]
        kernels, dtype = self._context.kernels, self._context.dtype
        self.keys = kernels.pack_heads(heads[:, : self._nope].transpose(0, 2, 1), dtype)
        self.values = kernels.pack_heads(heads[:, self._nope :], dtype)
