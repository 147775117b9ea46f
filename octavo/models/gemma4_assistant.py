"""Gemma 4's assistant: a network of a few layers that drafts for a Gemma 4 model, from a checkpoint of its own.

Its layers have queries alone. They read the KV cache of the model: of its last layer with a window that has a cache of
its own, and of its last one without. So the assistant computes no prompt, and has no cache. Its input joins the model's
embedding of the last token with the model's hidden state of the token before it, or with what it made itself of the
draft before. All drafts of a step are drafted at the position of the last token, whose own keys and values are not
computed yet.

The head of the small models' assistants has ``centroids``: tokens are in clusters of one size, and only those of the
clusters with the best centroids are drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.dtypes import DType, Stored
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.layers.vocabulary import ParallelLMHead
from octavo.models.checkpoint import Drop, Rename
from octavo.models.config_files import ConfigReader, fields_of
from octavo.models.decoder import Decoder
from octavo.models.draft_head import PublishedHead
from octavo.models.gemma4 import Gemma4Config, Gemma4ForCausalLM, Gemma4Layer, read_gemma4_text
from octavo.models.network import ResidualReader

#: By model_type: architecture and default of ``backbone_hidden_size``.
_KINDS = {
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", 1536),
    "gemma4_unified_assistant": ("Gemma4UnifiedAssistantForCausalLM", 3840),
}


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Config):
    """An assistant of the model ``target``. Windows are one shorter than in config.json: the last token is missing."""

    target: Gemma4Config
    #: Clusters of tokens, and the number of them that are drafted from; 0: the head has none.
    centroids: int = 0
    best_centroids: int = 0

    @property
    def backbone_hidden_size(self) -> int:
        return self.target.hidden_size

    def kv_owner(self, layer: int) -> int:
        """The layer of the target whose cache a layer reads: its last one of the same kind that has a cache."""
        own, is_global = self.target.num_layers - self.target.shared_layers, self.sliding_windows[layer] is None
        return max(i for i in range(own) if (self.target.sliding_windows[i] is None) == is_global)


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an assistant."""
    return _kind(raw) is not None


def _kind(raw: Mapping[str, Any]) -> tuple[str, int] | None:
    names = raw.get("architectures")
    named = names if isinstance(names, list) else []
    kinds = (kind for model_type, kind in _KINDS.items() if kind[0] in named or raw.get("model_type") == model_type)
    return next(kinds, None)


def read_assistant_config(reader: ConfigReader, target: ModelConfig) -> AssistantConfig:
    """The configuration of the assistant of a config.json for the model ``target``.

    Raises:
        UnsupportedModelError: it is no assistant, or has parts that none has.
        ConfigError: a value is impossible, or the assistant is for another model.
    """
    if (kind := _kind(reader.raw)) is None:
        names = reader.raw.get("architectures") or reader.raw.get("model_type")
        raise UnsupportedModelError(
            f"{reader.file}: {names!r} is no assistant for method 'mtp' "
            f"({', '.join(name for name, _ in _KINDS.values())}); leave model out to draft with layers of the model's "
            "own checkpoint"
        )
    if not isinstance(target, Gemma4Config):
        raise ConfigError(f"{reader.file}: an assistant of Gemma 4 cannot draft for {target.architecture}")
    architecture, backbone = kind
    for name in ("quantization_config", "compression_config"):
        reader.only(name, {})
    inner = reader.table("text_config")
    text = replace(reader, raw=inner)
    for name, values in {
        "hidden_size_per_layer_input": (0,),
        "enable_moe_block": (False,),
        "use_double_wide_mlp": (False,),
        "num_kv_shared_layers": (0, inner.get("num_hidden_layers")),
    }.items():
        text.only(name, *values)
    own = inner | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    config = read_gemma4_text(architecture, replace(reader, raw=reader.raw | {"text_config": own}))
    _check_target(reader, config, target, reader.positive("backbone_hidden_size", backbone))
    centroids = best = 0
    if reader.flag("use_ordered_embeddings"):
        centroids = reader.positive("num_centroids", 2048)
        best = reader.positive("centroid_intermediate_top_k", 32, most=centroids)
        if config.vocab_size % centroids:
            raise ConfigError(
                f"{reader.file}: vocab_size ({config.vocab_size}) must be a multiple of num_centroids ({centroids})"
            )
    changes: dict[str, Any] = {
        "max_position": target.max_position,
        "shared_layers": config.num_layers,
        # Of the tokens in the window of the last one, which has no key: those that the model still has.
        "sliding_windows": tuple(None if window is None else max(1, window - 1) for window in config.sliding_windows),
        "logit_cap": None,
        # It says which of the checkpoint's tensors is the head, which is a matrix of its own here.
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=True),
    }
    return AssistantConfig(target=target, centroids=centroids, best_centroids=best, **(fields_of(config) | changes))


