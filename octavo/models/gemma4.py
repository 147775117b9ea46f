"""Gemma 4: E2B and E4B with per-layer embeddings and shared KV, dense models, and a mixture beside its dense part.

Layers with a window alternate with global ones, which have heads of another size, rotate a part of each, and may take
their keys as values. Queries, keys and values are normalised by head, so scores have no factor. The last layers of the
small models have queries only: they read the cache of the last layer of their kind before them. Each of their layers
also gets a small embedding of the token, from one table whose rows have a part for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache, RoutingSpec
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, PlainRMSNorm, RMSNorm, Weight
from octavo.layers.linear import ParallelLinear, Part, RowParallelLinear, share_heads
from octavo.layers.mlp import GatedMLP, SparseMoE
from octavo.layers.rope import RotaryTable
from octavo.layers.vocabulary import MappedEmbedding
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Unstack
from octavo.models.config_files import ConfigReader, read_rope, read_windows, shape_fields
from octavo.models.decoder import Decoder, ResidualLayer, refuse_stages
from octavo.models.network import ResidualReader


@dataclass(frozen=True)
class Gemma4Experts:
    count: int
    chosen: int
    #: Inner size of an expert.
    inner: int


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """``rope`` is that of global layers; ``head_dim`` and ``num_kv_heads`` are those of layers with a window."""

    local_rope: RopeConfig = field(default_factory=RopeConfig)
    global_head_dim: int
    global_kv_heads: int
    #: Whether the values of global layers are their keys, before norm and rotation.
    keys_as_values: bool = False
    #: Number of the last layers that read the cache of another layer.
    shared_layers: int = 0
    #: Whether their MLPs are twice as wide.
    wide_shared: bool = False
    #: Size and rows of the per-layer embeddings; 0: there are none. The row ``pad_id`` is that of virtual tokens.
    per_layer_size: int = 0
    per_layer_rows: int = 0
    pad_id: int = 0
    experts: Gemma4Experts | None = None
    #: Cap of logits: ``cap * tanh(x / cap)``.
    logit_cap: float | None = None

    def kv_owner(self, layer: int) -> int | None:
        """The layer whose cache a layer reads: the last one of its kind that has its own. None: it has its own."""
        own = self.num_layers - self.shared_layers
        if layer < own:
            return None
        kind = self.sliding_windows[layer]
        return max(other for other in range(own) if self.sliding_windows[other] == kind)

    def of_layer(self, layer: int) -> Gemma4Config:
        """With the sizes and the rotation of one layer."""
        if self.sliding_windows[layer] is not None:
            return replace(self, rope=self.local_rope)
        return replace(self, head_dim=self.global_head_dim, num_kv_heads=self.global_kv_heads)

    @property
    def attention_width(self) -> int:
        return max(super().attention_width, 2 * (self.num_heads + self.global_kv_heads) * self.global_head_dim)

    @property
    def feed_forward_width(self) -> int:
        experts, wide = self.experts, 1 + self.wide_shared
        chosen = 0 if experts is None else experts.chosen * (self.hidden_size + 3 * experts.inner)
        # The inputs of all layers are kept through the step, and made of two such arrays.
        return 3 * wide * self.intermediate_size + chosen + 2 * self.num_layers * self.per_layer_size


class Gemma4Attention(Layer):
    """Attention with norms of queries, keys and values; with a ``kv_owner`` it has queries alone."""

    def __init__(
        self,
        config: Gemma4Config,
        context: LayerContext,
        spec: AttentionSpec,
        rotary: RotaryTable,
        *,
        reads_other: bool,
    ) -> None:
        """``config``: that of the layer. Tensors are named as in ``Attention``."""
        super().__init__()
        heads, kv_heads, head_dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.kernels, self.spec, self.rotary, self.head_dim = context.kernels, spec, rotary, head_dim
        own, own_kv = share_heads(context, heads, kv_heads)
        self.heads, self.kv_heads = own.stop - own.start, own_kv.stop - own_kv.start
        columns = slice(own.start * head_dim, own.stop * head_dim)
        kv_rows = slice(own_kv.start * head_dim, own_kv.stop * head_dim)
        self._keys_as_values = config.keys_as_values and spec.window is None
        names = () if reads_other else ("k_proj",) if self._keys_as_values else ("k_proj", "v_proj")
        parts = [Part("q_proj", heads * head_dim, columns)]
        parts += [Part(name, kv_heads * head_dim, kv_rows) for name in names]
        self.qkv = self.attach("", ParallelLinear(context, parts, hidden, config.qkv_bias, prefix="qkv_proj."))
        self.out = self.attach("o_proj", RowParallelLinear(context, heads * head_dim, hidden, config.o_bias, columns))
        self.q_norm = self.attach("q_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
        self.k_norm: RMSNorm | None = None
        if not reads_other:
            self.k_norm = self.attach("k_norm", RMSNorm(context, head_dim, config.rms_norm_eps))
            self.v_norm = PlainRMSNorm(context, head_dim, config.rms_norm_eps)
        self.kv_spec = KVSpec(
            "full" if spec.window is None else "sliding",
            self.kv_heads,
            head_dim,
            context.kv_dtype_name,
            spec.window,
        )
        context.kernels.check_attention(spec)

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Attention of x [T, E], float32 [T, E]; writes the tokens' keys and values unless the cache is another's."""
        tokens, kernels, keys = x.shape[0], self.kernels, self.heads + self.kv_heads
        heads = self.qkv(x).reshape(tokens, -1, self.head_dim)
        q = self.q_norm(heads[:, : self.heads])
        if self.k_norm is None:
            # Keys of no heads: queries are rotated alone.
            q, _ = kernels.rotary(q, q[:, :0], batch.positions, self.rotary.array)
        else:
            k = heads[:, self.heads : keys]
            v = self.v_norm(k if self._keys_as_values else heads[:, keys:])
            q = kernels.rotary_and_cache(q, self.k_norm(k), v, batch, self.rotary.array, cache)
        return self.out(kernels.paged_attention(q, cache, batch, self.spec).reshape(tokens, -1))


