"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward network side by side, partly rotated heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import Drop, Rename, Split, Transform, ungroup_heads
from octavo.models.config import ConfigReader
from octavo.models.decoder import Decoder, DecoderConfig, PreNormLayer, decoder_fields, read_activation, rotary_fields


@dataclass(frozen=True)
class GPTNeoXConfig(DecoderConfig):
    """How a layer's two parts follow each other."""

    parallel_residual: bool = True


class GPTNeoXLayer(PreNormLayer):
    """x + attention(norm(x)) + mlp(other norm(x)), or one after the other."""

    def __init__(self, config: GPTNeoXConfig, context: LayerContext, index: int, cos_sin: Tensor | None) -> None:
        super().__init__(config, context, index, cos_sin)
        self.parallel_residual = config.parallel_residual

    def __call__(self, residual: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """See ``DecoderLayer``."""
        if not self.parallel_residual:
            return super().__call__(residual, cache, batch)
        x, y = self.attention_norm(residual), self.mlp_norm(residual)
        return self.mlp.add_to(self.attention.add_to(residual, x, cache, batch), y)


class GPTNeoXForCausalLM(Decoder):
    """GPT-NeoX; in its checkpoints, the rows of queries, keys and values are grouped by head."""

    layer_class = GPTNeoXLayer

    def __init__(self, config: GPTNeoXConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (
            Drop(r"\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)$"),
            Rename(r"^embed_out\.", "lm_head."),
            Rename(r"^(gpt_neox\.)?embed_in\.", "model.embed_tokens."),
            Rename(r"^(gpt_neox\.)?final_layer_norm\.", "model.norm."),
            Rename(r"^(gpt_neox\.)?layers\.", "model.layers."),
            Rename(r"\.attention\.dense\.", ".self_attn.o_proj."),
            Rename(r"\.attention\.", ".self_attn."),
            Rename(r"\.dense_h_to_4h\.", ".fc1."),
            Rename(r"\.dense_4h_to_h\.", ".fc2."),
            Transform(r"\.query_key_value\.", ungroup_heads(config.num_kv_heads, 1)),
            Split("query_key_value", ("q_proj", "k_proj", "v_proj")),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json, with the older names of rotary settings too."""
        rope = {
            "rope_theta": reader.raw.get("rotary_emb_base"),
            "partial_rotary_factor": reader.raw.get("rotary_pct", 0.25),
        }
        reader = reader.with_defaults(use_parallel_residual=True, attention_bias=True, **rope)
        bias = reader.flag("attention_bias")
        fields = decoder_fields(reader)
        return GPTNeoXConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu"),
            parallel_residual=reader.flag("use_parallel_residual"),
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )
