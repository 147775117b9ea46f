"""Gemma 3 with images (arXiv 2503.19786, section 2.1): SigLIP, whose patches are averaged in squares, before Gemma.

Tokens of an image see each other in both directions, within the window of the layers that have one. Features take the
place of embeddings as they are: they are not multiplied by the embeddings' factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.image_input import ImageFacts
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import Drop, Rename, Transform, transpose
from octavo.models.config_reader import ConfigReader
from octavo.models.gemma import GemmaConfig, GemmaForCausalLM, GemmaNorm
from octavo.models.vision.pixels import read_pixels
from octavo.models.vision.text_part import fields_of
from octavo.models.vision.tower import tower_context
from octavo.models.vision.vit import VIT_NAMES, Projection, VisionTransformer, VitTower
from octavo.models.vision.vit_config import VitConfig, read_siglip


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """That of the language model, and of what is before it."""

    vision: VitConfig
    #: Patches of a side of the square that makes a feature.
    pooled_side: int


class Gemma3Tower(VitTower):
    """SigLIP, the mean of each square of patches, and a matrix."""

    def __init__(self, config: Gemma3Config, context: LayerContext) -> None:
        vision = config.vision
        super().__init__(VisionTransformer(vision, context), context.kernels, config.pooled_side)
        self.norm = self.attach("norm", GemmaNorm(context, vision.hidden_size, vision.layer_norm_eps))
        projector = Projection(context, vision.hidden_size, config.hidden_size, bias=False)
        self.projector = self.attach("projector", projector)

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        """See ``Tower``."""
        assert self.vision.post_norm is not None
        stream = self.vision.post_norm.float32(self.vision(rows, batch, caches[0]))
        return self.projector(self.norm(self.kernels.mean_sampled(stream, batch, self.merge**2)))


class Gemma3ForConditionalGeneration(GemmaForCausalLM):
    """Gemma 3 that sees images; a checkpoint without a tower is its language model."""

    checkpoint_map = (
        Rename(r"^(model\.)?vision_tower\.(vision_model\.)?", "tower.vision."),
        Rename(r"^(model\.)?multi_modal_projector\.mm_soft_emb_norm\.", "tower.norm."),
        Rename(r"^(model\.)?multi_modal_projector\.mm_input_projection_weight$", "tower.projector.weight"),
        Transform(r"^tower\.projector\.weight$", transpose),
        *VIT_NAMES,
        Rename(r"^(model\.)?language_model\.(model\.)?", "model."),
        Rename(r"^model\.lm_head\.", "lm_head."),
        Drop(r"^tower\."),
        *GemmaForCausalLM.checkpoint_map,
    )

    def __init__(self, config: GemmaConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        if self.is_first and isinstance(config, Gemma3Config):
            self.tower = self.attach("tower", Gemma3Tower(config, tower_context(context)))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json, whose ``text_config`` and ``vision_config`` are those of the two networks."""
        text = GemmaForCausalLM.read_config(architecture, reader)
        table = reader.table("vision_config")
        if not table:
            return text
        kind = table.get("model_type") or "siglip_vision_model"
        if kind != "siglip_vision_model":
            raise UnsupportedModelError(
                f"{reader.file}: vision_config has model_type {kind!r}; supported: siglip_vision_model"
            )
        vision = replace(read_siglip(replace(reader, raw=table)), normalisation=read_pixels(reader, "gemma3"))
        tokens = reader.positive("mm_tokens_per_image", 256)
        side = math.isqrt(tokens)
        if side * side != tokens or vision.side % side:
            raise ConfigError(
                f"{reader.file}: mm_tokens_per_image ({tokens}) must be the square of a divisor of the patches of a "
                f"side, image_size / patch_size ({vision.side})"
            )
        token = reader.positive(reader.named("image_token_id", "image_token_index"), 262144)
        fields = fields_of(text) | {"image_facts": ImageFacts("gemma3", token, whole=tokens)}
        return Gemma3Config(vision=vision, pooled_side=vision.side // side, **fields)
