"""BERT (Devlin et al. 2019) and its relatives with learned positions: RoBERTa, XLM-R, CamemBERT and DistilBERT."""

from __future__ import annotations

from octavo.core.errors import UnsupportedModelError
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_reader import ConfigReader, read_activation
from octavo.models.encoder import Encoder, EncoderConfig, encoder_fields

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
