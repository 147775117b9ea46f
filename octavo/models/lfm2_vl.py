"""LFM2-VL: SigLIP 2 for images of any size (NaFlex: Tschannen et al. 2025, arXiv 2502.14786), and an LFM2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.images.processors import read_lfm2_vl, read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, LayerCache, PackedWeight
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.network import Tower, TowerConfig, TowerInput
from octavo.models.vision import (
    TOWER_NAMES,
    Projector,
    VisionLanguageModel,
    VisionTransformer,
    VitConfig,
    VitTower,
    is_tied,
    patch_places,
    patch_rows,
    read_image_token,
    read_language_model,
    read_pixels,
    read_siglip,
    with_tower,
)

#: Patches of the grid of learned positions, where ``vision_config`` does not say.
_PLACES = 256
#: Most lines or columns of patches.
_MAX_SIDE = 1024


@dataclass(frozen=True, kw_only=True)
class Lfm2VlTowerConfig(TowerConfig):
    #: ``image_size`` is that of the grid of learned positions.
    vision: VitConfig
    #: Side, in patches, of the square that makes a feature.
    merge: int
    #: Of a piece, if the model's files limit it.
    max_patches: int | None
    projector_size: int
    projector_bias: bool
    projector_activation: Activation
    projector_norm: bool

    def make(self, width: int, context: LayerContext) -> Tower:
        return Lfm2VlTower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return (
            *TOWER_NAMES,
            Rename(r"^tower\.vision\.positions\.weight$", "tower.vision.patches.positions"),
        )


class NaflexEmbedding(Layer):
    """One product with the numbers of a patch, and with its shares in the learned positions of a grid."""

    def __init__(self, context: LayerContext, outputs: int, patch: int, places: int) -> None:
        super().__init__()
        self._kernels, self._dtype, self._patch = context.kernels, context.dtype, patch
        self._placed: dict[str, np.ndarray] = {}
        self._packed: PackedWeight
        self.expected |= {"weight": (outputs, 3 * patch**2), "bias": (outputs,), "positions": (places, outputs)}
        self.holds.append(Weight("weight", (outputs, 3 * patch**2 + places), "linear", context.dtype))
        self.holds.append(Weight("bias", (outputs,), "vector", context.dtype))

    def __call__(self, rows: Array) -> Array:
        return self._packed(rows, DType.FLOAT32)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._placed[shard] = tensor

    def complete(self) -> None:
        weight, patch = self._placed.pop("weight"), self._patch
        # By line, column and colour in the checkpoint; ``patch_rows`` has colours first.
        weight = weight.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2).reshape(len(weight), -1)
        matrix = np.concatenate((weight, self._placed.pop("positions").T), axis=1)
        self._packed = self._kernels.pack([matrix], self._placed.pop("bias"), dtype=self._dtype)


class NaflexTransformer(VisionTransformer):
    """SigLIP 2: rows have ``grid_shares`` after the numbers of their patches."""

    def make_embedding(self, context: LayerContext) -> None:
        config = self.config
        embedding = NaflexEmbedding(context, config.hidden_size, config.patch_size, config.rows)
        self.embedding = self.attach("patches", embedding)

    def embed(self, rows: Array, batch: ForwardBatch) -> Array:
        return self.embedding(rows)


def grid_shares(count: int, side: int) -> np.ndarray:
    """The shares of ``side`` learned positions in each of ``count`` along an axis, float32 [count, side].

    Bilinear interpolation with antialiasing; computed in float32, as the networks were trained with it.
    """
    scale = np.float32(side) / np.float32(count)
    centre = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(scale, np.float32(1.0))
    shares = np.maximum(np.float32(1.0) - distance, np.float32(0.0))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), np.float32)


class Lfm2VlTower(VitTower):
    def __init__(self, config: Lfm2VlTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(NaflexTransformer(config.vision, context), context.kernels, config.merge)
        self.row_width, self.max_rows = config.vision.row_width + config.vision.rows, config.max_patches
        projector = Projector(
            context,
            [config.vision.hidden_size * config.merge**2],
            width,
            inner=config.projector_size,
            bias=config.projector_bias,
            activation=config.projector_activation,
            norm=config.projector_norm,
        )
        self.projector = self.attach("projector", projector)

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        return [piece for part in image.parts() for piece in self._pieces(part)]

    def _pieces(self, part: ImageInput) -> list[TowerInput]:
        config, merge = self.vision.config, self.merge
        size, unit = config.patch_size, config.patch_size * merge
        if not all(0 < side <= _MAX_SIDE * size and side % unit == 0 for side in (part.height, part.width)):
            raise InvalidRequestError(
                f"sides of images must be multiples of {unit} and at most {_MAX_SIDE * size}, not {part.height} x "
                f"{part.width}"
            )
        lines, columns = part.height // size, part.width // size
        line, column = patch_places(lines, columns, merge)
        along, across = grid_shares(lines, config.side)[line], grid_shares(columns, config.side)[column]
        shares = (along[:, :, None] * across[:, None, :]).reshape(len(line), -1)
        positions, features = np.zeros(len(line), np.int64), np.arange(0, len(line), merge**2, dtype=np.int64)
        return [
            TowerInput(
                np.concatenate((patch_rows(config.normalisation.rows(piece), size, merge), shares), axis=1),
                positions,
                features,
                (len(line),),
            )
            for piece in part.array()
        ]

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        assert self.vision.post_norm is not None
        stream = self.vision.post_norm(self.vision(rows, batch, caches[0]))
        return self.projector(self.kernels.take_sampled(stream, batch, self.merge**2))


class Lfm2VlForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_language_model(reader, {"lfm2": None, "lfm2_moe": None})
        text = replace(
            text, tie_word_embeddings=reader.flag("tie_embedding", is_tied(reader, text.tie_word_embeddings))
        )
        inside = replace(reader, raw=reader.table("vision_config"))
        inside.only("model_type", "siglip2_vision_model")
        places, patch = inside.positive("num_patches", _PLACES), inside.positive("patch_size", 16)
        if math.isqrt(places) ** 2 != places:
            raise ConfigError(f"{reader.file}: num_patches ({places}) must be the square of a number")
        vision = read_siglip(replace(inside, raw={**inside.raw, "image_size": math.isqrt(places) * patch}))
        max_patches, merge = None, reader.positive("downsample_factor", 2)
        with suppress(ConfigError):  # it is reported when images are processed
            max_patches = read_lfm2_vl(read_settings(reader.file.parent, reader.raw)).max_piece * merge**2
        tower = Lfm2VlTowerConfig(
            vision=replace(vision, normalisation=read_pixels(reader, "lfm2_vl")),
            merge=merge,
            max_patches=max_patches,
            projector_size=reader.positive("projector_hidden_size", 2560),
            projector_bias=reader.flag("projector_bias", True),
            projector_activation=read_activation(reader, "projector_hidden_act", "gelu"),
            projector_norm=reader.flag("projector_use_layernorm", True),
        )
        return with_tower(text, architecture, tower, ImageFacts("lfm2_vl", read_image_token(reader, 396)))
