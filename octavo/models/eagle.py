"""Heads that draft for a model from its hidden states: EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (2503.01840).

A head is a ``DraftHead`` of one decoder layer (EAGLE-1: or several). Its features are the hidden state after the final
norm of the model (EAGLE-1), or a product with the residual streams before some layers (EAGLE-3). Tensors have the names
of published heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from octavo.core.dtypes import DType, Stored
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import Layer, LayerContext, RMSNorm
from octavo.layers.linear import ConcatQKVParallelLinear, ReplicatedConcatLinear
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_files import ConfigReader, fields_of
from octavo.models.decoder import PreNormLayer
from octavo.models.draft_head import FeatureReader, PublishedHead
from octavo.models.llama import LlamaForCausalLM, make_mlp
from octavo.models.network import ResidualReader

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EagleMethod = Literal["eagle", "eagle3"]
#: Of heads that the library Speculators has trained.
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
#: Architectures in config.json; published heads often name the network that they are made of.
_ARCHITECTURES: dict[EagleMethod, tuple[str, ...]] = {
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", *_SPECULATORS, "LlamaForCausalLM"),
}


@dataclass(frozen=True)
class EagleConfig(ModelConfig):
    """A draft head; ``vocab_size`` is that of the target model."""

    method: EagleMethod = "eagle"
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    #: EAGLE-3: layers of the target whose inputs are read, ascending; num_layers means the last one's output.
    #: Empty until ``fit_to`` if config.json does not say.
    feature_layers: tuple[int, ...] = ()
    #: EAGLE-3: the residual is the normalised input.
    norm_before_residual: bool = False
    #: Whether its files hold a bias of ``fc``, and an embedding to use instead of the target's.
    fc_bias: bool = False
    own_embedding: bool = False

    @property
    def fc_inputs(self) -> list[int]:
        """Widths of the inputs of ``fc``: embedding and hidden state (EAGLE-1), or the residual streams (EAGLE-3)."""
        width = self.target_hidden_size
        return [self.hidden_size, width] if self.method == "eagle" else [width] * len(self.feature_layers)


def read_eagle_config(method: EagleMethod, reader: ConfigReader) -> EagleConfig:
    """The configuration of a head by its config.json."""
    if layer := reader.table("transformer_layer_config"):  # as the library Speculators writes it
        own = {name: value for name, value in reader.raw.items() if value is not None}
        reader = replace(reader, raw={**layer, **own})
    _refuse_other_heads(method, reader)
    base = LlamaForCausalLM.read_config("LlamaForCausalLM", reader)
    changes = {
        "architecture": _ARCHITECTURES[method][0],
        "qkv_bias": base.qkv_bias or reader.flag("qkv_bias"),
        "draft_vocab_size": base.vocab_size,
        "target_hidden_size": base.hidden_size,
    }
    config = EagleConfig(method=method, **(fields_of(base) | changes))
    if method == "eagle":
        return config
    layers: Any = reader.raw.get(_LAYER_IDS) or reader.table("eagle_config").get(_LAYER_IDS) or []
    if not isinstance(layers, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in layers):
        raise ConfigError(f"{reader.file}: {_LAYER_IDS} must be a list of layers, not {layers!r}")
    return replace(
        config,
        draft_vocab_size=reader.positive("draft_vocab_size", config.vocab_size),
        target_hidden_size=reader.positive("target_hidden_size", config.hidden_size),
        feature_layers=tuple(sorted(layers)),
        norm_before_residual=reader.flag("norm_before_residual"),
    )


def fit_to(config: EagleConfig, target: ModelConfig) -> EagleConfig:
    """The configuration of a head for the model ``target``."""
    for what, own, its in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != its:
            raise ConfigError(f"the head is for another model: its {what} is {own}, that of the model {its}")
    if getattr(target, "residual_scale", 1.0) != 1.0:  # its residual stream is kept divided by the factor
        raise ConfigError(f"{target.architecture} with residual_multiplier has no EAGLE heads here")
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(f"draft_vocab_size ({config.draft_vocab_size}) exceeds vocab_size ({config.vocab_size})")
    # The lengths that it was trained on do not limit it, as those are of drafts and not of contexts.
    config = replace(config, max_position=target.max_position)
    if config.method == "eagle":
        return config
    layers = target.num_layers
    # An early, a middle and a late layer (EAGLE-3, section 3.1).
    ids = config.feature_layers or (2, layers // 2, layers - 3)
    if list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= layers:
        which = "" if config.feature_layers else ", which is the default"
        raise ConfigError(f"{_LAYER_IDS} must be distinct layers from 0 to {layers}, not {list(ids)}{which}")
    return replace(config, feature_layers=ids)


def _refuse_other_heads(method: EagleMethod, reader: ConfigReader) -> None:
    names, supported = reader.raw.get("architectures"), _ARCHITECTURES[method]
    if not isinstance(names, list) or not set(map(str, names)).intersection(supported):
        other: EagleMethod = "eagle" if method == "eagle3" else "eagle3"
        named = {str(name) for name in names} if isinstance(names, list) else set()
        hint = f"; it is one of method {other!r}" if named.intersection(_ARCHITECTURES[other]) else ""
        raise UnsupportedModelError(
            f"{reader.file}: architectures {names!r} are no head of method {method!r} ({', '.join(supported)}){hint}"
        )
    for name in ("quantization_config", "compression_config"):  # heads are not quantised
        reader.only(name, {})
    for name in ("add_para_norm", "fc_norm", "norm_before_fc", "norm_output"):  # variants of the published head
        reader.only(name, False)
    ConfigReader(reader.table("eagle_config"), reader.file).only("use_aux_hidden_state", True)
    if method == "eagle3":
        reader.only("num_hidden_layers", 1)


#: Old checkpoints hold rotary tables; d2t and t2d are no weights and are read by themselves.
_COMMON: tuple[CheckpointEntry, ...] = (Rename(r"^model\.", ""), Drop(r"rotary_emb\.inv_freq$"), Drop(r"^(d2t|t2d)$"))


class EagleHead(PublishedHead):
    """What both kinds share: ``fc``, and perhaps an embedding."""

    config: EagleConfig
    method: ClassVar[EagleMethod]
    #: The token of draft id i is i + d2t[i].
    token_map = "d2t"

    def __init__(self, config: EagleConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.embed_tokens: VocabParallelEmbedding | None = None
        if config.own_embedding:
            embedding = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
            self.embed_tokens = self.attach("embed_tokens", embedding)
        fc = ReplicatedConcatLinear(context, config.fc_inputs, config.hidden_size, config.fc_bias)
        self.fc = self.attach("fc", fc)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EagleConfig:
        return read_eagle_config(cls.method, reader)

    def check_token_map(self, stored: Stored | None) -> None:
        config, name = self.config, self.token_map
        if stored is None:
            if config.draft_vocab_size != config.vocab_size:
                raise WeightError(
                    f"the checkpoint lacks the tensor {name!r}, the tokens that the head drafts: draft_vocab_size "
                    f"({config.draft_vocab_size}) is not vocab_size ({config.vocab_size})"
                )
        elif config.method == "eagle":
            raise ConfigError(f"the checkpoint has the tensor {name!r}, which only heads of method 'eagle3' have")
        elif stored.dtype != "I64" or stored.shape != (config.draft_vocab_size,):
            raise WeightError(
                f"tensor {name!r} is {stored.dtype} {list(stored.shape)}, not I64 [{config.draft_vocab_size}]"
            )

    def set_token_map(self, values: np.ndarray | None) -> None:
        drafts, vocab_size = self.config.draft_vocab_size, self.config.vocab_size
        if values is None:
            if drafts == vocab_size:
                return
            values = np.zeros(drafts, np.int64)
        ids = np.arange(drafts) + values
        if outside := int(((ids < 0) | (ids >= vocab_size)).sum()):
            raise WeightError(
                f"tensor {self.token_map!r} leads to {outside} tokens outside of the vocabulary of {vocab_size}"
            )
        self.target_ids = self.kernels.array(ids)

    def embed(self, token_ids: Array) -> Array:
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        table = self._target.embed_tokens
        # Heads read the embedding without the model's factor.
        embedding = table(token_ids)
        return embedding if table.scale == 1.0 else table.kernels.scale(embedding, 1.0 / table.scale)


class EagleForCausalLM(EagleHead):
    """EAGLE-1: layers over fc([embedding, hidden]); their result is a hidden state after the final norm."""

    method = "eagle"
    # The embedding is a copy of the model's.
    checkpoint_map = (*_COMMON, Drop(r"^embed_tokens\.weight$"), Drop(r"^lm_head\.weight$"))

    def __init__(self, config: EagleConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.layers: list[PreNormLayer] = []
        for index in range(config.num_layers):
            spec = AttentionSpec(config.head_dim**-0.5)
            attention = Attention(config, context, spec, self.rotary_table(config, context))
            # The first layer has no norm before attention.
            norms = [RMSNorm(context, config.hidden_size, config.rms_norm_eps) if i else None for i in (index, 1)]
            layer = PreNormLayer(attention, make_mlp(config, context), norms)
            self.layers.append(self.attach(f"layers.{index}", layer))
        self.kv_specs = [layer.attention.kv_spec for layer in self.layers]

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        embedding = self.fc.product(0, self.embed(batch.token_ids), DType.FLOAT32)
        residual = self.fc.product(1, residual, DType.FLOAT32, embedding)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, cache, batch)
        return residual

    def logits(self, hidden: Array) -> Array:
        return self._target.logits(hidden)


class ConcatAttention(Attention):
    """Attention whose queries, keys and values are projections of two inputs, of ``hidden_size`` each."""

    qkv: ConcatQKVParallelLinear

    def make_qkv(self, config: ModelConfig, context: LayerContext) -> ConcatQKVParallelLinear:
        return ConcatQKVParallelLinear(
            context, [config.hidden_size] * 2, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias
        )

    def add_both_to(
        self, residual: Array, first: Array, second: Array, cache: LayerCache, batch: ForwardBatch
    ) -> Array:
        """residual + attention of both inputs, float32 [T, E]; the residual's memory may be reused."""
        qkv = self.qkv.product(0, first, DType.FLOAT32)
        qkv = self.qkv.product(1, second, self.qkv.dtype, qkv)
        return self.out.add_to(residual, self.attend(qkv, cache, batch))