class RoutedExperts(SparseMoE):
    """Experts beside the dense MLP: they and their router read the residual stream through norms of their own.

    Tensors ``gate.scale`` [E] and ``gate.per_expert_scale`` [experts] are factors of the router's input and of the
    chosen experts' weights.
    """

    def __init__(self, config: Gemma4Config, context: LayerContext) -> None:
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        routing = RoutingSpec(experts.chosen, renormalize=True)
        super().__init__(context, hidden, experts.inner, experts.count, routing, activation="gelu_tanh")
        self.norm = self.attach("pre_feedforward_layernorm_2", RMSNorm(context, hidden, config.rms_norm_eps))
        self._eps, self._dtype = config.rms_norm_eps, context.dtype
        self._factors: dict[str, Array] = {}
        for name, size in (("gate.scale", hidden), ("gate.per_expert_scale", experts.count)):
            self.expected[name] = (size,)
            self.holds.append(Weight(name, (size,), "vector", DType.FLOAT32))

    def __call__(self, residual: Array) -> Array:
        """The weighted sum of the experts' results for the stream float32 [T, E]."""
        kernels = self.kernels
        x = kernels.rms_norm(residual, self._factors["gate.scale"], self._eps, out_dtype=self._dtype)
        logits = self._router(x, DType.FLOAT32)
        experts, weights = kernels.route(logits, self._routing, factors=self._factors["gate.per_expert_scale"])
        return self._sum(self.norm(residual), experts, weights, None)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        if shard not in ("gate.scale", "gate.per_expert_scale"):
            super().place(shard, tensor)
            return
        values = to_values(tensor).astype(np.float32)
        if shard == "gate.scale":  # the norm's weight, with the factor of the router's input
            values *= np.float32(len(values) ** -0.5)
        self._factors[shard] = self.kernels.array(values, DType.FLOAT32)


def _whole(context: LayerContext, inputs: int, outputs: int) -> ParallelLinear:
    """A matrix that every rank has."""
    return ParallelLinear(context, [Part("", outputs, slice(0, outputs))], inputs, False)


