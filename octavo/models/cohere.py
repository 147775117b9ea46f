"""Command R (Cohere 2024): attention and a gated feed-forward network side by side, norms without biases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import Permute, Transform, halve_pairs
from octavo.models.config_reader import ConfigReader, decoder_fields, refuse_activations, rotary_fields
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder


@dataclass(frozen=True)
class CohereConfig(GPTConfig):
    """The scale of logits."""

    logit_scale: float = 0.0625


class CohereForCausalLM(GPTDecoder):
    """Command R; in its checkpoints, neighbouring dimensions of a head are rotated together."""

    def __init__(self, config: CohereConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        rotated = config.head_dim
        # Vectors and class scores are made of the norm itself.
        scale = config.logit_scale if config.head == "lm" else 1.0
        self.checkpoint_map = (
            *GPT_NAMES,
            Permute(r"\.q_proj\.(weight|bias)$", halve_pairs(config.num_heads, rotated)),
            Permute(r"\.k_proj\.(weight|bias)$", halve_pairs(config.num_kv_heads, rotated)),
            # The head is linear in the norm before it, so that its scale is the logits'.
            Transform(
                r"^model\.norm\.weight$",
                lambda weight: weight * np.float32(scale),
            ),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        refuse_activations(reader, "silu", "swish")
        if reader.flag("use_qk_norm"):
            raise UnsupportedModelError(f"{reader.file}: use_qk_norm=true (Command R+) is not supported")
        reader = reader.with_defaults(tie_word_embeddings=True, rope_theta=500000.0, max_position_embeddings=8192)
        fields, bias = decoder_fields(reader, kv_heads="num_key_value_heads"), reader.flag("attention_bias")
        fields |= rotary_fields(reader, fields["head_dim"])
        # The longest context of the published files; max_position_embeddings is that of the first training.
        fields["max_position"] = reader.positive("model_max_length", fields["max_position"])
        return CohereConfig(
            architecture=architecture,
            intermediate_size=reader.positive("intermediate_size"),
            qkv_bias=bias,
            o_bias=bias,
            gated_mlp=True,
            norm_bias=False,
            layout="parallel",
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            logit_scale=reader.number("logit_scale", 0.0625),
            **fields,
        )
