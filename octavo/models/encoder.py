"""Encoders, and encoder-decoders. An encoder's tokens attend to the whole text, which is computed in one step.

A family defines its layers. Tensors have the names of decoders (model.embed_tokens, model.layers.N.self_attn, mlp);
``checkpoint_map`` maps the names of each family to these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.request import TOKENS
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, AttentionSpec, LayerCache
from octavo.layers.attention import Attention, CrossAttention, CrossQueries
from octavo.layers.layer import Layer, LayerContext, LayerNorm, RMSNorm
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.vocabulary import ClassificationHead, PositionEmbedding, VocabParallelEmbedding
from octavo.models.config_files import ConfigReader, decoder_fields
from octavo.models.decoder import (
    Decoder,
    DecoderLayer,
    PostNormLayer,
    PreNormLayer,
    make_feed_forward,
    refuse_stages,
)
from octavo.models.network import Network, ResidualReader


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The configuration of an encoder."""

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
    embedding_norm: bool = True
    #: Of the optional dense layer before the last matrix of class scores, and whether scores of tokens have it too.
    dense_activation: Activation | Literal["tanh"] | None = None
    dense_for_tokens: bool = False
    dense_bias: bool = True
    dense_norm: bool = False


Norm = LayerNorm | RMSNorm


class EncoderLayer(PostNormLayer):
    norm_names = ("attention_norm", "mlp_norm")


class EncoderPreNormLayer(PreNormLayer):
    norm_names = ("attention_norm", "mlp_norm")


class EncoderStack(Layer):
    """Segments, positions and norm of the embedding, layers, final norm; each but the layers may be missing."""

    def __init__(
        self, config: EncoderConfig, context: LayerContext, layers: Sequence[PreNormLayer], norms: Sequence[Norm | None]
    ) -> None:
        """``norms``: of the embedding and after the last layer."""
        super().__init__()
        width = config.hidden_size
        self.embed_types = self.embed_positions = None
        if config.type_rows:
            self.embed_types = self.attach("embed_types", PositionEmbedding(context, config.type_rows, width))
        if config.position_rows:
            table = PositionEmbedding(context, config.position_rows, width, config.position_offset)
            self.embed_positions = self.attach("embed_positions", table)
        self.embed_norm = None if norms[0] is None else self.attach("embed_norm", norms[0])
        self.layers = [self.attach(f"layers.{i}", layer) for i, layer in enumerate(layers)]
        self.norm = None if norms[1] is None else self.attach("norm", norms[1])
        #: The KV cache that all layers can share.
        self.workspace = replace(layers[0].attention.kv_spec, kind="full", window=None)

    def __call__(
        self, residual: Array, batch: ForwardBatch, caches: Iterable[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        """The embedded input float32 [T, E], without positions, to the stream float32 [T, E] before the final norm."""
        if self.embed_types is not None:
            residual = self.embed_types.add_to(residual, batch.token_types)
        if self.embed_positions is not None:
            residual = self.embed_positions.add_to(residual, batch.positions)
        if self.embed_norm is not None:
            residual = self.embed_norm.float32(residual)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=False)):
            if reader is not None:
                reader.read(index, residual)
            residual = layer(residual, cache, batch)
        if reader is not None:
            reader.read(len(self.layers), residual)
        return residual


