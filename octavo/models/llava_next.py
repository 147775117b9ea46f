"""LLaVA-NeXT (Liu et al. 2024), and Granite Vision 3 (Granite Vision Team 2025, arXiv 2502.09927).

An image comes as a whole and as tiles of a larger size. Features of the tiles stand line by line, without those of
padding, and with a learned vector at the end of each line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import InvalidRequestError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext, Weight
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.llava import LayerReader, LlavaTowerConfig, read_llava_tower
from octavo.models.network import Tower, TowerInput
from octavo.models.vision import (
    LLAMAS,
    VisionLanguageModel,
    VisionTransformer,
    VitTower,
    is_tied,
    read_image_token,
    read_language_model,
    with_tower,
)


@dataclass(frozen=True, kw_only=True)
class LlavaNextTowerConfig(LlavaTowerConfig):
    def make(self, width: int, context: LayerContext) -> Tower:
        return LlavaNextTower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return (Rename(r"^(model\.)?image_newline$", "tower.newline"), *super().names)


class NewlineTower(VitTower):
    """Features of an image's whole and of its tiles, of which those of padding are left out."""

    def __init__(self, vision: VisionTransformer, width: int, context: LayerContext, side: int) -> None:
        """``side``: the number of features along the side of a tile."""
        super().__init__(vision, context.kernels)
        self.side, self._dtype = side, context.dtype
        self.expected["newline"] = (width,)
        self.holds.append(Weight("newline", (width,), "vector", context.dtype))
        #: float32 [E]: what ends a line of features.
        self.newline: np.ndarray

    @abstractmethod
    def tiles(self, image: ImageInput) -> list[TowerInput]:
        """The pieces of an image; their features follow each other line by line."""

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self.newline = tensor.astype(self._dtype.numpy).astype(np.float32)

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        layout, side = image.layout, self.side
        if layout is None or image.pieces != 1 + layout.rows * layout.columns:
            raise InvalidRequestError(f"an image must have a whole and tiles, and not {image.pieces} pieces")
        whole, *tiles = self.tiles(image)
        lines, columns = side * layout.rows - 2 * layout.top, side * layout.columns - 2 * layout.left
        pieces = [replace(whole, places=np.arange(side**2, dtype=np.int64))]
        for number, tile in enumerate(tiles):
            row, column = divmod(number, layout.columns)
            line = np.repeat(np.arange(side) + row * side - layout.top, side)
            place = np.tile(np.arange(side) + column * side - layout.left, side)
            is_kept = (line >= 0) & (line < lines) & (place >= 0) & (place < columns)
            if is_kept.any():
                places = side**2 + line[is_kept] * (columns + 1) + place[is_kept]
                pieces.append(replace(tile, feature_rows=tile.feature_rows[is_kept], places=places))
        return pieces

    def join(self, places: Sequence[np.ndarray | None], features: Sequence[np.ndarray]) -> np.ndarray:
        at, made = np.concatenate([place for place in places if place is not None]), np.concatenate(features)
        tiled = len(places) > 1
        # The last line ends after the last feature.
        whole = np.tile(self.newline, (int(at.max()) + 1 + tiled, made.shape[1] // len(self.newline)))
        whole[at] = made
        return whole


class LlavaNextTower(NewlineTower):
    def __init__(self, config: LlavaNextTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context), width, context, config.vision.side)
        self._reader = self.attach("", LayerReader(config, width, context))

    def tiles(self, image: ImageInput) -> list[TowerInput]:
        return self._reader.choose(VitTower.prepare(self, image))

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        return self._reader(self.vision.streams(rows, batch, caches[0]), batch)


class LlavaNextForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_language_model(reader, {**LLAMAS, "granite": None})
        text = replace(text, tie_word_embeddings=is_tied(reader, False))
        tower = read_llava_tower(reader, "llava_next", LlavaNextTowerConfig)
        if tower.keeps_first == tower.vision.class_token:
            strategy = "default" if tower.vision.class_token else "full"
            raise UnsupportedModelError(
                f"{reader.file}: vision_feature_select_strategy must be {strategy} for this vision_config: features of "
                "patches alone make a grid"
            )
        return with_tower(text, architecture, tower, ImageFacts("llava_next", read_image_token(reader, 32000)))
