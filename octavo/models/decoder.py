"""Decoder-only transformers: an embedding, layers, a norm and a language-model head.

A family defines its layers. Tensors have the names of Llama's checkpoints (model.embed_tokens, model.layers.N,
model.norm, lm_head); ``checkpoint_map`` maps those of other families.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.attention import Attention, LatentAttention
from octavo.layers.layer import Layer, LayerContext, LayerNorm, RMSNorm
from octavo.layers.mlp import MLP, GatedMLP, SparseMoE, XieluMLP
from octavo.layers.states import StateLayer
from octavo.layers.vocabulary import (
    ClassificationHead,
    LayerFeatures,
    ParallelLMHead,
    PositionEmbedding,
    VocabParallelEmbedding,
)
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.network import Network, ResidualReader, Tower, tower_context

FeedForward = MLP | GatedMLP | XieluMLP | SparseMoE


Mixer = Attention | LatentAttention | StateLayer


class ResidualLayer(Layer, ABC):
    """A layer of a decoder, with any number of caches."""

    #: The layer, of the whole network, whose cache this one reads instead of a cache of its own (shared KV).
    kv_owner: int | None = None

    @property
    @abstractmethod
    def kv_specs(self) -> list[KVSpec]:
        """Of its caches."""

    @abstractmethod
    def forward(self, residual: Array, caches: Iterator[LayerCache], batch: ForwardBatch) -> Array:
        """The residual stream after this layer, float32 [T, E]; takes its own caches. The input may be overwritten."""


class DecoderLayer(ResidualLayer):
    """A layer with one cache, of attention or of what stands in its place."""

    attention: Mixer

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [self.attention.kv_spec]

    def forward(self, residual: Array, caches: Iterator[LayerCache], batch: ForwardBatch) -> Array:
        return self(residual, next(caches), batch)

    @abstractmethod
    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""


class PreNormLayer(DecoderLayer):
    """x + attention(norm(x)), and then x + mlp(norm(x)) of the sum."""

    #: Names of the norms of attention and of the feed-forward network.
    norm_names: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    #: Name of attention, or of what a layer with a state has in its place.
    mixer_name: ClassVar[str] = "self_attn"

    def __init__(self, attention: Mixer, mlp: FeedForward, norms: Sequence[Any]) -> None:
        """``norms``: of attention, None if its input is normalised; and of the feed-forward network, by default the
        same.
        """
        super().__init__()
        self.attention_norm: Any = None if norms[0] is None else self.attach(self.norm_names[0], norms[0])
        self.attention = self.attach(self.mixer_name, attention)
        self.mlp_norm: Any = self.attach(self.norm_names[1], norms[1]) if len(norms) > 1 else self.attention_norm
        self.mlp = self.attach("mlp", mlp)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        x = residual if self.attention_norm is None else self.attention_norm(residual)
        residual = self.attention.add_to(residual, x, cache, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


class SingleMixerLayer(DecoderLayer):
    """x + mixer(norm(x)), and no feed-forward network."""

    def __init__(self, mixer: Mixer, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = self.attach("norm", norm)
        self.attention = self.attach("mixer", mixer)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        return self.attention.add_to(residual, self.norm(residual), cache, batch)


class SandwichNormLayer(DecoderLayer):
    """x + norm(attention(norm(x))), and then x + norm(mlp(norm(x))) of the sum; without ``before``, no inner norms."""

    attention: Attention

    #: Names of the norms in Gemma's checkpoints, in the order of their use.
    norm_names: ClassVar[tuple[str, str, str, str]] = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP | SparseMoE,
        before: Sequence[RMSNorm] | None,
        after: Sequence[RMSNorm],
    ) -> None:
        """``before`` and ``after``: norms of the inputs and of the results of attention and MLP."""
        super().__init__()
        names = self.norm_names
        self.attention_norm = self.mlp_norm = None
        if before is not None:
            self.attention_norm = self.attach(names[0], before[0])
        self.attention = self.attach("self_attn", attention)
        self.attention_post_norm = self.attach(names[1], after[0])
        if before is not None:
            self.mlp_norm = self.attach(names[2], before[1])
        self.mlp = self.attach("mlp", mlp)
        self.mlp_post_norm = self.attach(names[3], after[1])

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        x = residual if self.attention_norm is None else self.attention_norm(residual)
        residual = self.attention_post_norm.add_to(residual, self.attention(x, cache, batch))
        x = residual if self.mlp_norm is None else self.mlp_norm(residual)
        return self.mlp_post_norm.add_to(residual, self.mlp(x))


class PostNormLayer(PreNormLayer):
    """norm(x + attention(x)), and then norm(x + mlp(x)) of that (Vaswani et al. 2017)."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        residual = self.attention_norm.float32(self.attention.add_to(residual, residual, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(residual, residual))


def make_feed_forward(config: Any, context: LayerContext) -> MLP | GatedMLP:
    """The feed-forward network of a layer, for configurations with ``gated_mlp`` and ``activation``."""
    kind = GatedMLP if config.gated_mlp else MLP
    return kind(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)


def refuse_stages(config: ModelConfig, context: LayerContext) -> None:
    """Refuses pipeline stages, for an encoder's layers: they share a workspace instead of a KV cache."""
    if context.layers is not None and len(context.layers) != config.num_layers:
        raise ConfigError(f"{config.architecture} has no pipeline stages: set pipeline_parallel_size=1")


