"""BERT (Devlin et al. 2019) and the encoders that descend from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import RopeConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention, RelativeBias
from octavo.layers.layer import LayerContext, LayerNorm
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split, ZerosFor
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.encoder import Encoder, EncoderConfig, EncoderPreNormLayer, encoder_fields

#: Heads of language models are not used; without a classification head, neither is the pooler.
BERT_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"\.gamma$", ".weight"),
    Rename(r"\.beta$", ".bias"),
    Drop(r"position_ids$"),
    Drop(r"^(cls|lm_head|qa_outputs|vocab_\w+)\."),
    Rename(r"^(bert|roberta|distilbert|mpnet|nomic_bert)\.", ""),
    Rename(r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
    Rename(r"^embeddings\.position_embeddings\.", "model.embed_positions."),
    Rename(r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
    Rename(r"^embeddings\.LayerNorm\.", "model.embed_norm."),
    Rename(r"^(encoder|transformer)\.layer\.", "model.layers."),
    Rename(r"\.attention\.self\.([qkv])\w+\.", r".self_attn.\1_proj."),
    Rename(r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    Rename(r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    Rename(r"\.intermediate\.dense\.", ".mlp.fc1."),
    Rename(r"(layers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    Rename(r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.mlp_norm."),
    Rename(r"^classifier\.dense\.", "head.dense."),
    Rename(r"^classifier\.out_proj\.", "head.out."),
    Rename(r"^classifier\.", "head.out."),
    Rename(r"^pooler\.dense\.", "head.dense."),
    Drop(r"^head\."),
)


class BertModel(Encoder):
    """BERT: post-norms, learned positions, and segments."""

    checkpoint_map = BERT_NAMES

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        reader.only("position_embedding_type", "absolute")
        rows, first = reader.positive("max_position_embeddings"), cls.first_position(reader)
        return EncoderConfig(
            architecture=architecture,
            max_position=rows - first,
            position_rows=rows,
            position_offset=first,
            type_rows=reader.positive("type_vocab_size", 2),
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation=read_activation(reader, "hidden_act", "gelu"),
            dense_activation="tanh",
            **encoder_fields(reader),
        )

    @classmethod
    def first_position(cls, reader: ConfigReader) -> int:
        """The row of the position table for position 0."""
        return 0


class RobertaModel(BertModel):
    """RoBERTa, XLM-R and CamemBERT: positions begin after the padding token's id."""

    @classmethod
    def first_position(cls, reader: ConfigReader) -> int:
        padding = reader.raw.get("pad_token_id")
        return 1 + (padding if isinstance(padding, int) else 1)


class DistilBertModel(BertModel):
    """DistilBERT (Sanh et al. 2019): half of the layers, no segments."""

    checkpoint_map = (
        Rename(r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
        Rename(r"\.attention\.out_lin\.", ".self_attn.o_proj."),
        Rename(r"\.sa_layer_norm\.", ".attention_norm."),
        Rename(r"\.ffn\.lin(\d)\.", r".mlp.fc\1."),
        Rename(r"\.output_layer_norm\.", ".mlp_norm."),
        Rename(r"^pre_classifier\.", "head.dense."),
        *BERT_NAMES,
    )

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        rows = reader.positive("max_position_embeddings")
        return EncoderConfig(
            max_position=rows,
            position_rows=rows,
            intermediate_size=reader.positive("hidden_dim"),
            activation=read_activation(reader, "activation", "gelu"),
            dense_activation="relu",
            architecture=architecture,
            **encoder_fields(reader, hidden="dim", layers="n_layers", heads="n_heads"),
        )


@dataclass(frozen=True)
class MPNetConfig(EncoderConfig):
    #: Of distances in the relative position bias.
    buckets: int = 32


class MPNetModel(Encoder):
    """MPNet (Song et al. 2020): learned positions, and a relative position bias that all layers share."""

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
        spec = AttentionSpec(self.config.head_dim**-0.5, causal=False, bias=self._bias.bias)
        return Attention(self.config, context, spec)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> MPNetConfig:
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


#: Names of config.json for NomicBERT's own code -> those of transformers.
_OLD_NAMES = {
    **{"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    **{"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
    "layer_norm_epsilon": "layer_norm_eps",
}
#: Settings of that code -> the supported values, those of nomic-embed-text.
_FIXED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("prenorm", "parallel_block", "rotary_emb_interleaved"), (False,)),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False,)),
    **{"rotary_emb_fraction": (1, 1.0), "rotary_emb_scale_base": (None,), "rotary_scaling_factor": (None, 1, 1.0)},
    **{"use_rms_norm": (False, None), "activation_function": ("swiglu",), "hidden_act": ("silu", "swiglu")},
    **dict.fromkeys(("moe_every_n_layers", "num_experts"), (None, 0)),
}