def _check_target(reader: ConfigReader, config: Gemma4Config, target: Gemma4Config, backbone: int) -> None:
    """Refuses an assistant whose shapes are not those of the model."""
    own_window, its_window = (next(filter(None, each.sliding_windows), None) for each in (config, target))
    pairs: list[tuple[str, Any, Any]] = [
        ("hidden size (backbone_hidden_size)", backbone, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("global_head_dim", config.global_head_dim, target.global_head_dim),
        ("number of KV heads of global layers", config.global_kv_heads, target.global_kv_heads),
    ]
    if own_window is not None:
        pairs += [
            ("sliding_window", own_window, its_window),
            ("head_dim", config.head_dim, target.head_dim),
            ("num_key_value_heads", config.num_kv_heads, target.num_kv_heads),
        ]
    for what, own, its in pairs:
        if own != its:
            raise ConfigError(
                f"{reader.file}: the assistant is for another model: its {what} is {own}, that of the model {its}"
            )


class Gemma4Assistant(PublishedHead):
    """Its features are the model's hidden states; its results are its own, of another width."""

    config: AssistantConfig
    # It drafts at the position of the token after that of the features.
    first_rotation = 1
    token_map = "masked_embedding.token_ordering"

    def __init__(self, config: AssistantConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        width, backbone = config.hidden_size, config.backbone_hidden_size
        joined = ReplicatedConcatLinear(context, [backbone] * 2, width, False)
        self.pre_projection = self.attach("pre_projection", joined)
        self.layers: list[Gemma4Layer] = []
        for index in range(config.num_layers):
            layer = Gemma4Layer(index, config, context, self.rotary_table(config.of_layer(index), context))
            self.layers.append(self.attach(f"model.layers.{index}", layer))
        self.kv_specs = []
        self.norm = self.attach("model.norm", RMSNorm(context, width, config.rms_norm_eps))
        self.post_projection = self.attach("post_projection", ReplicatedConcatLinear(context, [width], backbone, False))
        self.head = self.attach("lm_head", ParallelLMHead(context, config.vocab_size, width, None))
        self.centroids: ReplicatedConcatLinear | None = None
        #: int64 [clusters, tokens of each].
        self._clusters: Array | None = None
        if config.centroids:
            centroids = ReplicatedConcatLinear(context, [width], config.centroids, False)
            self.centroids = self.attach("masked_embedding.centroids", centroids)
        tied, untied = r"^lm_head\.", r"^model\.embed_tokens\."
        head = (Drop(tied), Rename(untied, "lm_head.")) if config.tie_word_embeddings else (Drop(untied),)
        self.checkpoint_map = (
            *head,
            Drop(r"^masked_embedding\.token_ordering$"),
            Drop(r"\.self_attn\.[kv]_(proj|norm)\."),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        raise UnsupportedModelError(
            f"{reader.file}: {architecture} is no model of its own: name it in speculative_config of a Gemma 4 model"
        )

    @property
    def feature_width(self) -> int:
        return self.config.backbone_hidden_size

    def attach_target(self, target: Decoder) -> None:
        assert isinstance(target, Gemma4ForCausalLM)
        super().attach_target(target)

    def shared_caches(self) -> list[int]:
        """By layer, the number of the model's cache that it reads; ``forward_layers`` gets these."""
        caches = self._target.cache_of_layer
        return [caches[self.config.kv_owner(index)] for index in range(self.config.num_layers)]

    def embed(self, token_ids: Array) -> Array:
        return self._target.embed(token_ids)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        embedding = self.pre_projection.product(0, self.embed(batch.token_ids), DType.FLOAT32)
        residual = self.pre_projection.product(1, residual, DType.FLOAT32, embedding)
        caches = iter(kv_caches)
        for layer in self.layers:
            residual = layer.forward(residual, caches, batch)
        return self.norm(residual)

    def next_features(self, results: Array) -> Array:
        return self.post_projection.product(0, results, DType.FLOAT32)

    def logits(self, hidden: Array) -> Array:
        logits: Array = self.head(hidden)
        if self.centroids is not None:
            assert self._clusters is not None, "the clusters of the tokens are not loaded"
            scores = self.centroids.product(0, hidden, DType.FLOAT32)
            self.kernels.mask_clusters(logits, scores, self._clusters, self.config.best_centroids)
        return logits

    def check_token_map(self, stored: Stored | None) -> None:
        name, shape = self.token_map, (self.config.vocab_size,)
        if not self.config.centroids:
            return
        if stored is None:
            raise WeightError(f"the checkpoint lacks the tensor {name!r}, the tokens of each of the centroids")
        if stored.dtype not in ("I32", "I64") or stored.shape != shape:
            raise WeightError(f"tensor {name!r} is {stored.dtype} {list(stored.shape)}, not I64 {list(shape)}")

    def set_token_map(self, values: np.ndarray | None) -> None:
        """``values``: the tokens of the first cluster, then those of the next, and so on."""
        vocab, count = self.config.vocab_size, self.config.centroids
        if not count:
            return
        ordered = np.arange(vocab)
        if values is None:
            values = ordered
        if not np.array_equal(np.sort(values), ordered):
            raise WeightError(f"tensor {self.token_map!r} must have each of the {vocab} tokens once")
        self._clusters = self.kernels.array(values.reshape(count, -1).astype(np.int64))
