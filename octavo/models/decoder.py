"""What decoder-only transformers with layer norms and plain feed-forward networks have in common.

Their checkpoints have names of their own for the same parts; ``checkpoint_map`` of each family renames them to those of
Llama: model.embed_tokens, model.layers.N.self_attn.q_proj, model.norm, lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.kernels.packed_weight import Activation
from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import extend_rotary_table, rotary_table
from octavo.layers.vocabulary import ParallelLMHead, PositionEmbedding, VocabParallelEmbedding
from octavo.models.config import ConfigReader, common_fields, longest_context, read_rope
from octavo.models.llama import MLP as GatedMLP
from octavo.models.network import Network

#: Names of activations in config.json; several approximate gelu by the same tanh.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """What several families have beyond ``ModelConfig``."""

    layer_norm_eps: float = 1e-5
    activation: Activation = "gelu_tanh"
    #: How a token's position enters: a row of a learned table is added to its embedding, its queries and keys are
    #: rotated, or its attention is biased by distance (ALiBi).
    positions: Literal["learned", "rotary", "alibi"] = "rotary"
    #: Learned positions: the table's rows, and the row of position 0.
    position_rows: int = 0
    position_offset: int = 0
    #: Factor of ALiBi's slopes.
    alibi_factor: float = 1.0
    #: See ``DecoderLayer``.
    layout: Literal["sequential", "parallel", "parallel, two norms"] = "sequential"
    #: Whether the feed-forward network has a gate, with silu, and is not ``activation`` between two matrices.
    gated_mlp: bool = False
    norm_bias: bool = True
    head_bias: bool = False


class DecoderLayer(Layer):
    """Attention and a feed-forward network, each added to the residual stream x; ``config.layout`` says how.

    - sequential: x + attention(norm(x)), and then x + mlp(other_norm(x)) of the sum.
    - parallel: x + attention(norm(x)) + mlp(norm(x)).
    - parallel, two norms: x + attention(norm(x)) + mlp(other_norm(x)).
    """

    def __init__(self, config: Any, context: LayerContext, index: int, cos_sin: Tensor | None) -> None:
        """``config`` is the family's ``DecoderConfig``, ``cos_sin`` the rotary table if positions are rotary."""
        super().__init__()
        self.is_sequential = config.layout == "sequential"
        self.attention_norm = self.attach("input_layernorm", self.make_norm(config, context))
        self.attention = self.attach("self_attn", self.make_attention(config, context, index, cos_sin))
        self.mlp_norm = self.attention_norm
        if config.layout != "parallel":
            self.mlp_norm = self.attach("post_attention_layernorm", self.make_norm(config, context))
        self.mlp = self.attach("mlp", self.make_mlp(config, context))

    def make_norm(self, config: Any, context: LayerContext) -> LayerNorm:
        """One of the layer's norms."""
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)

    def make_attention(self, config: Any, context: LayerContext, index: int, cos_sin: Tensor | None) -> Attention:
        """The layer's attention."""
        slopes = None
        if config.positions == "alibi":
            slopes = tuple(config.alibi_factor * slope for slope in alibi_slopes(config.num_heads))
        window = config.sliding_windows[index] if config.sliding_windows else None
        return Attention(config, context, cos_sin=cos_sin, alibi_slopes=slopes, window=window)

    def make_mlp(self, config: Any, context: LayerContext) -> MLP | GatedMLP:
        """The layer's feed-forward network."""
        if config.gated_mlp:
            return GatedMLP(config, context)
        return MLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """The residual stream after this layer, float32 [T, E]; the input's memory may be reused."""
        x = self.attention_norm(residual)
        if self.is_sequential:
            residual = self.attention.add_to(residual, x, cache, batch)
            return self.mlp.add_to(residual, self.mlp_norm(residual))
        y = x if self.mlp_norm is self.attention_norm else self.mlp_norm(residual)
        return self.mlp.add_to(self.attention.add_to(residual, x, cache, batch), y)


