"""StableLM (Bellagente et al. 2024): Llama's layer with layer norms, partly rotated heads, and a parallel variant."""

from __future__ import annotations

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.models.config_reader import ConfigReader, decoder_fields, refuse_activations, rotary_fields
from octavo.models.gpt import GPTConfig, GPTDecoder


class StableLmForCausalLM(GPTDecoder):
    """StableLM."""

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        refuse_activations(reader, "silu", "swish")
        if reader.flag("qk_layernorm"):
            raise UnsupportedModelError(f"{reader.file}: qk_layernorm=true (StableLM 2 12B) is not supported")
        reader = reader.with_defaults(partial_rotary_factor=0.25)
        fields = decoder_fields(reader, kv_heads="num_key_value_heads")
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=reader.flag("use_qkv_bias"),
            gated_mlp=True,
            layout="parallel" if reader.flag("use_parallel_residual") else "sequential",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            **rotary_fields(reader, fields["head_dim"]),
            **fields,
        )
