"""Falcon (Almazrouei et al. 2023), in its three forms of attention and of layers.

Attention has a KV head for all query heads (7B), for groups of them (40B, 11B) or for each (RW). A layer has its two
parts side by side, behind one norm or one each, or one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.models.checkpoint import Drop, Rename, Split, Transform, ungroup_heads
from octavo.models.config import ConfigReader
from octavo.models.decoder import Decoder, DecoderConfig, DecoderLayer, decoder_fields, read_activation, rotary_fields


@dataclass(frozen=True)
class FalconConfig(DecoderConfig):
    """The form of the layers."""

    #: x + attention(norm(x)) + mlp(norm(x)); the same with two norms of x; or x + attention(norm(x)) and then
    #: x + mlp(norm(x)).
    form: Literal["one norm", "two norms", "sequential"] = "one norm"


class FalconLayer(DecoderLayer):
    """Attention and a feed-forward network, side by side or one after the other."""

    def __init__(self, config: FalconConfig, context: LayerContext, index: int, cos_sin: Tensor | None) -> None:
        super().__init__(config, context, index, cos_sin)
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        slopes = None
        if config.positions == "alibi":
            # Added before the scores are scaled.
            slopes = tuple(slope * config.head_dim**-0.5 for slope in alibi_slopes(config.num_heads))
        self.form = config.form
        self.attention_norm = self.attach("input_layernorm", LayerNorm(context, hidden, eps))
        self.attention = self.attach("self_attn", Attention(config, context, cos_sin=cos_sin, alibi_slopes=slopes))
        if config.form != "one norm":
            self.mlp_norm = self.attach("post_attention_layernorm", LayerNorm(context, hidden, eps))
        self.mlp = self.attach("mlp", MLP(context, hidden, inner, config.mlp_bias, config.activation))

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """See ``DecoderLayer``."""
        x = self.attention_norm(residual)
        if self.form == "sequential":
            residual = self.attention.add_to(residual, x, cache, batch)
            return self.mlp.add_to(residual, self.mlp_norm(residual))
        y = self.mlp_norm(residual) if self.form == "two norms" else x
        return self.mlp.add_to(self.attention.add_to(residual, x, cache, batch), y)


class FalconForCausalLM(Decoder):
    """Falcon; in its checkpoints, the rows of queries, keys and values are grouped by KV head."""

    layer_class = FalconLayer

    def __init__(self, config: FalconConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (
            Drop(r"^lm_head\.weight$"),
            Drop(r"rotary_emb\.inv_freq$"),
            Rename(r"^(transformer\.)?word_embeddings\.", "model.embed_tokens."),
            Rename(r"^(transformer\.)?ln_f\.", "model.norm."),
            Rename(r"^(transformer\.)?h\.", "model.layers."),
            Rename(r"\.ln_attn\.", ".input_layernorm."),
            Rename(r"\.ln_mlp\.", ".post_attention_layernorm."),
            Rename(r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            Rename(r"\.self_attention\.", ".self_attn."),
            Rename(r"\.dense_h_to_4h\.", ".fc1."),
            Rename(r"\.dense_4h_to_h\.", ".fc2."),
            Transform(
                r"\.query_key_value\.", ungroup_heads(config.num_kv_heads, config.num_heads // config.num_kv_heads)
            ),
            Split("query_key_value", ("q_proj", "k_proj", "v_proj")),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        reader = reader.with_defaults(
            tie_word_embeddings=True, multi_query=True, parallel_attn=True, max_position_embeddings=2048
        )
        fields = decoder_fields(reader)
        heads, bias = fields["num_heads"], reader.flag("bias")
        if reader.flag("new_decoder_architecture"):
            fields["num_kv_heads"] = reader.positive("num_kv_heads", heads)
        elif reader.flag("multi_query"):
            fields["num_kv_heads"] = 1
        if heads % fields["num_kv_heads"]:
            raise ConfigError(
                f"{reader.file}: num_attention_heads ({heads}) must be a multiple of num_kv_heads "
                f"({fields['num_kv_heads']})"
            )
        positions: dict[str, Any]
        if reader.flag("alibi"):
            positions = {"positions": "alibi", "max_position": reader.positive("max_position_embeddings")}
        else:
            positions = rotary_fields(reader, fields["head_dim"])
        return FalconConfig(
            architecture=architecture,
            intermediate_size=reader.positive("ffn_hidden_size", 4 * fields["hidden_size"]),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation", "gelu"),
            form=_form(reader),
            **positions,
            **fields,
        )


def _form(reader: ConfigReader) -> Literal["one norm", "two norms", "sequential"]:
    is_new = reader.flag("new_decoder_architecture")
    if not reader.flag("parallel_attn"):
        if is_new:
            raise UnsupportedModelError(
                f"{reader.file}: parallel_attn=false with new_decoder_architecture=true is not supported"
            )
        return "sequential"
    return "two norms" if is_new and reader.positive("num_ln_in_parallel_attn", 2) == 2 else "one norm"