class Decoder(Network):
    """An embedding, layers, a norm and a language-model head."""

    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        stage = context.layers_of(config.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        vocab, width, tied = config.vocab_size, self.embedding_size(config), config.tie_word_embeddings
        if self.is_first or (self.is_last and tied):
            self.embed_tokens = self.attach("model.embed_tokens", VocabParallelEmbedding(context, vocab, width))
        self.embed_positions = self._cos_sin = None
        if self.is_first and config.positions == "learned":
            table = PositionEmbedding(context, config.position_rows, config.hidden_size, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)
        if config.positions == "rotary":
            self._cos_sin = rotary_table(config, context.device, context.positions)
        self.layers = [
            self.attach(f"model.layers.{i}", self.layer_class(config, context, i, self._cos_sin)) for i in stage
        ]
        self.kv_specs = [layer.attention.kv_spec for layer in self.layers]
        if self.is_last:
            self.norm = self.make_norm(config, context)
            head = ParallelLMHead(context, vocab, width, self.embed_tokens if tied else None, bias=config.head_bias)
            self.head = self.attach("lm_head", head)

    def embedding_size(self, config: Any) -> int:
        """Width of the embedding and of the head's input."""
        return int(config.hidden_size)

    def make_norm(self, config: Any, context: LayerContext) -> Callable[[Tensor], Tensor] | None:
        """The norm after the last layer, if there is one."""
        return self.attach(
            "model.norm", LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)
        )

    def position_bytes(self) -> int:
        """Bytes of a row of the rotary table."""
        return 0 if self._cos_sin is None else self._cos_sin.shape[1] * self._cos_sin.element_size()

    def extend_positions(self, positions: int) -> None:
        """Computes the rotary table anew if it is shorter."""
        if self._cos_sin is not None:
            extend_rotary_table(self._cos_sin, self.config, positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] to the residual stream float32 [T, E]."""
        return self.embed_tokens(token_ids)

    def forward_layers(self, residual: Tensor, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        """The residual stream through the layers of this stage, learned positions before and the norm after them."""
        if self.embed_positions is not None:
            residual = self.embed_positions.add_to(residual, batch.positions)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, cache, batch)
        return self.norm(residual) if self.is_last and self.norm is not None else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, E] to logits float32 [n, vocab]."""
        return self.head(hidden)

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """The hidden state of each sequence's last token, after the norm: float32 [S, E]."""
        return hidden.index_select(0, batch.query_start_loc[1:] - 1).float()


def decoder_fields(
    reader: ConfigReader,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    kv_heads: str | None = None,
) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all families have; the arguments are their names in config.json.

    Without ``kv_heads``, or where config.json lacks it, there are as many KV heads as query heads.

    Raises:
        ConfigError: a value is missing, of the wrong type or impossible.
    """
    size, count = reader.positive(hidden), reader.positive(heads)
    if size % count:
        raise ConfigError(f"{reader.file}: {hidden} ({size}) must be a multiple of {heads} ({count})")
    kv_count = reader.positive(kv_heads, count) if kv_heads else count
    if count % kv_count:
        raise ConfigError(f"{reader.file}: {heads} ({count}) must be a multiple of {kv_heads} ({kv_count})")
    return {
        "hidden_size": size,
        "num_layers": reader.positive(layers),
        "num_heads": count,
        "num_kv_heads": kv_count,
        "head_dim": size // count,
        **common_fields(reader),
    }


def rotary_fields(reader: ConfigReader, head_dim: int) -> dict[str, Any]:
    """``rope`` and ``max_position`` of families that rotate a share of each head.

    Raises:
        ConfigError: a value is impossible; the rotated dimensions are no pairs.
        UnsupportedModelError: the rope type is not supported.
    """
    rope = read_rope(reader)
    rotated = int(head_dim * rope.partial_rotary_factor)
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"{reader.file}: the rotated share of a head, partial_rotary_factor ({rope.partial_rotary_factor}) of "
            f"{head_dim} dimensions, must be an even number of them, not {rotated}"
        )
    return {"rope": rope, "max_position": longest_context(rope)}


def read_activation(reader: ConfigReader, name: str, default: str) -> Activation:
    """The activation that config.json names under ``name``.

    Raises:
        UnsupportedModelError: there is no such activation here.
    """
    value = reader.raw.get(name) or default
    if value not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"activation {name}={value!r} is not supported; supported: {supported}")
    return _ACTIVATIONS[value]
