"""Marian's translators (Junczys-Dowmunt et al. 2018) and Pegasus (Zhang et al. 2020): BART with positions of sines."""

from __future__ import annotations

from typing import ClassVar

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.layers.sinusoids import SinusoidalPositions
from octavo.models.bart import BART_NAMES, encoder_decoder_config, refuse_settings
from octavo.models.checkpoint import Drop, Only, Rename, ZerosFor
from octavo.models.config_reader import ConfigReader
from octavo.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderStack


class SinusoidalEncoderDecoder(EncoderDecoder):
    """With positions that are computed, whatever the checkpoint has of them, and a bias of the logits."""

    checkpoint_map = (
        Drop(r"\.embed_positions\.weight$"),
        Rename(r"^final_logits_bias$", "lm_head.bias"),
        Only(r"^lm_head\.bias$"),
        ZerosFor(r"^lm_head\.bias$"),
        *BART_NAMES,
    )
    #: Fields of ``EncoderDecoderConfig`` that say where norms are.
    norms: ClassVar[dict[str, bool]] = {}

    def __init__(self, config: EncoderDecoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        table = SinusoidalPositions(context, config.max_position, config.hidden_size)
        self.embed_positions = self.attach("model.embed_positions", table)

    def make_encoder(self, config: EncoderDecoderConfig, context: LayerContext) -> EncoderStack:
        """With a table of its own."""
        encoder = super().make_encoder(config, context)
        table = SinusoidalPositions(context, config.encoder.max_position, config.encoder.hidden_size)
        encoder.embed_positions = encoder.attach("embed_positions", table)
        return encoder

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json."""
        computed = {"static_position_embeddings": True, "share_encoder_decoder_embeddings": True}
        refuse_settings(architecture, reader, computed)
        vocabulary = reader.positive("vocab_size")
        if (own := reader.positive("decoder_vocab_size", vocabulary)) != vocabulary:
            raise UnsupportedModelError(
                f"{reader.file}: decoder_vocab_size={own} is not supported: it must be vocab_size ({vocabulary})"
            )
        positions = reader.positive("max_position_embeddings", 1024)
        return encoder_decoder_config(architecture, reader, positions, head_bias=True, **cls.norms)


class MarianMTModel(SinusoidalEncoderDecoder):
    """Norms after what is added."""


class PegasusForConditionalGeneration(SinusoidalEncoderDecoder):
    """Norms before what is added, and after the last layer."""

    norms: ClassVar = {"norm_first": True, "final_norm": True}
