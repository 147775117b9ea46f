"""LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744): outputs of CLIP's layers, mostly the last but one, and a projector.

Pixtral 12B is a LLaVA with another tower (``octavo.models.pixtral``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, LayerCache
from octavo.layers.layer import Layer, LayerContext
from octavo.models.checkpoint import CheckpointEntry
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.network import Tower, TowerConfig, TowerInput
from octavo.models.pixtral import read_pixtral_tower
from octavo.models.vision import (
    LLAMAS,
    TOWER_NAMES,
    Projector,
    VisionLanguageModel,
    VisionTransformer,
    VitConfig,
    VitTower,
    feature_layers,
    read_clip,
    read_image_token,
    read_language_model,
    read_pixels,
    read_siglip,
    with_tower,
)

#: ``vision_config`` where config.json has none.
_VISION = {
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 336},
}


@dataclass(frozen=True, kw_only=True)
class LlavaTowerConfig(TowerConfig):
    #: The layers up to the last one that is read.
    vision: VitConfig
    #: Numbers of the layers before which the stream makes features; the one after the last is the output.
    layers: tuple[int, ...]
    #: Whether the output of the class token makes a feature.
    keeps_first: bool
    projector_bias: bool
    projector_activation: Activation

    def make(self, width: int, context: LayerContext) -> Tower:
        return LlavaTower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return TOWER_NAMES


TowerT = TypeVar("TowerT", bound=LlavaTowerConfig)


def read_llava_tower(reader: ConfigReader, family: str, config: type[TowerT]) -> TowerT:
    """A CLIP or SigLIP and its projector."""
    inside = replace(reader, raw=reader.table("vision_config") or dict(_VISION))
    kind = inside.only("model_type", "clip_vision_model", "siglip_vision_model")
    vision = read_clip(inside) if kind == "clip_vision_model" else replace(read_siglip(inside), post_norm=False)
    layers = feature_layers(reader, -2, vision.num_layers)
    strategy = reader.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"{reader.file}: vision_feature_select_strategy is default or full, not {strategy!r}")
    return config(
        vision=replace(vision, num_layers=max(1, *layers), normalisation=read_pixels(reader, family)),
        layers=layers,
        keeps_first=strategy == "full",
        projector_bias=reader.flag("multimodal_projector_bias", True),
        projector_activation=read_activation(reader, "projector_hidden_act", "gelu"),
    )


class LayerReader(Layer):
    """The projector of a vision transformer's layers."""

    def __init__(self, config: LlavaTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__()
        self._kernels, self._layers, self._keeps_first = context.kernels, config.layers, config.keeps_first
        projector = Projector(
            context,
            [config.vision.hidden_size] * len(config.layers),
            width,
            bias=config.projector_bias,
            activation=config.projector_activation,
        )
        self.projector = self.attach("projector", projector)

    def choose(self, pieces: Iterable[TowerInput]) -> list[TowerInput]:
        """The pieces with the rows that make features."""
        skipped = 0 if self._keeps_first else 1
        return [replace(piece, feature_rows=np.arange(skipped, len(piece.rows), dtype=np.int64)) for piece in pieces]

    def __call__(self, streams: Iterable[Array], batch: ForwardBatch) -> Array:
        """The streams before each layer and after the last, float32 [T, E], to features float32 [N, width]."""
        chosen: dict[int, Array] = {}
        for number, stream in enumerate(streams):
            if number in self._layers:
                chosen[number] = self._kernels.take_sampled(stream, batch)
        return self.projector(*(chosen[number] for number in self._layers))


class LlavaTower(VitTower):
    def __init__(self, config: LlavaTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context), context.kernels)
        self._reader = self.attach("", LayerReader(config, width, context))

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        return self._reader.choose(super().prepare(image))

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        return self._reader(self.vision.streams(rows, batch, caches[0]), batch)


class LlavaForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_language_model(reader, LLAMAS)
        text = replace(text, tie_word_embeddings=text.tie_word_embeddings or reader.flag("tie_word_embeddings"))
        token = read_image_token(reader, 32000)
        if reader.table("vision_config").get("model_type") != "pixtral":
            tower = read_llava_tower(reader, "llava", LlavaTowerConfig)
            return with_tower(text, architecture, tower, ImageFacts("llava", token))
        strategy = reader.get("vision_feature_select_strategy", "default")
        if strategy != "full":
            raise UnsupportedModelError(
                f"{reader.file}: vision_feature_select_strategy must be full for a tower without a class token, not "
                f"{strategy!r}"
            )
        pixtral = read_pixtral_tower(reader, "llava", layer=-2, bias=True)
        return with_tower(text, architecture, pixtral, ImageFacts("pixtral", token))
