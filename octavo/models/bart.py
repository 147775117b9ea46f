"""BART (Lewis et al. 2019) and mBART (Liu et al. 2020)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from octavo.core.model_config import EncoderFacts, ModelConfig
from octavo.layers.layer import LayerContext
from octavo.layers.rope import SinusoidalPositions
from octavo.models.checkpoint import CheckpointEntry, Drop, Only, Rename, ZerosFor
from octavo.models.config_files import ConfigReader, decoder_fields, read_activation, read_token_ids
from octavo.models.encoder import EncoderConfig, EncoderDecoder, EncoderDecoderConfig, EncoderStack

#: The bias of the logits is zero in all families but Marian.
BART_NAMES: tuple[CheckpointEntry, ...] = (
    Drop(r"^final_logits_bias$"),
    Drop(r"^lm_head\.weight$"),
    Drop(r"^(model\.)?(encoder|decoder)\.(embed_tokens|version)"),
    Rename(r"^(model\.)?shared\.", "model.embed_tokens."),
    Rename(r"^(model\.)?encoder\.", "encoder."),
    Rename(r"^(model\.)?decoder\.", "model."),
    Rename(r"\.layernorm_embedding\.", ".embed_norm."),
    Rename(r"\.self_attn_layer_norm\.", ".attention_norm."),
    Rename(r"\.encoder_attn\.", ".cross_attn."),
    Rename(r"\.encoder_attn_layer_norm\.", ".cross_norm."),
    Rename(r"(layers\.\d+)\.final_layer_norm\.", r"\1.mlp_norm."),
    Rename(r"^(model|encoder)\.layer_norm\.", r"\1.norm."),
    Rename(r"\.out_proj\.", ".o_proj."),
    Rename(r"\.(fc[12])\.", r".mlp.\1."),
)

#: Settings of norms in an old config.json -> fields of ``EncoderDecoderConfig``.
_NORMS = {
    "normalize_before": "norm_first",
    "normalize_embedding": "embedding_norm",
    "add_final_layer_norm": "final_norm",
}
#: The first two rows of the tables of positions belong to padding.
_POSITION_OFFSET = 2


class BartForConditionalGeneration(EncoderDecoder):
    """BART: post-norms, also after the embedding; learned positions."""

    checkpoint_map = BART_NAMES
    #: Further fields of ``EncoderDecoderConfig``.
    norms: ClassVar[dict[str, bool]] = {}

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader.only("static_position_embeddings", False)
        positions = reader.positive("max_position_embeddings", 1024)
        rows = {"position_rows": positions + _POSITION_OFFSET, "position_offset": _POSITION_OFFSET}
        return encoder_decoder_config(architecture, reader, positions, embedding_norm=True, **rows, **cls.norms)


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """mBART: pre-norms, and a norm after the last layer."""

    norms: ClassVar = {"norm_first": True, "final_norm": True}


def encoder_decoder_config(
    architecture: str, reader: ConfigReader, positions: int, **values: Any
) -> EncoderDecoderConfig:
    """The configuration of a family with BART's names in config.json.

    ``positions`` bound the longest input and the longest output. ``values`` are further fields of
    ``EncoderDecoderConfig``; the positions and the norm of the embedding hold for its encoder too.
    """
    for name, field in _NORMS.items():
        reader.only(name, values.get(field, False))
    reader = reader.with_defaults(tie_word_embeddings=True)
    shared: dict[str, Any] = {
        "architecture": architecture,
        "max_position": positions,
        "activation": read_activation(reader, "activation_function", "gelu"),
        "layer_norm_eps": 1e-5,
    }
    encoder = EncoderConfig(
        intermediate_size=reader.positive("encoder_ffn_dim"),
        position_rows=values.get("position_rows", 0),
        position_offset=values.get("position_offset", 0),
        **shared,
        **decoder_fields(reader, hidden="d_model", layers="encoder_layers", heads="encoder_attention_heads", bias=True),
    )
    names = {"hidden": "d_model", "layers": "decoder_layers", "heads": "decoder_attention_heads"}
    fields = decoder_fields(reader, bias=True, **names)
    scale = math.sqrt(fields["hidden_size"]) if reader.flag("scale_embedding") else 1.0
    return EncoderDecoderConfig(
        intermediate_size=reader.positive("decoder_ffn_dim"),
        encoder=encoder,
        encoder_facts=read_encoder_facts(reader, positions),
        embedding_scale=scale,
        **shared,
        **fields,
        **values,
    )


def read_encoder_facts(reader: ConfigReader, max_tokens: int | None) -> EncoderFacts:
    """decoder_start_token_id and forced_bos_token_id, of generation_config.json first."""
    start = read_token_ids(reader, "decoder_start_token_id") or read_token_ids(reader, "bos_token_id") or (0,)
    return EncoderFacts(max_tokens, start[:1], read_token_ids(reader, "forced_bos_token_id")[:1])


class SinusoidalEncoderDecoder(EncoderDecoder):
    """BART with computed (sinusoidal) positions, which the checkpoint may hold too, and a bias of the logits."""

    checkpoint_map = (
        Drop(r"\.embed_positions\.weight$"),
        Rename(r"^final_logits_bias$", "lm_head.bias"),
        Only(r"^lm_head\.bias$"),
        ZerosFor(r"^lm_head\.bias$"),
        *BART_NAMES,
    )
    norms: ClassVar[dict[str, bool]] = {}

    def __init__(self, config: EncoderDecoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        table = SinusoidalPositions(context, config.max_position, config.hidden_size)
        self.embed_positions = self.attach("model.embed_positions", table)

    def make_encoder(self, config: EncoderDecoderConfig, context: LayerContext) -> EncoderStack:
        encoder = super().make_encoder(config, context)
        table = SinusoidalPositions(context, config.encoder.max_position, config.encoder.hidden_size)
        encoder.embed_positions = encoder.attach("embed_positions", table)
        return encoder

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        for name in ("static_position_embeddings", "share_encoder_decoder_embeddings"):
            reader.only(name, True)
        reader.only("decoder_vocab_size", reader.positive("vocab_size"))
        positions = reader.positive("max_position_embeddings", 1024)
        return encoder_decoder_config(architecture, reader, positions, head_bias=True, **cls.norms)


class MarianMTModel(SinusoidalEncoderDecoder):
    """Marian (Junczys-Dowmunt et al. 2018): post-norms."""


class PegasusForConditionalGeneration(SinusoidalEncoderDecoder):
    """Pegasus (Zhang et al. 2020): pre-norms, and a norm after the last layer."""

    norms: ClassVar = {"norm_first": True, "final_norm": True}
