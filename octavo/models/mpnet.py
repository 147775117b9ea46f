"""MPNet (Song et al. 2020): BERT with a relative position bias, which all layers share, beside learned positions."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.relative_bias import RelativeBias
from octavo.models.bert import BERT_NAMES
from octavo.models.checkpoint import Rename
from octavo.models.config_reader import ConfigReader, read_activation
from octavo.models.encoder import Encoder, EncoderConfig, encoder_fields


@dataclass(frozen=True)
class MPNetConfig(EncoderConfig):
    """With the number of buckets of distances."""

    buckets: int = 32


class MPNetModel(Encoder):
    """An encoder with learned positions and a bias by distance."""

    config: MPNetConfig
    checkpoint_map = (
        Rename(r"^(mpnet\.)?encoder\.relative_attention_bias\.", "model.relative_bias."),
        Rename(r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
        Rename(r"\.attention\.LayerNorm\.", ".attention_norm."),
        *BERT_NAMES,
    )

    def __init__(self, config: MPNetConfig, context: LayerContext) -> None:
        self._bias = RelativeBias(context, config.num_heads, config.buckets)
        super().__init__(config, context)
        self.attach("model.relative_bias", self._bias)

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        """Over the whole text."""
        spec = AttentionSpec(self.config.head_dim**-0.5, causal=False, bias=self._bias.bias)
        return Attention(self.config, context, spec)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> MPNetConfig:
        """The facts of a config.json."""
        rows = reader.positive("max_position_embeddings")
        first = 2  # whatever pad_token_id says, as in transformers
        return MPNetConfig(
            architecture=architecture,
            max_position=rows - first,
            position_rows=rows,
            position_offset=first,
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation=read_activation(reader, "hidden_act", "gelu"),
            dense_activation="tanh",
            buckets=reader.positive("relative_attention_num_buckets", 32),
            **encoder_fields(reader),
        )
