"""Falcon (Almazrouei et al. 2023), in its three forms of attention and of layers.

Attention has a KV head for all query heads (7B), for groups of them (40B, 11B) or for each (RW). A layer has its two
parts side by side, behind one norm or one each, or one after the other.
"""

from __future__ import annotations

from typing import Literal

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation, rotary_fields
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder, split_by_kv_head


class FalconForCausalLM(GPTDecoder):
    """Falcon; in its checkpoints, the rows of queries, keys and values are grouped by KV head."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (*GPT_NAMES, *split_by_kv_head(config))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        reader = reader.with_defaults(
            tie_word_embeddings=True, multi_query=True, parallel_attn=True, max_position_embeddings=2048
        )
        is_new = reader.flag("new_decoder_architecture")
        fields = decoder_fields(reader, kv_heads="num_kv_heads" if is_new else None)
        head_dim, bias = fields["head_dim"], reader.flag("bias")
        if reader.flag("multi_query") and not is_new:
            fields["num_kv_heads"] = 1
        if reader.flag("alibi"):
            # The slopes are added before the scores are scaled.
            fields |= {"positions": "alibi", "alibi_factor": head_dim**-0.5}
            fields["max_position"] = reader.positive("max_position_embeddings")
        else:
            fields |= rotary_fields(reader, head_dim)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("ffn_hidden_size", 4 * fields["hidden_size"]),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation", "gelu"),
            layout=_layout(reader),
            **fields,
        )


def _layout(reader: ConfigReader) -> Literal["sequential", "parallel", "parallel, two norms"]:
    is_new = reader.flag("new_decoder_architecture")
    if not reader.flag("parallel_attn"):
        if is_new:
            raise UnsupportedModelError(
                f"{reader.file}: parallel_attn=false with new_decoder_architecture=true is not supported"
            )
        return "sequential"
    return "parallel, two norms" if is_new and reader.positive("num_ln_in_parallel_attn", 2) == 2 else "parallel"
