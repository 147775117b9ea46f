"""GPT-J (Wang & Komatsuzaki 2021): one norm for attention and feed-forward network, which are side by side."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import Permute, halve_pairs
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder


class GPTJForCausalLM(GPTDecoder):
    """GPT-J; in its checkpoints, neighbouring dimensions of a head are rotated together."""

    def __init__(self, config: GPTConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        rotated = int(config.head_dim * config.rope.partial_rotary_factor)
        self.checkpoint_map = (
            *GPT_NAMES,
            Permute(r"\.[qk]_proj\.weight$", halve_pairs(config.num_heads, rotated)),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        fields = decoder_fields(reader, hidden="n_embd", layers="n_layer", heads="n_head")
        head_dim, rotated = fields["head_dim"], reader.positive("rotary_dim", 64)
        if rotated > head_dim or rotated % 2:
            raise ConfigError(f"{reader.file}: rotary_dim must be even and at most {head_dim}, not {rotated}")
        positions = reader.positive("n_positions", 2048)
        return GPTConfig(
            architecture=architecture,
            intermediate_size=reader.positive("n_inner", 4 * fields["hidden_size"]),
            max_position=positions,
            mlp_bias=True,
            layout="parallel",
            head_bias=True,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation_function", "gelu_new"),
            # A little more than the share, which may be rounded down.
            rope=RopeConfig(partial_rotary_factor=min(1.0, (rotated + 0.5) / head_dim)),
            **fields,
        )
