"""Whisper (Radford et al. 2022): the encoder reads 30 seconds of sound, the decoder writes their text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.request import AUDIO
from octavo.kernels.interface import Array
from octavo.layers.layer import LayerContext
from octavo.layers.linear import TAPS, TwoConvolutions, convolution_rows, window_size
from octavo.models.bart import BART_NAMES, encoder_decoder_config
from octavo.models.checkpoint import Drop, Rename, ZerosFor
from octavo.models.config_files import ConfigReader, fields_of
from octavo.models.encoder import EncoderDecoder, EncoderDecoderConfig
from octavo.speech.log_mel import log_mel

#: Kind of an encoder input: log-mel features as transformers' extractor gives them, float32 [channels, frames].
FEATURES = "features"


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(EncoderDecoderConfig):
    channels: int


class WhisperForConditionalGeneration(EncoderDecoder):
    """Two convolutions before the encoder's layers; keys have no bias."""

    config: WhisperConfig
    checkpoint_map = (
        Drop(r"^proj_out\."),
        Rename(r"^(model\.)?decoder\.embed_tokens\.", "model.embed_tokens."),
        Rename(r"^(model\.)?encoder\.(conv\d)\.", r"stem.\2."),
        *BART_NAMES,
        ZerosFor(r"\.k_proj\.bias$"),
    )

    def __init__(self, config: WhisperConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        width, activation = config.encoder.hidden_size, config.encoder.activation
        self.stem = self.attach("stem", TwoConvolutions(context, config.channels, width, activation))

    def embed_input(self, inputs: Array) -> Array:
        """Rows of ``convolution_rows``, float32 [T, width], to the encoder's stream float32 [T, E]."""
        return self.stem(inputs)

    @classmethod
    def prepare_input(cls, config: ModelConfig, kind: str, payload: bytes) -> np.ndarray:
        assert isinstance(config, WhisperConfig)
        if kind == AUDIO:
            return convolution_rows(log_mel(np.frombuffer(payload, "<f4"), config.channels).T)
        if kind != FEATURES:
            raise InvalidRequestError(f"{config.architecture} reads sound, not {kind}")
        features = np.frombuffer(payload, "<f4")
        frames = 2 * config.encoder.max_position
        if features.size != frames * config.channels:
            raise InvalidRequestError(f"features must be {config.channels} x {frames} numbers, not {features.size}")
        return convolution_rows(features.reshape(config.channels, frames).T)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        channels, positions = reader.positive("num_mel_bins", 80), reader.positive("max_source_positions", 1500)
        writes = reader.positive("max_target_positions", 448)
        base = encoder_decoder_config(
            architecture, reader, writes, norm_first=True, final_norm=True, position_rows=writes
        )
        assert base.encoder_facts is not None
        facts = replace(
            base.encoder_facts,
            max_tokens=positions,
            feature_width=TAPS * window_size(channels),
            audio_rate=16000,
            audio_samples=positions * 320,
            audio_tokens=positions,
        )
        encoder = replace(base.encoder, max_position=positions, position_rows=positions)
        return WhisperConfig(channels=channels, **(fields_of(base) | {"encoder": encoder, "encoder_facts": facts}))