class Decoder(Network):
    """One rank's share of a decoder and its language-model head.

    With ``ModelConfig.is_encoder`` attention is bidirectional, as in embedding models that are made of decoders: a
    family that can be one gives its layers an ``AttentionSpec`` that is not causal.
    """

    head_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^lm_head\."),
        Rename(r"^(score|classifier)\.(?!out\.)", "score.out."),
    )
    base_map: tuple[CheckpointEntry, ...] = (Rename(r"^(embed_tokens|layers|norm|final_layernorm)\.", r"model.\1."),)
    embed_positions: PositionEmbedding | None = None
    embed_norm: RMSNorm | LayerNorm | None = None

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.kernels = context.kernels
        vocab, width, tied = config.vocab_size, self.embedding_size(config), config.tie_word_embeddings
        self._stage = stage = context.layers_of(config.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        if self.is_first or (self.is_last and tied):
            self.embed_tokens = self.attach("model.embed_tokens", VocabParallelEmbedding(context, vocab, width))
        self.layers = [self.attach(f"model.layers.{i}", self.make_layer(i, config, context)) for i in stage]
        self.kv_specs, caches = [], dict[int, int]()
        for index, layer in zip(stage, self.layers, strict=True):
            if layer.kv_owner is not None:
                caches[index] = caches[layer.kv_owner]
            elif layer.kv_specs:
                caches[index] = len(self.kv_specs)
                self.kv_specs += layer.kv_specs
        self.cache_of_layer = caches
        if config.is_encoder:
            refuse_stages(config, context)
            self.workspace, self.kv_specs = replace(self.kv_specs[0], kind="full", window=None), []
        #: By the layer before which they are added.
        self.layer_features: dict[int, LayerFeatures] = {}
        if self.is_first and config.image_facts is not None:
            tower = self.make_tower(config, tower_context(context))
            if tower is not None:
                self.tower = self.attach("tower", tower)
            for index in config.image_facts.layers if context.virtual_tokens else ():
                if index > stage.stop:
                    raise ConfigError(
                        f"{config.architecture} adds features of images before layer {index}, which must be in the "
                        "first pipeline stage: set a smaller pipeline_parallel_size"
                    )
                features = LayerFeatures(context, vocab, width)
                self.layer_features[index] = self.attach(f"layer_features.{index}", features)
        if self.is_last:
            norm = self.make_final_norm(config, context)
            self.norm = None if norm is None else self.attach("model.norm", norm)
            self.head = self.classifier = None
            if config.head == "lm":
                head = ParallelLMHead(context, vocab, width, self.embed_tokens if tied else None, bias=config.head_bias)
                self.head = self.attach("lm_head", head)
            elif config.labels:
                self.classifier = self.attach("score", self.make_classifier(config, context))

    @abstractmethod
    def make_layer(self, index: int, config: Any, context: LayerContext) -> ResidualLayer:
        """Layer ``index`` of the network; ``config`` is the family's."""

    @abstractmethod
    def make_final_norm(self, config: Any, context: LayerContext) -> RMSNorm | LayerNorm | None:
        """The norm after the last layer, if there is one."""

    def make_classifier(self, config: Any, context: LayerContext) -> ClassificationHead:
        """The head of class scores; ``config.head`` says of what."""
        width, classes = self.embedding_size(config), len(config.labels)
        return ClassificationHead(context, width, classes, out_bias=config.head == "token")

    def make_tower(self, config: Any, context: LayerContext) -> Tower | None:
        """The image tower, if there is one; ``context`` is that of ``tower_context``."""
        return None if config.tower is None else config.tower.make(config.hidden_size, context)

    def embedding_size(self, config: Any) -> int:
        """Width of the embedding and of the head's input."""
        return int(config.hidden_size)

    def set_virtual_tokens(self, first: int, embeddings: np.ndarray) -> None:
        if self.is_first:
            assert self.embed_tokens.virtual is not None
            self.kernels.write(self.embed_tokens.virtual[first : first + len(embeddings)], embeddings)

    def set_features(self, first: int, features: np.ndarray) -> None:
        if self.is_first:
            embeddings, *others = np.split(features, 1 + len(self.layer_features), axis=1)
            self.set_virtual_tokens(first, embeddings)
            for layer, rows in zip(self.layer_features.values(), others, strict=True):
                self.kernels.write(layer.table[first : first + len(rows)], rows)

    def embed(self, token_ids: Array) -> Array:
        return self.embed_tokens(token_ids)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        if self.embed_positions is not None:
            residual = self.embed_positions.add_to(residual, batch.positions)
        if self.embed_norm is not None:
            residual = self.embed_norm.float32(residual)
        caches = iter(kv_caches)
        for index, layer in zip(self._stage, self.layers, strict=True):
            residual = self._add_features(index, residual, batch)
            if reader is not None:
                reader.read(index, residual)
            residual = layer.forward(residual, caches, batch)
        residual = self._add_features(self._stage.stop, residual, batch)
        if reader is not None:
            reader.read(self._stage.stop, residual)
        return self.norm(residual) if self.is_last and self.norm is not None else residual

    def _add_features(self, index: int, residual: Array, batch: ForwardBatch) -> Array:
        features = self.layer_features.get(index)
        return residual if features is None else features.add_to(residual, batch.token_ids)

    def logits(self, hidden: Array) -> Array:
        return super().logits(hidden) if self.head is None else self.head(hidden)

    def scores(self, rows: Array) -> Array:
        return super().scores(rows) if self.classifier is None else self.classifier(rows)