class PerLayerInputs(Layer):
    """The per-layer embeddings of a step: of each token by a table, and of the embedding by a matrix."""

    def __init__(self, config: Gemma4Config, context: LayerContext) -> None:
        super().__init__()
        size, layers, hidden = config.per_layer_size, config.num_layers, config.hidden_size
        self.kernels, self.size, self._layers = context.kernels, size, layers
        table = MappedEmbedding(context, config.per_layer_rows, layers * size, scale=size**0.5, otherwise=config.pad_id)
        self.table = self.attach("embed_tokens_per_layer", table)
        self.projection = self.attach("per_layer_model_projection", _whole(context, hidden, layers * size))
        # The product is divided by the root of its inputs, which the norm undoes but for eps.
        self.norm = self.attach("per_layer_projection_norm", RMSNorm(context, size, config.rms_norm_eps * hidden))

    def __call__(self, residual: Array, ids: Array) -> Array:
        """Of embeddings float32 [T, E] and their ids int64 [T]: float32 [T, layers * size]."""
        shape = residual.shape[0], self._layers, self.size
        projected = self.projection.packed(residual, DType.FLOAT32, self.projection.with_adapters(residual))
        inputs = self.norm.add_to(self.table(ids).reshape(*shape), projected.reshape(*shape))
        return self.kernels.scale(inputs.reshape(shape[0], -1), 2.0**-0.5)


class Gemma4Layer(ResidualLayer):
    """Norms before and after attention and MLP, then the per-layer input, and a factor of all of it."""

    def __init__(self, index: int, config: Gemma4Config, context: LayerContext, rotary: RotaryTable) -> None:
        super().__init__()
        own, hidden, eps = config.of_layer(index), config.hidden_size, config.rms_norm_eps
        self.kernels, self._dtype = context.kernels, context.dtype
        self.kv_owner = config.kv_owner(index)
        window = config.sliding_windows[index]
        # Tokens of an image see each other in both directions, within a window.
        sees_spans = window is not None and config.image_facts is not None and config.image_facts.is_whole
        spec = AttentionSpec(1.0, window, sees_spans=sees_spans)
        is_shared = self.kv_owner is not None

        def norm(name: str) -> RMSNorm:
            return self.attach(name, RMSNorm(context, hidden, eps))

        self.attention_norm = norm("input_layernorm")
        self.attention = self.attach("self_attn", Gemma4Attention(own, context, spec, rotary, reads_other=is_shared))
        self.attention_post_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        inner = config.intermediate_size * (2 if config.wide_shared and is_shared else 1)
        self.mlp = self.attach("mlp", GatedMLP(context, hidden, inner, False, "gelu_tanh"))
        self.mlp_post_norm = norm("post_feedforward_layernorm")
        self.experts: RoutedExperts | None = None
        if config.experts is not None:
            self.experts = self.attach("", RoutedExperts(config, context))
            self.dense_post_norm = norm("post_feedforward_layernorm_1")
            self.experts_post_norm = norm("post_feedforward_layernorm_2")
        if size := config.per_layer_size:
            self.input_gate = self.attach("per_layer_input_gate", _whole(context, hidden, size))
            self.input_projection = self.attach("per_layer_projection", _whole(context, size, hidden))
            self.input_norm = norm("post_per_layer_input_norm")
        self._scalar = 1.0
        self.expected["layer_scalar"] = (1,)
        self.holds.append(Weight("layer_scalar", (1,), "vector", DType.FLOAT32))

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [self.attention.kv_spec] if self.kv_owner is None else []

    def forward(
        self, residual: Array, caches: Iterator[LayerCache], batch: ForwardBatch, per_layer: Array | None = None
    ) -> Array:
        """See ``ResidualLayer``; ``per_layer``: the layer's part of ``PerLayerInputs``, float32 [T, size]."""
        attended = self.attention(self.attention_norm(residual), next(caches), batch)
        residual = self.attention_post_norm.add_to(residual, attended)
        result = self.mlp(self.mlp_norm(residual))
        if self.experts is not None:
            dense = self.dense_post_norm.float32(result)
            result = self.experts_post_norm.add_to(dense, self.experts(residual))
        residual = self.mlp_post_norm.add_to(residual, result)
        if per_layer is not None:
            gate, projection = self.input_gate, self.input_projection
            x = gate.packed(residual, self._dtype, gate.with_adapters(residual), "gelu_tanh")
            x = self.kernels.multiply(x, per_layer)
            x = projection.packed(x, DType.FLOAT32, projection.with_adapters(x))
            residual = self.input_norm.add_to(residual, x)
        return residual if self._scalar == 1.0 else self.kernels.scale(residual, self._scalar)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        self._scalar = float(to_values(tensor).astype(np.float32).item())


