"""GPT-2 (Radford et al. 2019) and StarCoder: learned positions, and a norm before each part of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import CheckpointEntry, Permute, Split, Transform, transpose, ungroup_heads
from octavo.models.config_reader import ConfigReader, decoder_fields, read_activation
from octavo.models.gpt import GPT_NAMES, GPTConfig, GPTDecoder


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """Variations of the scale of scores."""

    #: Whether scores are divided by the root of the head size, and whether by the number of the layer, from 1.
    scale_by_head_size: bool = True
    scale_by_layer: bool = False


class GPT2LMHeadModel(GPTDecoder):
    """GPT-2; in its checkpoints, matrices are transposed, and queries, keys and values fused."""

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        *GPT_NAMES,
        Transform(r"\.(c_attn|o_proj|fc1|fc2)\.weight$", transpose),
        Split("c_attn", ("q_proj", "k_proj", "v_proj")),
    )

    def make_attention(self, index: int, config: GPT2Config, context: LayerContext) -> Attention:
        """With the scale of this layer."""
        scale = config.head_dim**-0.5 if config.scale_by_head_size else 1.0
        return Attention(config, context, AttentionSpec(scale / (index + 1) if config.scale_by_layer else scale))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json; the transposed layout of matrices is no choice of it."""
        reader = reader.with_defaults(tie_word_embeddings=True, scale_attn_weights=True)
        if reader.flag("add_cross_attention"):
            raise UnsupportedModelError(f"{reader.file}: add_cross_attention is not supported: there is no encoder")
        positions = reader.positive("n_positions", 1024)
        fields = decoder_fields(reader, hidden="n_embd", layers="n_layer", heads="n_head")
        return GPT2Config(
            architecture=architecture,
            intermediate_size=reader.positive("n_inner", 4 * fields["hidden_size"]),
            max_position=positions,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            layer_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation=read_activation(reader, "activation_function", "gelu_new"),
            positions="learned",
            position_rows=positions,
            scale_by_head_size=reader.flag("scale_attn_weights"),
            scale_by_layer=reader.flag("scale_attn_by_inverse_layer_idx"),
            **fields,
        )


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """StarCoder (Li et al. 2023): all query heads share a KV head, and matrices are not transposed.

    In checkpoints with a KV head for each query head, rows are grouped by head.
    """

    def __init__(self, config: GPT2Config, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (
            *GPT_NAMES,
            Permute(r"\.c_attn\.", ungroup_heads(config.num_heads, config.num_kv_heads)),
            Split("c_attn", ("q_proj", "k_proj", "v_proj")),
        )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """As GPT-2's, with the number of KV heads."""
        reader = reader.with_defaults(multi_query=True, activation_function="gelu_pytorch_tanh")
        config = super().read_config(architecture, reader)
        return replace(config, num_kv_heads=1) if reader.flag("multi_query") else config
