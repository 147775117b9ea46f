"""The skeleton of encoders: every token sees its whole text, which is computed in one step; nothing of it is kept.

A family says what its layers are. Tensors have the names of decoders (model.embed_tokens, model.layers.N.self_attn,
mlp), and ``checkpoint_map`` leads those of each family there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import Activation
from octavo.layers.attention import Attention
from octavo.layers.classification import ClassificationHead
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.vocabulary import PositionEmbedding, VocabParallelEmbedding
from octavo.models.config_reader import ConfigReader, decoder_fields
from octavo.models.network import Network, ResidualReader


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """What encoders have beyond ``ModelConfig``."""

    head: Literal["lm", "sequence", "token", "none"] = "none"
    is_encoder: bool = True
    layer_norm_eps: float = 1e-12
    norm_bias: bool = True
    activation: Activation = "gelu"
    gated_mlp: bool = False
    #: Learned positions: the table's rows, 0 for none, and the row of position 0.
    position_rows: int = 0
    position_offset: int = 0
    #: Rows of the table of segments (token types); 0: there is none.
    type_rows: int = 0
    #: Whether embeddings are normalised before the first layer.
    embedding_norm: bool = True
    #: Activation of the matrix that class scores of texts have before the last one, if they have it; those of tokens
    #: have it where ``dense_for_tokens``.
    dense_activation: Activation | Literal["tanh"] | None = None
    dense_for_tokens: bool = False
    dense_bias: bool = True
    #: Whether a norm follows it.
    dense_norm: bool = False


class EncoderLayer(Layer):
    """A layer with its norms after what is added (Vaswani et al. 2017): x = norm(x + f(x)), twice."""

    def __init__(
        self, config: EncoderConfig, attention: Attention, mlp: MLP | GatedMLP, norms: list[LayerNorm | None]
    ) -> None:
        """``norms``: that of attention, which a family may leave out, and that of the feed-forward network."""
        super().__init__()
        self.attention = self.attach("self_attn", attention)
        self.mlp = self.attach("mlp", mlp)
        self.attention_norm = None if norms[0] is None else self.attach("attention_norm", norms[0])
        assert norms[1] is not None
        self.mlp_norm = self.attach("mlp_norm", norms[1])

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The stream after this layer, float32 [T, E]; the input's memory may be reused."""
        assert self.attention_norm is not None
        x = self.attention_norm.float32(self.attention.add_to(x, x, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(x, x))


class PreNormLayer(EncoderLayer):
    """A layer with its norms before what is added: x + f(norm(x)), twice."""

    def __call__(self, x: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``EncoderLayer``."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention.add_to(x, normed, cache, batch)
        return self.mlp.add_to(x, self.mlp_norm(x))


class Encoder(Network):
    """One rank's share of an encoder, and its classification head if it has one."""

    config: EncoderConfig
    layer_class: type[EncoderLayer] = EncoderLayer

    def __init__(self, config: EncoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if context.layers is not None and len(context.layers) != config.num_layers:
            raise ConfigError(f"{config.architecture} has no pipeline stages: set pipeline_parallel_size=1")
        self.kernels, width = context.kernels, config.hidden_size
        self.embed_tokens = self.attach("model.embed_tokens", VocabParallelEmbedding(context, config.vocab_size, width))
        self.embed_positions = self.embed_types = self.embed_norm = None
        if config.position_rows:
            table = PositionEmbedding(context, config.position_rows, width, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)
        if config.type_rows:
            self.embed_types = self.attach("model.embed_types", PositionEmbedding(context, config.type_rows, width))
        if config.embedding_norm:
            self.embed_norm = self.attach("model.embed_norm", self.make_norm(context))
        self.layers = [self.attach(f"model.layers.{i}", self.make_layer(i, context)) for i in range(config.num_layers)]
        self.kv_specs = []
        self.workspace = replace(self.layers[0].attention.kv_spec, kind="full", window=None)
        norm = self.make_final_norm(context)
        self.norm = None if norm is None else self.attach("model.norm", norm)
        self.head = None if config.head == "none" else self.attach("head", self.make_head(context))

    def make_layer(self, index: int, context: LayerContext) -> EncoderLayer:
        """Layer ``index`` of the network."""
        config = self.config
        mlp: MLP | GatedMLP
        if config.gated_mlp:
            mlp = GatedMLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
        else:
            mlp = MLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
        norms = [self.make_attention_norm(index, context), self.make_norm(context)]
        return self.layer_class(config, self.make_attention(index, context), mlp, norms)

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        """The attention of layer ``index``: over the whole text, positions in the embedding."""
        return Attention(self.config, context, AttentionSpec(self.config.head_dim**-0.5, causal=False))

    def make_attention_norm(self, index: int, context: LayerContext) -> LayerNorm | None:
        """The norm of the attention of layer ``index``."""
        return self.make_norm(context)

    def make_norm(self, context: LayerContext) -> LayerNorm:
        """A norm of a layer."""
        config = self.config
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)

    def make_final_norm(self, context: LayerContext) -> LayerNorm | None:
        """The norm after the last layer, if there is one."""
        return None

    def make_head(self, context: LayerContext) -> ClassificationHead:
        """What makes class scores."""
        config = self.config
        dense = config.dense_activation if config.head == "sequence" or config.dense_for_tokens else None
        norm = self.make_norm(context) if dense is not None and config.dense_norm else None
        return ClassificationHead(
            context, config.hidden_size, len(config.labels), dense=dense, dense_bias=config.dense_bias, norm=norm
        )

    def embed(self, token_ids: Array) -> Array:
        """Token ids int64 [T] to the stream float32 [T, E], without positions and segments."""
        return self.embed_tokens(token_ids)

    def forward_layers(
        self,
        residual: Array,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        reader: ResidualReader | None = None,
    ) -> Array:
        """The stream with positions and segments through all layers: hidden states float32 [T, E]."""
        if self.embed_types is not None:
            residual = self.embed_types.add_to(residual, batch.token_types)
        if self.embed_positions is not None:
            residual = self.embed_positions.add_to(residual, batch.positions)
        if self.embed_norm is not None:
            residual = self.embed_norm.float32(residual)
        for index, (layer, cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if reader is not None:
                reader.read(index, residual)
            residual = layer(residual, cache, batch)
        if reader is not None:
            reader.read(len(self.layers), residual)
        return residual if self.norm is None else self.norm.float32(residual)

    def scores(self, rows: Array) -> Array:
        """See ``Network``."""
        return super().scores(rows) if self.head is None else self.head(rows)


def encoder_fields(reader: ConfigReader, **names: str) -> dict[str, Any]:
    """Fields of ``EncoderConfig`` that all families have; ``names`` as for ``decoder_fields``.

    Raises:
        UnsupportedModelError: tokens see those before them alone, or rotary positions are scaled.
    """
    for name in ("is_decoder", "causal", "add_cross_attention"):
        if reader.flag(name):
            raise UnsupportedModelError(f"{reader.file}: {name}=true is not supported for encoders")
    rope = reader.table("rope_parameters")
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type", "default") != "default":
            raise UnsupportedModelError(f"{reader.file}: rope_type {part['rope_type']!r} is not supported for encoders")
    return {"qkv_bias": True, "o_bias": True, "mlp_bias": True, **decoder_fields(reader, **names)}
