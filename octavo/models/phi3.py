"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama with fused matrices, longer contexts by LongRoPE, and a window."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import Split
from octavo.models.config_reader import ConfigReader, refuse_activations, rotary_fields, shape_fields
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
        fields = shape_fields(reader)
        fields |= rotary_fields(reader, fields["head_dim"])
        window = reader.positive("sliding_window", fields["max_position"])
        return ModelConfig(
            architecture=architecture,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
            sliding_windows=(window if window < fields["max_position"] else None,) * fields["num_layers"],
            **fields,
        )
