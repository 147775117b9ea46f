"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward network side by side, partly rotated heads."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation, rotary_fields
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder, split_by_kv_head


class GPTNeoXForCausalLM(GPTDecoder):
    """GPT-NeoX; in its checkpoints, the rows of queries, keys and values are grouped by head."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (*GPT_NAMES, *split_by_kv_head(config))

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
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu"),
            layout="parallel, two norms" if reader.flag("use_parallel_residual") else "sequential",
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )
