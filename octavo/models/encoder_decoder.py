"""The skeleton of encoder-decoder transformers (Vaswani et al. 2017).

The encoder reads a request's whole input in one step; its output becomes keys and values of the decoder's cross
attention, in blocks that all sequences of the request share. The decoder is as any other, with one more attention in
each layer. A family says what its layers are, and what else differs.

Tensors of the decoder have the names of decoders (model.embed_tokens, model.layers.N, model.norm, lm_head), with
``cross_attn`` and ``cross_norm`` in each layer; those of the encoder stand below ``encoder``: encoder.embed_positions,
encoder.embed_norm, encoder.layers.N.{self_attn, attention_norm, mlp, mlp_norm}, encoder.norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.encoder_input import TOKENS
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import Activation
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.cross_attention import CrossAttention, CrossQueries
from octavo.layers.layer import Layer
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.vocabulary import PositionEmbedding
from octavo.models.decoder import Decoder, DecoderLayer
from octavo.models.encoder import EncoderConfig, EncoderLayer, PreNormLayer

Norm = LayerNorm | RMSNorm


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """The decoder's fields, those of its encoder, and what both have in common."""

    encoder: EncoderConfig
    layer_norm_eps: float = 1e-5
    activation: Activation = "gelu"
    gated_mlp: bool = False
    #: Whether norms come before attention and feed-forward network; else they come after what is added.
    norm_first: bool = False
    #: Whether a norm follows the embedding, and another the last layer.
    embedding_norm: bool = False
    final_norm: bool = False
    embedding_scale: float = 1.0
    #: Learned positions of the decoder: the table's rows (0: there is none), and the row of position 0.
    position_rows: int = 0
    position_offset: int = 0