class MidLayer(Layer):
    """The layer of EAGLE-3: attention over the norms of embedding and features, whose residual is the features."""

    attention: ConcatAttention

    def __init__(self, config: EagleConfig, context: LayerContext, attention: ConcatAttention) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.embedding_norm = self.attach("input_layernorm", RMSNorm(context, hidden, eps))
        self.hidden_norm = self.attach("hidden_norm", RMSNorm(context, hidden, eps))
        self.attention = self.attach("self_attn", attention)
        self.mlp_norm = self.attach("post_attention_layernorm", RMSNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", make_mlp(config, context))

    def __call__(self, embedding: Array, features: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Both float32 [T, E] to float32 [T, E]; the features' memory may be reused."""
        embedding, hidden = self.embedding_norm(embedding), self.hidden_norm(features)
        if self._norm_before_residual:
            features = self.hidden_norm.float32(features)
        residual = self.attention.add_both_to(features, embedding, hidden, cache, batch)
        return self.mlp.add_to(residual, self.mlp_norm(residual))


class Eagle3ForCausalLM(EagleHead):
    """EAGLE-3: one layer, and a head of its own over a part of the vocabulary."""

    method = "eagle3"
    checkpoint_map = (*_COMMON, Rename(r"^layers\.0\.", "midlayer."))

    def __init__(self, config: EagleConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        spec = AttentionSpec(config.head_dim**-0.5)
        attention = ConcatAttention(config, context, spec, self.rotary_table(config, context))
        self.layer = self.attach("midlayer", MidLayer(config, context, attention))
        self.kv_specs = [attention.kv_spec]
        self.norm = self.attach("norm", RMSNorm(context, config.hidden_size, config.rms_norm_eps))
        head = ParallelLMHead(context, config.draft_vocab_size, config.hidden_size, None)
        self.head = self.attach("lm_head", head)

    def make_reader(self) -> FeatureReader:
        return FeatureReader(self.fc, self.config.feature_layers)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        return self.layer(self.embed(batch.token_ids), residual, kv_caches[0], batch)

    def logits(self, hidden: Array) -> Array:
        return self.head(self.norm(hidden))
