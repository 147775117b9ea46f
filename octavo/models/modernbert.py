"""ModernBERT (Warner et al. 2024): rotary positions, gated networks, and layers that see a window of the text only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import RopeConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.norm import LayerNorm
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split
from octavo.models.config_reader import ConfigReader, read_activation
from octavo.models.encoder import Encoder, EncoderConfig, PreNormLayer, encoder_fields


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """With ``sliding_windows`` of tokens on each side, whose layers have positions of their own."""

    local_rope: RopeConfig = field(default_factory=RopeConfig)


class ModernBertModel(Encoder):
    """An encoder with its norms before what is added; the first layer has none, as its input is normalised."""

    config: ModernBertConfig
    layer_class = PreNormLayer
    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Drop(r"^decoder\."),
        Rename(r"^(model\.)?embeddings\.tok_embeddings\.", "model.embed_tokens."),
        Rename(r"^(model\.)?embeddings\.norm\.", "model.embed_norm."),
        Rename(r"^(model\.)?layers\.", "model.layers."),
        Rename(r"^(model\.)?final_norm\.", "model.norm."),
        Rename(r"\.attn_norm\.", ".attention_norm."),
        Rename(r"\.attn\.Wo\.", ".self_attn.o_proj."),
        Rename(r"\.attn\.Wqkv\.", ".self_attn.Wqkv."),
        Split("Wqkv", ("q_proj", "k_proj", "v_proj")),
        Rename(r"\.mlp\.Wo\.", ".mlp.down_proj."),
        Split("Wi", ("gate_proj", "up_proj")),
        Rename(r"^classifier\.", "head.out."),
        Drop(r"^head\."),
    )

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        """Over the whole text, or ``window`` tokens on each side; positions are rotary."""
        config, window = self.config, self.config.sliding_windows[index]
        rotary = self.rotary_table(config if window is None else replace(config, rope=config.local_rope), context)
        spec = AttentionSpec(config.head_dim**-0.5, window, causal=False)
        return Attention(config, context, spec, rotary)

    def make_attention_norm(self, index: int, context: LayerContext) -> LayerNorm | None:
        """None in the first layer."""
        return self.make_norm(context) if index else None

    def make_final_norm(self, context: LayerContext) -> LayerNorm | None:
        """As the norms of layers."""
        return self.make_norm(context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModernBertConfig:
        """The facts of a config.json."""
        fields = encoder_fields(reader)
        longest, layers = reader.positive("max_position_embeddings"), fields["num_layers"]
        bias = reader.flag("attention_bias")
        fields |= {"qkv_bias": bias, "o_bias": bias, "mlp_bias": reader.flag("mlp_bias")}
        types = reader.raw.get("layer_types")
        if types is None:
            every = reader.positive("global_attn_every_n_layers", 3)
            types = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        window = reader.positive("local_attention", 128) // 2
        if not window:
            raise UnsupportedModelError(f"{reader.file}: local_attention must be at least 2, not 1")
        return ModernBertConfig(
            architecture=architecture,
            max_position=longest,
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("norm_eps", 1e-5),
            norm_bias=reader.flag("norm_bias"),
            activation=read_activation(reader, "hidden_activation", "gelu"),
            gated_mlp=True,
            sliding_windows=tuple(window if name == "sliding_attention" else None for name in types),
            rope=_rope(reader, "full_attention", "global_rope_theta", 160_000.0, longest),
            local_rope=_rope(reader, "sliding_attention", "local_rope_theta", 10_000.0, longest),
            dense_activation=read_activation(reader, "classifier_activation", "gelu"),
            dense_for_tokens=True,
            dense_bias=reader.flag("classifier_bias"),
            dense_norm=True,
            **fields,
        )


def _rope(reader: ConfigReader, layers: str, old_name: str, theta: float, longest: int) -> RopeConfig:
    """The positions of a kind of layers, as transformers 5 or 4 names them."""
    new = reader.table("rope_parameters").get(layers)
    inside = ConfigReader(new if isinstance(new, dict) else {}, reader.file)
    return RopeConfig(
        theta=inside.number("rope_theta", reader.number(old_name, theta)),
        scaling={"max_position_embeddings": longest},
    )