class CrossDecoderLayer(DecoderLayer):
    """Attention, cross attention and a feed-forward network, each with its norm: x + f(norm(x)), or norm(x + f(x))."""

    def __init__(
        self,
        norm_first: bool,
        attention: Attention,
        cross_attention: CrossAttention,
        mlp: MLP | GatedMLP,
        norms: list[Any],
    ) -> None:
        """``norms``: of attention, of cross attention and of the feed-forward network."""
        super().__init__()
        self.norm_first = norm_first
        self.attention = self.attach("self_attn", attention)
        self.attention_norm = self.attach("attention_norm", norms[0])
        self.cross_attention = self.attach("cross_attn", cross_attention)
        self.cross_norm = self.attach("cross_norm", norms[1])
        self.mlp = self.attach("mlp", mlp)
        self.mlp_norm = self.attach("mlp_norm", norms[2])

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``DecoderLayer``."""
        x = self._attended(residual, cache, batch)
        if self.norm_first:
            x = self.cross_attention.add_to(x, self.cross_norm(x), cache, batch)
            return self.mlp.add_to(x, self.mlp_norm(x))
        x = self.cross_norm.float32(self.cross_attention.add_to(x, x, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(x, x))

    def _attended(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The stream after the attention over the tokens themselves."""
        if self.norm_first:
            return self.attention.add_to(residual, self.attention_norm(residual), cache, batch)
        return self.attention_norm.float32(self.attention.add_to(residual, residual, cache, batch))

    def cross_queries(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        """Those that ``__call__`` has of the same arguments; the input's memory may be reused."""
        x = self._attended(residual, cache, batch)
        return self.cross_attention.queries(self.cross_norm(x) if self.norm_first else x)


class EncoderStack(Layer):
    """The layers of the encoder, with what comes before the first and after the last."""

    def __init__(
        self, config: EncoderDecoderConfig, context: LayerContext, layers: list[EncoderLayer], norms: list[Norm | None]
    ) -> None:
        """``norms``: of the embedding and after the last layer, None where there is none."""
        super().__init__()
        encoder = config.encoder
        self.embed_positions = None
        if encoder.position_rows:
            rows, offset = encoder.position_rows, encoder.position_offset
            table = PositionEmbedding(context, rows, encoder.hidden_size, offset)
            self.embed_positions = self.attach("embed_positions", table)
        self.embed_norm = None if norms[0] is None else self.attach("embed_norm", norms[0])
        self.layers = [self.attach(f"layers.{i}", layer) for i, layer in enumerate(layers)]
        self.norm = None if norms[1] is None else self.attach("norm", norms[1])

    def __call__(self, residual: Array, batch: ForwardBatch, workspace: LayerCache) -> Array:
        """The embedded input float32 [T, E], without positions, to the encoder's output [T, E]."""
        if self.embed_positions is not None:
            residual = self.embed_positions.add_to(residual, batch.positions)
        if self.embed_norm is not None:
            residual = self.embed_norm.float32(residual)
        for layer in self.layers:
            residual = layer(residual, workspace, batch)
        return residual if self.norm is None else self.norm(residual)


class EncoderDecoder(Decoder):
    """One rank's share of an encoder-decoder transformer.

    ``kv_specs`` are those of the decoder's self-attention, in whose caches cross attention has blocks, too;
    ``workspace`` is that of the encoder's self-attention, which keeps nothing.
    """

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig, context: LayerContext) -> None:
        context = replace(context, max_loras=0, virtual_tokens=0)
        if context.layers is not None and len(context.layers) != config.num_layers:
            raise ConfigError(f"{config.architecture} has no pipeline stages: set pipeline_parallel_size=1")
        super().__init__(config, context)
        self.embed_tokens.scale = config.embedding_scale
        if config.position_rows:
            table = PositionEmbedding(context, config.position_rows, config.hidden_size, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)
        if config.embedding_norm:
            self.embed_norm = self.attach("model.embed_norm", self.make_norm(config, context))
        self.encoder = self.attach("encoder", self.make_encoder(config, context))
        spec = self.encoder.layers[0].attention.kv_spec
        self.workspace = replace(spec, kind="full", window=None)

    # --- what a family may say otherwise ----------------------------------------------------------------------------

    def make_norm(self, config: Any, context: LayerContext) -> Norm:
        """A norm of the encoder or the decoder."""
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps)

    def make_mlp(self, config: Any, context: LayerContext) -> MLP | GatedMLP:
        """A feed-forward network; ``config`` is the decoder's or that of its encoder."""
        kind = GatedMLP if config.gated_mlp else MLP
        return kind(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)

    def make_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        """The self-attention of layer ``index`` of the decoder."""
        return Attention(config, context, AttentionSpec(config.head_dim**-0.5))

    def make_cross_attention(self, index: int, config: Any, context: LayerContext) -> CrossAttention:
        """The cross attention of layer ``index`` of the decoder."""
        return CrossAttention(config, context, width=config.encoder.hidden_size)

    def make_encoder_attention(self, index: int, config: EncoderConfig, context: LayerContext) -> Attention:
        """The attention of layer ``index`` of the encoder, over its whole input."""
        return Attention(config, context, AttentionSpec(config.head_dim**-0.5, causal=False))

    def make_final_norm(self, config: Any, context: LayerContext) -> Norm | None:
        """The norm after the last layer of the decoder."""
        return self.make_norm(config, context) if config.final_norm else None

    def make_layer(self, index: int, config: Any, context: LayerContext) -> CrossDecoderLayer:
        """Layer ``index`` of the decoder."""
        norms = [self.make_norm(config, context) for _ in range(3)]
        attention = self.make_attention(index, config, context)
        cross = self.make_cross_attention(index, config, context)
        return CrossDecoderLayer(config.norm_first, attention, cross, self.make_mlp(config, context), norms)

    def make_encoder(self, config: EncoderDecoderConfig, context: LayerContext) -> EncoderStack:
        """The encoder."""
        encoder = config.encoder
        layer_class = PreNormLayer if config.norm_first else EncoderLayer
        layers = []
        for index in range(encoder.num_layers):
            norms: list[Any] = [self.make_norm(encoder, context) for _ in range(2)]
            attention = self.make_encoder_attention(index, encoder, context)
            layers.append(layer_class(encoder, attention, self.make_mlp(encoder, context), norms))
        first = self.make_norm(encoder, context) if config.embedding_norm else None
        last = self.make_norm(encoder, context) if config.final_norm else None
        return EncoderStack(config, context, layers, [first, last])

    # --- the encoder's input ----------------------------------------------------------------------------------------

    @classmethod
    def prepare_input(cls, config: ModelConfig, kind: str, payload: bytes) -> np.ndarray:
        """See ``Network``: text, as token ids."""
        if kind != TOKENS:
            raise InvalidRequestError(f"{config.architecture} reads text, not {kind}")
        return np.frombuffer(payload, "<i4").astype(np.int64)

    def embed_input(self, inputs: Array) -> Array:
        """Prepared input, token ids int64 [T] or features float32 [T, width], to float32 [T, E]."""
        return self.embed_tokens(inputs)

    def encode(self, inputs: Array, batch: ForwardBatch, workspace: LayerCache, kv_caches: list[LayerCache]) -> Array:
        """See ``Network``."""
        states = self.encoder(self.embed_input(inputs), batch, workspace)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            assert isinstance(layer, CrossDecoderLayer)
            layer.cross_attention.write(states, cache, batch)
        return states

    def cross_queries(self, layer: int, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        """See ``Network``."""
        found = self.layers[layer]
        assert isinstance(found, CrossDecoderLayer)
        return found.cross_queries(residual, cache, batch)
