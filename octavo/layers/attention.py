"""Attention with its projections: of decoders and encoders, cross attention, and multi-head latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import (
    Array,
    AttentionSpec,
    AttentionTemperature,
    LayerCache,
    PackedHeads,
    PositionBias,
)
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, LayerNorm, RMSNorm, Weight
from octavo.layers.linear import ParallelLinear, Part, QKVParallelLinear, RowParallelLinear, share_heads
from octavo.layers.rope import RotaryRows, RotaryTable


class Attention(Layer):
    """Grouped-query attention over a paged cache, with rotary positions, linear biases, or neither."""

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        spec: AttentionSpec,
        rotary: RotaryRows | None = None,
        norm: type[RMSNorm] = RMSNorm,
        *,
        whole_qk: bool = False,
        temperature: AttentionTemperature | None = None,
    ) -> None:
        """Tensors are named q_proj, k_proj, v_proj, o_proj, and q_norm and k_norm if the configuration has ``qk_norm``.

        Args:
            spec: ALiBi slopes and position bias are those of all heads of the network.
            rotary: the table of angles; None: queries and keys are not rotated.
            norm: of each head of queries and keys; ``set_norms`` sets others.
            whole_qk: whether the norms of queries and keys are over all heads.
            temperature: of queries, after the rotation.
        """
        super().__init__()
        #: Magnitude to which queries, keys and values are clamped before the rotation; None: they are not.
        self.clip: float | None = None
        self._whole_qk, self._temperature, self._norms_last = whole_qk, temperature, False
        heads, head_dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        self.kernels = context.kernels
        self.qkv = self.attach("", self.make_qkv(config, context))
        columns = self.qkv.query_columns
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.q_norm: RMSNorm | LayerNorm | None = None
        self.k_norm: RMSNorm | LayerNorm | None = None
        if config.qk_norm:
            self.set_norms(*(norm(context, head_dim, config.rms_norm_eps) for _ in range(2)))
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
        return QKVParallelLinear(
            context,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            whole_qk=self._whole_qk,
        )

    def set_norms(self, q_norm: RMSNorm | LayerNorm, k_norm: RMSNorm | LayerNorm, *, last: bool = False) -> None:
        """Sets the norms of queries and keys [T, heads, D], before the rotation, or after it if ``last``."""
        self.q_norm, self.k_norm = self.attach("q_norm", q_norm), self.attach("k_norm", k_norm)
        self._norms_last = last

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Attention of x [T, E], float32 [T, E]; writes the tokens' keys and values to the cache."""
        return self.out(self.attend(self.qkv(x), cache, batch))

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + self(x, cache, batch), float32 [T, E]; the residual's memory may be reused."""
        return self.out.add_to(residual, self.attend(self.qkv(x), cache, batch))

    def attend(self, qkv: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The attention of ``qkv`` [T, all heads] before the output projection; writes keys and values."""
        tokens, kernels, linear = qkv.shape[0], self.kernels, self.qkv
        heads, values = qkv.reshape(tokens, -1, self.head_dim), self.kv_heads
        keys = heads.shape[1] - values
        queries = linear.num_queries
        q, k, v = heads[:, :queries], heads[:, queries:keys], heads[:, keys:]
        if self.q_norm is not None and self.k_norm is not None and not self._norms_last:
            q, k = self.q_norm(q), self.k_norm(k)
        if queries != self.heads:
            q, k = q[:, linear.own], k[:, linear.own_kv]
        if self.clip is not None:
            for x in (q, k, v):
                kernels.clamp(x.reshape(tokens, -1), self.clip)
        if self.rotary is None:
            kernels.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        elif self.q_norm is not None and self.k_norm is not None and self._norms_last:
            q, k = kernels.rotary(q, k, batch.positions, self.rotary.array)
            q, k = self.q_norm(q), self.k_norm(k)
            kernels.reshape_and_cache(k, v, cache, batch.slot_mapping[cache.group])
        else:
            q = kernels.rotary_and_cache(q, k, v, batch, self.rotary.array, cache, self.rotary.sections)
        if self._temperature is not None:
            q = kernels.scale_queries(q, batch.positions, self._temperature)
        return kernels.paged_attention(q, cache, batch, self.spec).reshape(tokens, -1)


class ProjectionNorm(RMSNorm):
    """RMS norm over all heads together, [T, heads, D]; for attention with ``whole_qk``."""

    def __call__(self, x: Array) -> Array:
        return super().__call__(x.reshape(len(x), -1)).reshape(*x.shape)


class HeadLayerNorm(LayerNorm):
    """Layer norm of each head, with a weight of its own [heads, D] and no bias; a rank has its heads."""

    def __init__(self, context: LayerContext, heads: int, own: slice, head_dim: int, eps: float) -> None:
        super().__init__(context, head_dim, eps, bias=False)
        self._own = own
        self.expected["weight"] = (heads, head_dim)
        self.holds[0] = self.holds[0]._replace(shape=(own.stop - own.start, head_dim))

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Copies this rank's heads."""
        super().place(shard, tensor[self._own])


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """A slope for each query head (Press et al. 2021, section 3).

    For n heads, n a power of two, the slopes are 2^(-8 i / n), i = 1 to n. Otherwise they are those of the greatest
    power of two below n, and then every other one of twice as many heads, as in the authors' code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return tuple(slopes)


class RelativeBias(Layer):
    """Relative position bias: a table [buckets, heads] of the checkpoint, spread over the distances of query and key.

    Layers may share it. Half of the buckets are for keys before the query, half for those after it; if ``causal``, all
    are for keys before it. Half of the buckets of one side have one distance each, the others grow by the logarithm up
    to ``longest``, and the last one has all greater distances (Raffel et al. 2020, section 2.1).
    """

    def __init__(
        self, context: LayerContext, heads: int, buckets: int, longest: int = 128, *, causal: bool = False
    ) -> None:
        super().__init__()
        sides = 1 if causal else 2
        exact = buckets // sides // 2
        if exact == 0 or longest <= exact:
            raise ConfigError(
                f"{buckets} buckets of relative positions up to {longest} are not possible: there must be at least "
                f"{2 * sides} buckets, and distances of more than {exact}"
            )
        self.expected["weight"] = (buckets, heads)
        self.holds.append(Weight("weight", (buckets, heads), "vector", DType.FLOAT32))
        self.bias = PositionBias.zeros(heads, longest)
        self._buckets, self._longest, self._causal = buckets, longest, causal

    def place(self, shard: str, tensor: np.ndarray) -> None:
        reach = self.bias.reach
        index = buckets_of(np.arange(-reach, reach + 1), self._buckets, self._longest, causal=self._causal)
        self.bias.values[:] = tensor.astype(np.float32)[index].T


def buckets_of(distance: np.ndarray, buckets: int, longest: int, *, causal: bool = False) -> np.ndarray:
    """The bucket of each distance, position of the key - position of the query; int64. See ``RelativeBias``."""
    half = buckets if causal else buckets // 2
    exact, size = half // 2, np.maximum(-distance, 0) if causal else np.abs(distance)
    # In float32, as models were trained with it: the logarithm decides where buckets begin.
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(longest / exact))
    large = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    after = 0 if causal else np.where(distance > 0, half, 0)
    return after + np.where(size < exact, size, large)


# Attention of a decoder's tokens over the output of an encoder (Vaswani et al. 2017, section 3.2.3).


@dataclass(frozen=True)
class CrossQueries:
    """Queries of a layer's cross attention."""

    #: [T, H, D] of this rank's heads.
    values: Array
    #: This rank's heads among ``num_heads``.
    heads: slice
    num_heads: int
    spec: AttentionSpec


class CrossAttention(Layer):
    """Queries of the decoder's tokens, keys and values of the encoder's output.

    The keys and values are in the cache of the layer's self-attention, and have its shape, in blocks of their own:
    ``write`` puts them there once, and every later step reads them over the batch's cross tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        scale: float | None = None,
        *,
        width: int | None = None,
        of_segment: bool = False,
    ) -> None:
        """Tensors are named q_proj, k_proj, v_proj and o_proj.

        Args:
            config: of the decoder.
            scale: of the scores, by default ``head_dim ** -0.5``.
            width: of the encoder's output, by default that of the decoder.
            of_segment: whether keys and values are those of the queries' sequence, in its own blocks.
        """
        super().__init__()
        heads, kv_heads, head_dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        context = replace(context, max_loras=0)
        own, own_kv = share_heads(context, heads, kv_heads)
        columns = slice(own.start * head_dim, own.stop * head_dim)
        rows = slice(own_kv.start * head_dim, own_kv.stop * head_dim)
        self.kernels, self.head_dim = context.kernels, head_dim
        query = Part("", heads * head_dim, columns)
        self.query = self.attach("q_proj", ParallelLinear(context, [query], hidden, config.qkv_bias))
        kv = [Part(name, kv_heads * head_dim, rows) for name in ("k_proj", "v_proj")]
        linear = ParallelLinear(context, kv, width or hidden, config.qkv_bias, prefix="kv_proj.")
        self.kv = self.attach("", linear)
        self.kv_heads = own_kv.stop - own_kv.start
        self._own, self._num_heads = own, heads
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.spec = AttentionSpec(head_dim**-0.5 if scale is None else scale, causal=False, cross=not of_segment)
        context.kernels.check_attention(self.spec)

    def write(self, states: Array, cache: LayerCache, batch: ForwardBatch) -> None:
        """Writes keys and values of the encoder's output [T, E], whose batch this is, to the slots of the cache."""
        heads = self.kv(states).reshape(states.shape[0], -1, self.head_dim)
        keys, values = heads[:, : self.kv_heads], heads[:, self.kv_heads :]
        self.kernels.reshape_and_cache(keys, values, cache, batch.slot_mapping[cache.group])

    def queries(self, x: Array) -> CrossQueries:
        values = self.query(x).reshape(x.shape[0], -1, self.head_dim)
        return CrossQueries(values, self._own, self._num_heads, self.spec)

    def add_to(self, residual: Array, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """residual + the attention of x [T, E], float32 [T, E]; the residual's memory may be reused."""
        attended = self.kernels.paged_attention(self.queries(x).values, cache, batch, self.spec)
        return self.out.add_to(residual, attended.reshape(x.shape[0], -1))


# Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1.2) with absorbed matrices.

#: Of the norms of latents, whatever the network's eps is.
_EPS = 1e-6


@dataclass(frozen=True)
class LatentShape:
    """The dimensions of latent attention, under the names of the paper's symbols."""

    heads: int
    #: Dimensions of the queries' latent (d_c'); None: queries are projected directly.
    q_rank: int | None
    #: Dimensions of the latent of keys and values (d_c).
    kv_rank: int
    #: Dimensions of a head's query and key without positions (d_h), and rotated ones (d_h^R).
    nope: int
    rope: int
    #: Dimensions of a head's value.
    value: int

    @property
    def cached(self) -> int:
        return self.kv_rank + self.rope


class LatentAttention(Layer):
    """Multi-head latent attention; each rank has a share of the heads, and all of the cache."""

    def __init__(
        self, context: LayerContext, hidden: int, shape: LatentShape, scale: float, rotary: RotaryTable
    ) -> None:
        super().__init__()
        own = context.share(shape.heads, "query heads", 1)
        head = shape.nope + shape.rope
        rows, columns = slice(own.start * head, own.stop * head), slice(own.start * shape.value, own.stop * shape.value)
        query = Part("q_proj", shape.heads * head, rows)
        self.q_norm = self.q_up = None
        if shape.q_rank is not None:
            self.q_norm = self.attach("q_a_layernorm", RMSNorm(context, shape.q_rank, _EPS))
            up = Part("", shape.heads * head, rows)
            self.q_up = self.attach("q_b_proj", ParallelLinear(context, [up], shape.q_rank, False))
            query = Part("q_a_proj", shape.q_rank, slice(0, shape.q_rank))
        kv = Part("kv_a_proj_with_mqa", shape.cached, slice(0, shape.cached))
        self.down = self.attach("", ParallelLinear(context, [query, kv], hidden, False, prefix="q_kv_a_proj."))
        self.kv_norm = self.attach("kv_a_layernorm", RMSNorm(context, shape.kv_rank, _EPS))
        self.kv_up = self.attach("kv_b_proj", _UpProjection(context, shape, own))
        out = RowParallelLinear(context, shape.heads * shape.value, hidden, False, columns)
        self.out = self.attach("o_proj", out)
        self.kernels, self.rotary, self._head = context.kernels, rotary, head
        #: First columns of the latent and of the rotated key in the first product, after the queries.
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


class _UpProjection(Layer):
    """The matrices that would expand latents to the heads' keys and values; never quantised."""

    def __init__(self, context: LayerContext, shape: LatentShape, own: slice) -> None:
        super().__init__()
        #: Factors of the queries, [heads, kv_rank, nope], and of the attended latents, [heads, value, kv_rank].
        self.keys: PackedHeads
        self.values: PackedHeads
        self._context, self._own, self._nope, self._value = context, own, shape.nope, shape.value
        head = shape.nope + shape.value
        self.expected["weight"] = (shape.heads * head, shape.kv_rank)
        self.holds.append(Weight("weight", ((own.stop - own.start) * head, shape.kv_rank), "linear", context.dtype))

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        rows = to_values(tensor)
        heads = rows.reshape(-1, self._nope + self._value, rows.shape[1])[self._own]
        kernels, dtype = self._context.kernels, self._context.dtype
        self.keys = kernels.pack_heads(heads[:, : self._nope].transpose(0, 2, 1), dtype)
        self.values = kernels.pack_heads(heads[:, self._nope :], dtype)
