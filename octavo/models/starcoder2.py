"""StarCoder2 (Lozhkov et al. 2024): rotary positions, grouped heads and a window between plain layer norms."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation, rotary_fields
from octavo.models.gpt import GPTConfig, GPTDecoder


class Starcoder2ForCausalLM(GPTDecoder):
    """StarCoder2."""

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        reader = reader.with_defaults(tie_word_embeddings=True, use_bias=True, max_position_embeddings=4096)
        fields, bias = decoder_fields(reader, kv_heads="num_key_value_heads"), reader.flag("use_bias")
        fields |= rotary_fields(reader, fields["head_dim"])
        window = reader.positive("sliding_window", fields["max_position"])
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            layer_norm_eps=reader.number("norm_epsilon", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
            sliding_windows=(window if window < fields["max_position"] else None,) * fields["num_layers"],
            **fields,
        )
