"""BERT (Devlin et al. 2019) and its relatives with learned positions: RoBERTa, XLM-R, CamemBERT and DistilBERT."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import RopeConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention, RelativeBias
from octavo.layers.layer import LayerContext, LayerNorm
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.encoder import Encoder, EncoderConfig, PreNormLayer, encoder_fields

#: The names of BERT's parts. Heads of language models and, without a classification head, the pooler are not used.
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
    Rename(r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    Rename(r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    Rename(r"\.attention\.self\.value\.", ".self_attn.v_proj."),
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
    """An encoder with learned positions and segments."""

    checkpoint_map = BERT_NAMES

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        """The facts of a config.json."""
        kind = reader.raw.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise UnsupportedModelError(f"position_embedding_type={kind!r} is not supported; supported: absolute")
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
        """The row of the table of positions that is position 0."""
        return 0


class RobertaModel(BertModel):
    """As BERT, with positions that begin behind the padding token's."""

    @classmethod
    def first_position(cls, reader: ConfigReader) -> int:
        """See ``BertModel``."""
        padding = reader.raw.get("pad_token_id")
        return 1 + (padding if isinstance(padding, int) else 1)


class DistilBertModel(BertModel):
    """BERT without segments and with half of its layers (Sanh et al. 2019)."""

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
        """The facts of a config.json."""
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


# MPNet (Song et al. 2020): BERT with a relative position bias, which all layers share, beside learned positions.


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


# NomicBERT (Nussbaum et al. 2024): BERT with rotary positions and gated networks, as nomic-embed-text.

#: Names in configurations that were written for the model's own code, and those of transformers.
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
#: Settings of that code, and the values that nomic-embed-text has.
_FIXED = {
    "prenorm": (False,),
    "parallel_block": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "use_rms_norm": (False, None),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "activation_function": ("swiglu",),
    "hidden_act": ("silu", "swiglu"),
    "rotary_scaling_factor": (None, 1, 1.0),
    "moe_every_n_layers": (None, 0),
    "num_experts": (None, 0),
}


class NomicBertModel(Encoder):
    """An encoder with norms after what is added, without biases but in the norms."""

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
        """Over the whole text; positions are rotary."""
        config = self.config
        spec = AttentionSpec(config.head_dim**-0.5, causal=False)
        return Attention(config, context, spec, self.rotary_table(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        """The facts of a config.json, of transformers or of the model's own code."""
        for name, allowed in _FIXED.items():
            if (value := reader.raw.get(name, allowed[0])) not in allowed:
                raise UnsupportedModelError(f"{name}={value!r} is not supported; supported: {allowed[0]}")
        reader = reader.with_defaults(
            **{new: reader.raw[old] for old, new in _OLD_NAMES.items() if reader.raw.get(old) is not None}
        )
        longest = reader.positive("max_position_embeddings")
        rope = ConfigReader(reader.table("rope_parameters"), reader.file)
        fields = encoder_fields(reader)
        fields |= {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
        return EncoderConfig(
            architecture=architecture,
            max_position=longest,
            type_rows=reader.positive("type_vocab_size", 2),
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation="silu",
            gated_mlp=True,
            rope=RopeConfig(
                theta=rope.number("rope_theta", reader.number("rotary_emb_base", 1000.0)),
                scaling={"max_position_embeddings": longest},
            ),
            dense_activation="tanh",
            **fields,
        )


# ModernBERT (Warner et al. 2024): rotary positions, gated networks, and layers that see a window of the text only.


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
