"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, Li et al. 2023): GPT-J's layer with biases everywhere."""

from __future__ import annotations

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import Rename
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation, rotary_fields
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder


class PhiForCausalLM(GPTDecoder):
    """Phi-1 to Phi-2."""

    checkpoint_map = (*GPT_NAMES, Rename(r"^(model\.)?final_layernorm\.", "model.norm."))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        if reader.flag("qk_layernorm"):
            raise UnsupportedModelError(f"{reader.file}: qk_layernorm=true is not supported")
        reader = reader.with_defaults(partial_rotary_factor=0.5, max_position_embeddings=2048)
        fields = decoder_fields(reader, kv_heads="num_key_value_heads")
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size", 4 * fields["hidden_size"]),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            head_bias=True,
            layout="parallel",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu_new"),
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )
