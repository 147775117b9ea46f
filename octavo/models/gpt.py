"""The decoders that descend from GPT: layer norms with biases, and feed-forward networks of two matrices.

Their checkpoints have names of their own for the same parts. Learned positions are model.embed_positions, the matrices
of a plain feed-forward network mlp.fc1 and mlp.fc2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import Activation
from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.mlp import MLP, GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.vocabulary import PositionEmbedding
from octavo.models.checkpoint import CheckpointEntry, Drop, Permute, Rename, Split, ungroup_heads
from octavo.models.decoder import Decoder, DecoderLayer
from octavo.models.llama import make_mlp

#: What the families call their parts. Old checkpoints hold masks and rotary tables; those with tied embeddings may hold
#: the head too.
GPT_NAMES: tuple[CheckpointEntry, ...] = (
    Drop(r"\.(attn|attention)\.(masked_bias|bias|embed_positions)$"),
    Drop(r"rotary_emb\.inv_freq$"),
    Rename(r"^embed_out\.", "lm_head."),
    Drop(r"^lm_head\.weight$"),
    Rename(r"^(transformer\.|gpt_neox\.)?(wte|word_embeddings|embed_in)\.", "model.embed_tokens."),
    Rename(r"^(transformer\.)?wpe\.", "model.embed_positions."),
    Rename(r"^(transformer\.|gpt_neox\.)?(ln_f|final_layer_norm)\.", "model.norm."),
    Rename(r"^(transformer\.h|h|gpt_neox\.layers|layers)\.", "model.layers."),
    Rename(r"\.(ln_1|ln_attn)\.", ".input_layernorm."),
    Rename(r"\.(ln_2|ln_mlp)\.", ".post_attention_layernorm."),
    Rename(r"\.(attn|attention|self_attention)\.", ".self_attn."),
    Rename(r"\.self_attn\.(c_proj|dense|out_proj)\.", ".self_attn.o_proj."),
    Rename(r"\.mlp\.(c_fc|fc_in|dense_h_to_4h)\.", ".mlp.fc1."),
    Rename(r"\.mlp\.(c_proj|fc_out|dense_4h_to_h)\.", ".mlp.fc2."),
)


def split_by_kv_head(config: ModelConfig) -> tuple[CheckpointEntry, ...]:
    """For checkpoints in which the rows of queries, keys and values are grouped by KV head."""
    order = ungroup_heads(config.num_heads, config.num_kv_heads)
    return Permute(r"\.query_key_value\.", order), Split("query_key_value", ("q_proj", "k_proj", "v_proj"))


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
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
    #: See ``GPTLayer``.
    layout: Literal["sequential", "parallel", "parallel, two norms"] = "sequential"
    #: Whether the feed-forward network has a gate, with silu, and is not ``activation`` between two matrices.
    gated_mlp: bool = False
    norm_bias: bool = True


class GPTLayer(DecoderLayer):
    """Attention and a feed-forward network, each added to the residual stream x; ``config.layout`` says how.

    - sequential: x + attention(norm(x)), and then x + mlp(other_norm(x)) of the sum.
    - parallel: x + attention(norm(x)) + mlp(norm(x)).
    - parallel, two norms: x + attention(norm(x)) + mlp(other_norm(x)).
    """

    def __init__(self, config: GPTConfig, attention: Attention, mlp: MLP | GatedMLP, norms: list[LayerNorm]) -> None:
        """``norms`` are one or two, as the layout has it."""
        super().__init__()
        self.is_sequential = config.layout == "sequential"
        self.attention_norm = self.mlp_norm = self.attach("input_layernorm", norms[0])
        self.attention = self.attach("self_attn", attention)
        if len(norms) > 1:
            self.mlp_norm = self.attach("post_attention_layernorm", norms[1])
        self.mlp = self.attach("mlp", mlp)

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """See ``DecoderLayer``."""
        x = self.attention_norm(residual)
        if self.is_sequential:
            residual = self.attention.add_to(residual, x, cache, batch)
            return self.mlp.add_to(residual, self.mlp_norm(residual))
        y = x if self.mlp_norm is self.attention_norm else self.mlp_norm(residual)
        return self.mlp.add_to(self.attention.add_to(residual, x, cache, batch), y)


class GPTDecoder(Decoder):
    """A decoder as its ``GPTConfig`` says."""

    checkpoint_map: tuple[CheckpointEntry, ...] = GPT_NAMES

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first and config.positions == "learned":
            table = PositionEmbedding(context, config.position_rows, config.hidden_size, config.position_offset)
            self.embed_positions = self.attach("model.embed_positions", table)

    def make_layer(self, index: int, config: Any, context: LayerContext) -> DecoderLayer:
        """Layer ``index`` of the network."""
        attention = self.make_attention(index, config, context)
        mlp: MLP | GatedMLP
        if config.gated_mlp:
            mlp = make_mlp(config, context)
        else:
            mlp = MLP(context, config.hidden_size, config.intermediate_size, config.mlp_bias, config.activation)
        norms = [self.make_norm(config, context) for _ in range(1 if config.layout == "parallel" else 2)]
        return self.layer_class(config)(config, attention, mlp, norms)

    def layer_class(self, config: Any) -> type[GPTLayer]:
        """The arithmetic of layers."""
        return GPTLayer

    def make_attention(self, index: int, config: Any, context: LayerContext) -> Attention:
        """The attention of layer ``index``."""
        slopes = rotary = None
        if config.positions == "alibi":
            slopes = tuple(config.alibi_factor * slope for slope in alibi_slopes(config.num_heads))
        if config.positions == "rotary":
            rotary = self.rotary_table(config, context)
        window = config.sliding_windows[index] if config.sliding_windows else None
        spec = AttentionSpec(config.head_dim**-0.5, window, alibi_slopes=slopes)
        return Attention(config, context, spec, rotary)

    def make_norm(self, config: Any, context: LayerContext) -> LayerNorm:
        """A norm of a layer, or that after the last one."""
        return LayerNorm(context, config.hidden_size, config.layer_norm_eps, bias=config.norm_bias)

    def make_final_norm(self, config: Any, context: LayerContext) -> LayerNorm | None:
        """As the norms of layers."""
        return self.make_norm(config, context)
