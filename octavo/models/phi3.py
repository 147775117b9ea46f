"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama with fused matrices, longer contexts by LongRoPE, and a window."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import Split
from octavo.models.config import ConfigReader, common_fields, refuse_activations, rotary_fields
from octavo.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """The network is Llama's; its checkpoints fuse what has the same input."""

    checkpoint_map = (
        *LlamaForCausalLM.checkpoint_map,
        Split("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        Split("gate_up_proj", ("gate_proj", "up_proj")),
    )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        refuse_activations(reader, "silu", "swish")
        scaling = reader.table("rope_scaling")
        if scaling.get("type") in ("su", "yarn"):  # names of LongRoPE in older files
            reader = replace(reader, raw={**reader.raw, "rope_scaling": {**scaling, "type": "longrope"}})
        heads, hidden = reader.positive("num_attention_heads"), reader.positive("hidden_size")
        layers, kv_heads = reader.positive("num_hidden_layers"), reader.positive("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        head_dim = reader.positive("head_dim", hidden // heads or 1)
        positions = rotary_fields(reader, head_dim)
        window = reader.positive("sliding_window", positions["max_position"])
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
            sliding_windows=(window if window < positions["max_position"] else None,) * layers,
            **positions,
            **common_fields(reader),
        )