class Gemma4ForCausalLM(Decoder):
    """The language model; of checkpoints that also see and hear, the tensors of their towers are left out."""

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^(model\.)?(vision_tower|embed_vision|vision_embedder|audio_tower|embed_audio)\."),
        Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
        Rename(r"^((embed_tokens_)?per_layer(_\w+)?)\.", r"model.\1."),
        Drop(r"^(model\.)?lm_head\.weight$"),
        Rename(r"\.router\.proj\.", ".gate."),
        Rename(r"\.router\.", ".gate."),
        Unstack("gate_up_proj", ("gate_proj", "up_proj")),
        Unstack("down_proj", ("down_proj",)),
    )

    def __init__(self, config: Gemma4Config, context: LayerContext) -> None:
        if config.per_layer_size or config.shared_layers:
            # The embedding is read by all layers, and caches by later ones.
            refuse_stages(config, context)
        super().__init__(config, context)
        self.logit_cap = config.logit_cap
        if self.is_first:
            # As it was trained: the factor is rounded to the type of the embeddings.
            self.embed_tokens.scale = float(np.array(config.hidden_size**0.5).astype(context.dtype.numpy))
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer_size:
            self.per_layer = self.attach("model", PerLayerInputs(config, context))
        if config.shared_layers:
            # Checkpoints may have keys and values of layers that do not use them.
            own = config.num_layers - config.shared_layers
            shared = "|".join(str(layer) for layer in range(own, config.num_layers))
            unused = Drop(rf"\.layers\.({shared})\.self_attn\.[kv]_(proj|norm)\.")
            self.checkpoint_map = (*self.checkpoint_map, unused)
            self.query_only_from = own

    def make_layer(self, index: int, config: Gemma4Config, context: LayerContext) -> Gemma4Layer:
        return Gemma4Layer(index, config, context, self.rotary_table(config.of_layer(index), context))

    def make_final_norm(self, config: Gemma4Config, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        inputs, part = None, None
        if self.per_layer is not None:
            inputs, size = self.per_layer(residual, batch.token_ids), self.per_layer.size
        caches = iter([kv_caches[cache] for cache in self.cache_of_layer.values()])
        for index, layer in zip(self._stage, self.layers, strict=True):
            assert isinstance(layer, Gemma4Layer)
            if index == self.query_only_from and (sampled_only := batch.sampled_only) is not None:
                residual = self.kernels.take_sampled(residual, batch)
                if inputs is not None:
                    inputs = self.kernels.take_sampled(inputs, batch)
                batch = sampled_only
                self.kernels.adapters.begin(batch)
            if reader is not None:
                reader.read(index, residual)
            if inputs is not None:
                part = inputs[:, index * size : (index + 1) * size]
            residual = layer.forward(residual, caches, batch, part)
        if reader is not None:
            reader.read(self._stage.stop, residual)
        return self.norm(residual) if self.is_last and self.norm is not None else residual

    def logits(self, hidden: Array) -> Array:
        logits = super().logits(hidden)
        return logits if self.logit_cap is None else self.kernels.soft_cap(logits, self.logit_cap)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        return read_gemma4_text(architecture, reader)


#: Defaults of transformers, which config.json may leave out.
_DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
    **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2},
    **{"sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    **{"global_head_dim": 512, "pad_token_id": 0},
}
#: Of the unified models, which have neither per-layer embeddings nor experts.
_UNIFIED: dict[str, Any] = {
    **{"sliding_window": 1024, "max_position_embeddings": 262144, "use_bidirectional_attention": "vision"},
    **{"hidden_size_per_layer_input": 0},
}
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
#: Values with a default that may be null, which says that there is none.
_NULLABLE = ("hidden_size_per_layer_input", "use_bidirectional_attention")
#: Every which layer is global, if the file does not name them.
_PATTERN = 6