class NomicBertModel(Encoder):
    """NomicBERT (Nussbaum et al. 2024): rotary positions, gated MLPs, biases only in the norms."""

    checkpoint_map = (
        Rename(r"^(nomic_bert\.)?emb_ln\.", "embeddings.LayerNorm."),
        Rename(r"^(nomic_bert\.)?(encoder\.)?layers\.", "model.layers."),
        Rename(r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        Rename(r"\.attn\.Wqkv\.", ".self_attn.Wqkv."),
        Split("Wqkv", ("q_proj", "k_proj", "v_proj")),
        Rename(r"\.(norm1|post_attention_layernorm)\.", ".attention_norm."),
        Rename(r"\.(norm2|post_mlp_layernorm)\.", ".mlp_norm."),
        Rename(r"\.mlp\.fc11\.", ".mlp.up_proj."),
        Rename(r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        Rename(r"\.mlp\.fc2\.", ".mlp.down_proj."),
        *BERT_NAMES,
    )

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        config = self.config
        spec = AttentionSpec(config.head_dim**-0.5, causal=False)
        return Attention(config, context, spec, self.rotary_table(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        for name, allowed in _FIXED.items():
            reader.only(name, *allowed)
        reader = reader.with_defaults(
            **{new: reader.raw[old] for old, new in _OLD_NAMES.items() if reader.raw.get(old) is not None}
        )
        longest = reader.positive("max_position_embeddings")
        rope = ConfigReader(reader.table("rope_parameters"), reader.file)
        theta = rope.number("rope_theta", reader.number("rotary_emb_base", 1000.0))
        return EncoderConfig(
            architecture=architecture,
            max_position=longest,
            type_rows=reader.positive("type_vocab_size", 2),
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation="silu",
            gated_mlp=True,
            rope=RopeConfig(theta=theta, scaling={"max_position_embeddings": longest}),
            dense_activation="tanh",
            **encoder_fields(reader, bias=False),
        )


class JinaEmbeddingsV3Model(Encoder):
    """The network of jina-embeddings-v3 (arXiv 2409.10173): XLM-R with rotary instead of learned positions.

    The LoRA adapters of its tasks are checkpoints of their own.
    """

    checkpoint_map: tuple[CheckpointEntry, ...] = (
        Rename(r"^(roberta|gte|new)\.", ""),
        Rename(r"^emb_ln\.", "embeddings.LayerNorm."),
        Rename(r"^(encoder\.)?layers?\.", "model.layers."),
        Rename(r"\.mixer\.Wqkv\.|\.attention\.qkv_proj\.", ".self_attn.Wqkv."),
        Split("Wqkv", ("q_proj", "k_proj", "v_proj")),
        Rename(r"\.mixer\.out_proj\.|\.attention\.o_proj\.", ".self_attn.o_proj."),
        Rename(r"\.(norm1|attn_ln|post_attention_layernorm)\.", ".attention_norm."),
        Rename(r"\.(norm2|mlp_ln|post_mlp_layernorm)\.", ".mlp_norm."),
        *BERT_NAMES,
    )
    #: ``rope_theta`` where config.json has none.
    rope_theta = 20_000.0
    gated_mlp = False

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        config = self.config
        spec = AttentionSpec(config.head_dim**-0.5, causal=False)
        return Attention(config, context, spec, self.rotary_table(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        longest = reader.positive("max_position_embeddings")
        reader.only("rope_scaling", None)
        rope = ConfigReader(reader.table("rope_parameters"), reader.file)
        theta = rope.number("rope_theta", reader.number("rope_theta", cls.rope_theta))
        return EncoderConfig(
            architecture=architecture,
            max_position=longest,
            type_rows=0 if reader.raw.get("type_vocab_size") == 0 else reader.positive("type_vocab_size", 1),
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-5),
            activation=read_activation(reader, "hidden_act", "gelu"),
            gated_mlp=cls.gated_mlp,
            rope=RopeConfig(theta=theta, scaling={"max_position_embeddings": longest}),
            dense_activation="tanh",
            **encoder_fields(reader),
        )


class GteModel(JinaEmbeddingsV3Model):
    """GTE (mGTE, arXiv 2407.19669): as jina-embeddings-v3, with gated MLPs whose biases are those of the output."""

    checkpoint_map = (
        *JinaEmbeddingsV3Model.checkpoint_map,
        Split("up_gate_proj", ("up_proj", "gate_proj")),
        ZerosFor(r"\.mlp\.(gate|up)_proj\.bias$"),
    )
    rope_theta = 160_000.0
    gated_mlp = True


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    #: Of layers with a window; ``sliding_windows`` are tokens on each side.
    local_rope: RopeConfig = field(default_factory=RopeConfig)


class ModernBertModel(Encoder):
    """ModernBERT (Warner et al. 2024): pre-norms, rotary positions, gated MLPs, and layers with a window.

    The first layer has no norm before attention, as its input is normalised.
    """

    config: ModernBertConfig
    layer_class = EncoderPreNormLayer
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
        config, window = self.config, self.config.sliding_windows[index]
        rotary = self.rotary_table(config if window is None else replace(config, rope=config.local_rope), context)
        spec = AttentionSpec(config.head_dim**-0.5, window, causal=False)
        return Attention(config, context, spec, rotary)

    def make_attention_norm(self, index: int, context: LayerContext) -> LayerNorm | None:
        return self.make_norm(context) if index else None

    def make_final_norm(self, context: LayerContext) -> LayerNorm | None:
        return self.make_norm(context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModernBertConfig:
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
    """The RoPE of one layer type, in the spelling of transformers 5 or 4."""
    new = reader.table("rope_parameters").get(layers)
    inside = ConfigReader(new if isinstance(new, dict) else {}, reader.file)
    return RopeConfig(
        theta=inside.number("rope_theta", reader.number(old_name, theta)), scaling={"max_position_embeddings": longest}
    )
