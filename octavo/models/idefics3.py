"""Idefics3 (Laurencon et al. 2024, arXiv 2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv 2504.05299).

An image comes as pieces; squares of neighbouring patches of SigLIP's output make one feature (pixel shuffle).
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
from octavo.models.checkpoint import Rename
from octavo.models.config_files import ConfigReader
from octavo.models.llama import LlamaForCausalLM
from octavo.models.network import tower_context
from octavo.models.vision import (
    TEXT_NAMES,
    VIT_NAMES,
    Projection,
    VisionTransformer,
    VitConfig,
    VitTower,
    fields_of,
    patch_places,
    read_pixels,
    read_siglip,
    read_text_part,
)

#: What config.json leaves out of ``vision_config`` if it is the default of transformers.
_VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


@dataclass(frozen=True, kw_only=True)
class Idefics3Config(ModelConfig):
    """That of the language model, and of what is before it."""

    vision: VitConfig
    #: Patches of a side of the square that makes a feature.
    scale_factor: int


class FractionalTransformer(VisionTransformer):
    """SigLIP whose table of positions stands for any piece: a patch has the row of its relative place."""

    def check(self, image: ImageInput, merge: int) -> None:
        """Pieces of any size up to the network's own that whole features cover."""
        unit, size = merge * self.config.patch_size, self.config.image_size
        if not all(0 < side <= size and side % unit == 0 for side in (image.height, image.width)):
            raise InvalidRequestError(
                f"the network sees images whose sides are multiples of {unit}, at most {size}: not "
                f"{image.height} x {image.width}"
            )

    def position_ids(self, lines: int, columns: int, merge: int) -> np.ndarray:
        """See ``VisionTransformer``."""
        side = self.config.side
        line, column = patch_places(lines, columns, merge)
        return _bucket(line, lines, side) * side + _bucket(column, columns, side)


def _bucket(place: np.ndarray, count: int, side: int) -> np.ndarray:
    """Which of ``side`` equal parts each of ``count`` places along a side lies in, int64.

    In float32, as the networks were trained: a place at the boundary of two parts may fall in either.
    """
    boundaries = (1 / side + np.arange(side - 1) / side).astype(np.float32)
    fraction = place.astype(np.float32) * (np.float32(1.0) / np.float32(count))
    return np.searchsorted(boundaries, np.minimum(fraction, np.float32(1.0 - 1e-6)), side="right").astype(np.int64)


class Idefics3Tower(VitTower):
    """SigLIP and the matrix that makes features of squares of patches."""

    def __init__(self, config: Idefics3Config, context: LayerContext) -> None:
        super().__init__(FractionalTransformer(config.vision, context), context.kernels, config.scale_factor)
        inputs = config.vision.hidden_size * config.scale_factor**2
        self.projector = self.attach("projector", Projection(context, inputs, config.hidden_size, bias=False))

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        """See ``Tower``."""
        assert self.vision.post_norm is not None
        normed = self.vision.post_norm(self.vision(rows, batch, caches[0]))
        return self.projector(self.kernels.take_sampled(normed, batch, self.merge**2))


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """A language model of Llama's kind that sees images."""

    checkpoint_map = (
        Rename(r"^(model\.)?vision_model\.", "tower.vision."),
        Rename(r"^(model\.)?connector\.modality_projection\.proj\.", "tower.projector."),
        *VIT_NAMES,
        *TEXT_NAMES,
    )

    def __init__(self, config: Idefics3Config, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first:
            self.tower = self.attach("tower", Idefics3Tower(config, tower_context(context)))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json of either architecture."""
        text = read_text_part(architecture, reader)
        vision = read_siglip(replace(reader, raw=reader.table("vision_config")), **_VISION)
        vision = replace(vision, normalisation=read_pixels(reader, "idefics3"))
        scale = reader.positive("scale_factor", 2)
        if vision.side % scale:
            raise ConfigError(
                f"{reader.file}: scale_factor ({scale}) must divide the patches of a side, image_size / patch_size "
                f"({vision.side})"
            )
        fields = fields_of(text)
        if reader.raw.get("tie_word_embeddings") is not None:
            fields["tie_word_embeddings"] = reader.flag("tie_word_embeddings")
        fields["image_facts"] = ImageFacts("idefics3", reader.positive("image_token_id", 128257))
        return Idefics3Config(vision=vision, scale_factor=scale, **fields)