class Encoder(Network):
    """One rank's share of an encoder, and its classification head if it has one."""

    config: EncoderConfig
    layer_class: type[PreNormLayer] = EncoderLayer

    def __init__(self, config: EncoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        refuse_stages(config, context)
        self.kernels, width = context.kernels, config.hidden_size
        self.embed_tokens = self.attach("model.embed_tokens", VocabParallelEmbedding(context, config.vocab_size, width))
        layers = [self.make_layer(i, context) for i in range(config.num_layers)]
        norms = [self.make_norm(context) if config.embedding_norm else None, self.make_final_norm(context)]
        self.stack = self.attach("model", EncoderStack(config, context, layers, norms))
        self.kv_specs, self.workspace = [], self.stack.workspace
        self.head = None if config.head == "none" else self.attach("head", self.make_head(context))

    def make_layer(self, index: int, context: LayerContext) -> PreNormLayer:
        norms = [self.make_attention_norm(index, context), self.make_norm(context)]
        return self.layer_class(self.make_attention(index, context), make_feed_forward(self.config, context), norms)

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        return Attention(self.config, context, AttentionSpec(self.config.head_dim**-0.5, causal=False))

    def make_attention_norm(self, index: int, context: LayerContext) -> LayerNorm | None:
        return self.make_norm(context)

    def make_norm(self, context: LayerContext) -> LayerNorm:
        config = self.config
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)

    def make_final_norm(self, context: LayerContext) -> LayerNorm | None:
        return None

    def make_head(self, context: LayerContext) -> ClassificationHead:
        config = self.config
        dense = config.dense_activation if config.head == "sequence" or config.dense_for_tokens else None
        norm = self.make_norm(context) if dense is not None and config.dense_norm else None
        return ClassificationHead(
            context, config.hidden_size, len(config.labels), dense=dense, dense_bias=config.dense_bias, norm=norm
        )

    def embed(self, token_ids: Array) -> Array:
        return self.embed_tokens(token_ids)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        residual = self.stack(residual, batch, kv_caches, reader)
        return residual if self.stack.norm is None else self.stack.norm.float32(residual)

    def scores(self, rows: Array) -> Array:
        return super().scores(rows) if self.head is None else self.head(rows)


def encoder_fields(reader: ConfigReader, bias: bool = True, **names: str) -> dict[str, Any]:
    """Fields of ``EncoderConfig`` that all families have; ``names`` as for ``decoder_fields``."""
    for name in ("is_decoder", "causal", "add_cross_attention"):
        reader.only(name, False)
    rope = reader.table("rope_parameters")
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        ConfigReader(part, reader.file).only("rope_type", "default")
    return decoder_fields(reader, bias=bias, **names)


# Encoder-decoder transformers (Vaswani et al. 2017)


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """The decoder's fields, those of its encoder, and what both have in common."""

    encoder: EncoderConfig
    layer_norm_eps: float = 1e-5
    activation: Activation = "gelu"
    gated_mlp: bool = False
    #: Pre-norms; else post-norms.
    norm_first: bool = False
    embedding_norm: bool = False
    final_norm: bool = False
    embedding_scale: float = 1.0
    #: Learned positions of the decoder: the table's rows (0: there is none), and the row of position 0.
    position_rows: int = 0
    position_offset: int = 0


