"""Idefics3 (Laurencon et al. 2024, arXiv 2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv 2504.05299).

An image comes as pieces; each square of patches of SigLIP's output makes a feature (pixel shuffle).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.network import Tower, TowerConfig
from octavo.models.vision import (
    LLAMAS,
    VIT_NAMES,
    Projection,
    VisionLanguageModel,
    VisionTransformer,
    VitConfig,
    VitTower,
    is_tied,
    patch_places,
    read_image_token,
    read_language_model,
    read_pixels,
    read_siglip,
    with_tower,
)

#: Defaults of transformers, which ``vision_config`` may leave out.
_VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


@dataclass(frozen=True, kw_only=True)
class Idefics3TowerConfig(TowerConfig):
    vision: VitConfig
    #: Side, in patches, of the square that makes a feature.
    scale_factor: int

    def make(self, width: int, context: LayerContext) -> Tower:
        return Idefics3Tower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return (
            Rename(r"^(model\.)?vision_model\.", "tower.vision."),
            Rename(r"^(model\.)?connector\.modality_projection\.proj\.", "tower.projector."),
            *VIT_NAMES,
        )


def _bucket(place: np.ndarray, count: int, side: int) -> np.ndarray:
    """For each of ``count`` places along a side, which of ``side`` equal parts it lies in, int64.

    In float32, as the networks were trained: a place at the boundary of two parts may fall in either.
    """
    boundaries = (1 / side + np.arange(side - 1) / side).astype(np.float32)
    fraction = place.astype(np.float32) * (np.float32(1.0) / np.float32(count))
    return np.searchsorted(boundaries, np.minimum(fraction, np.float32(1.0 - 1e-6)), side="right").astype(np.int64)


class Idefics3Tower(VitTower):
    """SigLIP, and a matrix that makes a feature of each square of patches.

    Pieces have any size up to the network's own; a patch has the position row of its relative place.
    """

    def __init__(self, config: Idefics3TowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context), context.kernels, config.scale_factor)
        inputs = config.vision.hidden_size * config.scale_factor**2
        self.projector = self.attach("projector", Projection(context, inputs, width, bias=False))

    def check(self, image: ImageInput) -> None:
        unit, size = self.merge * self.vision.config.patch_size, self.vision.config.image_size
        if not all(0 < side <= size and side % unit == 0 for side in (image.height, image.width)):
            raise InvalidRequestError(
                f"sides of images must be multiples of {unit} and at most {size}, not {image.height} x {image.width}"
            )

    def position_ids(self, lines: int, columns: int) -> np.ndarray:
        side = self.vision.config.side
        line, column = patch_places(lines, columns, self.merge)
        return _bucket(line, lines, side) * side + _bucket(column, columns, side)

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        assert self.vision.post_norm is not None
        normed = self.vision.post_norm(self.vision(rows, batch, caches[0]))
        return self.projector(self.kernels.take_sampled(normed, batch, self.merge**2))


class Idefics3ForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_language_model(reader, LLAMAS)
        text = replace(text, tie_word_embeddings=is_tied(reader, text.tie_word_embeddings))
        vision = read_siglip(replace(reader, raw=reader.table("vision_config")), **_VISION)
        vision = replace(vision, normalisation=read_pixels(reader, "idefics3"))
        scale = reader.positive("scale_factor", 2)
        if vision.side % scale:
            raise ConfigError(
                f"{reader.file}: scale_factor ({scale}) must divide image_size / patch_size ({vision.side})"
            )
        tower = Idefics3TowerConfig(vision=vision, scale_factor=scale)
        return with_tower(text, architecture, tower, ImageFacts("idefics3", read_image_token(reader, 128257)))