def read_gemma4_text(architecture: str, reader: ConfigReader) -> Gemma4Config:
    """The language model of a config.json, which may have it in ``text_config``."""
    raw = reader.raw | reader.table("text_config")
    defaults = _DEFAULTS | (_UNIFIED if architecture.startswith("Gemma4Unified") else {})
    present = {name: value for name, value in raw.items() if value is not None or name in _NULLABLE}
    reader = replace(reader, raw=defaults | present)
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    reader.only("use_bidirectional_attention", None, "vision", False)
    fields = shape_fields(reader)
    layers, shared = fields["num_layers"], _count(reader, "num_kv_shared_layers")
    windows = _windows(reader, layers)
    if shared and (shared >= layers or not {*windows[layers - shared :]} <= {*windows[: layers - shared]}):
        raise ConfigError(
            f"{reader.file}: num_kv_shared_layers ({shared}) leaves no layer whose keys and values the last ones could "
            f"share: before them there must be a layer of each of their kinds"
        )
    heads = _global_heads(reader, windows)
    if fields["num_heads"] % heads["global_kv_heads"]:
        raise ConfigError(
            f"{reader.file}: num_attention_heads ({fields['num_heads']}) must be a multiple of "
            f"num_global_key_value_heads ({heads['global_kv_heads']})"
        )
    full, sliding = (_rope(reader, kind) for kind in ("full_attention", "sliding_attention"))
    per_layer = _count(reader, "hidden_size_per_layer_input")
    return Gemma4Config(
        architecture=architecture,
        max_position=reader.positive("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        qkv_bias=reader.flag("attention_bias"),
        o_bias=reader.flag("attention_bias"),
        rope=full,
        local_rope=sliding,
        sliding_windows=windows,
        keys_as_values=reader.flag("attention_k_eq_v"),
        shared_layers=shared,
        wide_shared=reader.flag("use_double_wide_mlp"),
        per_layer_size=per_layer,
        per_layer_rows=_count(reader, "vocab_size_per_layer_input") if per_layer else 0,
        pad_id=_count(reader, "pad_token_id"),
        experts=_experts(reader) if reader.flag("enable_moe_block") else None,
        logit_cap=None
        if reader.get("final_logit_softcapping") is None
        else reader.number("final_logit_softcapping", 1.0),
        **heads,
        **fields,
    )


def _count(reader: ConfigReader, name: str) -> int:
    """A number that may be 0 or null."""
    return reader.positive(name) if reader.raw.get(name) else 0


def _windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; the last one is global, whatever the file says."""
    window = reader.positive("sliding_window")
    windows = read_windows(reader, layers, window) or tuple(
        window if (layer + 1) % _PATTERN else None for layer in range(layers)
    )
    return (*windows[:-1], None)


def _global_heads(reader: ConfigReader, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Head size and KV heads of the global layers: named, or as transformers 5 writes them, layer by layer."""
    table = reader.raw.get("per_layer_config")
    if table is None:
        named = reader.raw.get("num_global_key_value_heads") if reader.flag("attention_k_eq_v") else None
        kv_heads = reader.positive("num_key_value_heads" if named is None else "num_global_key_value_heads")
        return {"global_head_dim": reader.positive("global_head_dim"), "global_kv_heads": kv_heads}
    of_layer = {int(layer): values for layer, values in table.items()} if isinstance(table, dict) else {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "global_kv_heads"}
    kinds = [of_layer.get(layer, {}) for layer, window in enumerate(windows) if window is None]
    others = [of_layer.get(layer) for layer, window in enumerate(windows) if window is not None]
    if any(others) or any(kind != kinds[0] for kind in kinds) or not {*kinds[0]} <= {*names, "skip"}:
        raise UnsupportedModelError(
            f"{reader.file}: per_layer_config is supported for head_dim and num_key_value_heads of all layers without "
            f"a window alike, not as {table}"
        )
    inside = replace(reader, raw=reader.raw | kinds[0])
    return {ours: inside.positive(name) for name, ours in names.items()}


def _rope(reader: ConfigReader, kind: str) -> RopeConfig:
    by_kind = reader.table("rope_parameters")
    own = by_kind.get(kind) or _ROPES[kind]
    return read_rope(replace(reader, raw=reader.raw | {"rope_parameters": own}))


def _experts(reader: ConfigReader) -> Gemma4Experts:
    experts = Gemma4Experts(
        *(reader.positive(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    )
    if experts.chosen > experts.count:
        raise ConfigError(f"{reader.file}: top_k_experts ({experts.chosen}) is more than the {experts.count} experts")
    return experts