class CrossDecoderLayer(DecoderLayer):
    """Attention, cross attention and a feed-forward network, each with its norm: x + f(norm(x)), or norm(x + f(x))."""

    def __init__(
        self, norm_first: bool, attention: Attention, cross: CrossAttention, mlp: MLP | GatedMLP, norms: list[Any]
    ) -> None:
        """``norms``: of attention, of cross attention and of the feed-forward network."""
        super().__init__()
        self.norm_first = norm_first
        self.attention = self.attach("self_attn", attention)
        self.attention_norm = self.attach("attention_norm", norms[0])
        self.cross_attention = self.attach("cross_attn", cross)
        self.cross_norm = self.attach("cross_norm", norms[1])
        self.mlp = self.attach("mlp", mlp)
        self.mlp_norm = self.attach("mlp_norm", norms[2])

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        x = self._attended(residual, cache, batch)
        if self.norm_first:
            x = self.cross_attention.add_to(x, self.cross_norm(x), cache, batch)
            return self.mlp.add_to(x, self.mlp_norm(x))
        x = self.cross_norm.float32(self.cross_attention.add_to(x, x, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(x, x))

    def _attended(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        if self.norm_first:
            return self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
        return self.attention_norm.float32(self.attention.add_to(residual, residual, cache, batch))

    def cross_queries(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        """The queries that ``__call__`` computes from the same arguments; the input's memory may be reused."""
        x = self._attended(residual, cache, batch)
        return self.cross_attention.queries(self.cross_norm(x) if self.norm_first else x)


class EncoderDecoder(Decoder):
    """One rank's share of an encoder-decoder transformer.

    ``kv_specs`` are those of the decoder's self-attention, in whose caches cross attention has blocks, too;
    ``workspace`` is that of the encoder's self-attention, which keeps nothing.
    """

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig, context: LayerContext) -> None:
        context = replace(context, max_loras=0, virtual_tokens=0)
        refuse_stages(config, context)
        super().__init__(config, context)
        self.embed_tokens.scale = config.embedding_scale
        if config.position_rows:
            table = PositionEmbedding(context, config.position_rows, config.hidden_size, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)
        if config.embedding_norm:
            self.embed_norm = self.attach("model.embed_norm", self.make_norm(config, context))
        self.encoder = self.attach("encoder", self.make_encoder(config, context))
        self.workspace = self.encoder.workspace

    def make_norm(self, config: Any, context: LayerContext) -> Norm:
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps)

    def make_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        return Attention(config, context, AttentionSpec(config.head_dim**-0.5))

    def make_cross_attention(self, index: int, config: Any, context: LayerContext) -> CrossAttention:
        return CrossAttention(config, context, width=config.encoder.hidden_size)

    def make_encoder_attention(self, index: int, config: EncoderConfig, context: LayerContext) -> Attention:
        return Attention(config, context, AttentionSpec(config.head_dim**-0.5, causal=False))

    def make_final_norm(self, config: Any, context: LayerContext) -> Norm | None:
        return self.make_norm(config, context) if config.final_norm else None

    def make_layer(self, index: int, config: Any, context: LayerContext) -> CrossDecoderLayer:
        norms = [self.make_norm(config, context) for _ in range(3)]
        attention = self.make_attention(index, config, context)
        cross = self.make_cross_attention(index, config, context)
        return CrossDecoderLayer(config.norm_first, attention, cross, make_feed_forward(config, context), norms)

    def make_encoder(self, config: EncoderDecoderConfig, context: LayerContext) -> EncoderStack:
        encoder = config.encoder
        layer_class: type[PreNormLayer] = EncoderPreNormLayer if config.norm_first else EncoderLayer
        layers = []
        for index in range(encoder.num_layers):
            norms = [self.make_norm(encoder, context) for _ in range(2)]
            attention = self.make_encoder_attention(index, encoder, context)
            layers.append(layer_class(attention, make_feed_forward(encoder, context), norms))
        first = self.make_norm(encoder, context) if config.embedding_norm else None
        last = self.make_norm(encoder, context) if config.final_norm else None
        return EncoderStack(encoder, context, layers, [first, last])

    @classmethod
    def prepare_input(cls, config: ModelConfig, kind: str, payload: bytes) -> np.ndarray:
        if kind != TOKENS:
            raise InvalidRequestError(f"{config.architecture} reads text, not {kind}")
        return np.frombuffer(payload, "<i4").astype(np.int64)

    def embed_input(self, inputs: Array) -> Array:
        """Prepared input, token ids int64 [T] or features float32 [T, width], to float32 [T, E]."""
        return self.embed_tokens(inputs)

    def encode(self, inputs: Array, batch: ForwardBatch, workspace: LayerCache, kv_caches: list[LayerCache]) -> Array:
        states = self.encoder(self.embed_input(inputs), batch, itertools.repeat(workspace))
        states = states if self.encoder.norm is None else self.encoder.norm(states)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            assert isinstance(layer, CrossDecoderLayer)
            layer.cross_attention.write(states, cache, batch)
        return states

    def cross_queries(self, layer: int, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        decoder_layer = self.layers[layer]
        assert isinstance(decoder_layer, CrossDecoderLayer)
        return decoder_layer.cross_queries(residual, cache, batch)
