"""LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744): the output of CLIP's last layer but one, and a projector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, LayerCache
from octavo.layers.layer import LayerContext
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.models.checkpoint import Rename
from octavo.models.config_files import ConfigReader, fields_of, read_activation
from octavo.models.llama import LlamaForCausalLM
from octavo.models.network import Tower, TowerInput
from octavo.models.vision import (
    TEXT_NAMES,
    VIT_NAMES,
    Projection,
    VisionTransformer,
    VitConfig,
    VitTower,
    read_clip,
    read_pixels,
    read_siglip,
    read_text_part,
)

#: ``vision_config`` where config.json has none.
_VISION = {
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 336},
}


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(ModelConfig):
    #: The layers up to the one whose output makes features.
    vision: VitConfig
    #: Whether the output of the class token makes a feature.
    keeps_first: bool = False
    projector_bias: bool = True
    projector_activation: Activation = "gelu"


class LlavaTower(VitTower):
    def __init__(self, config: LlavaConfig, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context), context.kernels)
        self._keeps_first = config.keeps_first
        width, bias = config.hidden_size, config.projector_bias
        first = MergedColumnParallelLinear(
            context, [("", width)], config.vision.hidden_size, bias, config.projector_activation
        )
        self.first = self.attach("projector.linear_1", first)
        self.second = self.attach("projector.linear_2", Projection(context, width, width, bias=bias))

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        skipped = 0 if self._keeps_first else 1
        return [
            replace(piece, feature_rows=np.arange(skipped, len(piece.rows), dtype=np.int64))
            for piece in super().prepare(image)
        ]

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        stream = self.vision(rows, batch, caches[0])
        return self.second(self.first(self.kernels.take_sampled(stream, batch)))


class LlavaForConditionalGeneration(LlamaForCausalLM):
    checkpoint_map = (
        Rename(r"^(model\.)?vision_tower\.(vision_model\.)?", "tower.vision."),
        Rename(r"^(model\.)?multi_modal_projector\.", "tower.projector."),
        *VIT_NAMES,
        *TEXT_NAMES,
    )

    def make_tower(self, config: LlavaConfig, context: LayerContext) -> Tower:
        return LlavaTower(config, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_text_part(architecture, reader)
        strategy = reader.raw.get("vision_feature_select_strategy") or "default"
        if strategy not in ("default", "full"):
            raise ConfigError(f"{reader.file}: vision_feature_select_strategy is default or full, not {strategy!r}")
        fields = fields_of(text)
        fields["tie_word_embeddings"] = text.tie_word_embeddings or reader.flag("tie_word_embeddings")
        token = reader.named("image_token_id", "image_token_index")  # 0 in some vocabularies
        fields["image_facts"] = ImageFacts("llava", 0 if reader.raw.get(token) == 0 else reader.positive(token, 32000))
        inside = replace(reader, raw=reader.table("vision_config") or dict(_VISION))
        kind = inside.only("model_type", "clip_vision_model", "siglip_vision_model")
        config = read_clip(inside) if kind == "clip_vision_model" else replace(read_siglip(inside), post_norm=False)
        layer = reader.raw.get("vision_feature_layer", -2)
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise UnsupportedModelError(
                f"{reader.file}: vision_feature_layer must be one layer's number, not {layer!r}"
            )
        last = config.num_layers
        layers = layer if layer >= 0 else last + 1 + layer
        if not 1 <= layers <= last:
            raise ConfigError(f"{reader.file}: vision_feature_layer must be 1 to {last} or -{last} to -1, not {layer}")
        return LlavaConfig(
            vision=replace(config, num_layers=layers, normalisation=read_pixels(reader, "llava")),
            keeps_first=strategy == "full",
            projector_bias=reader.raw.get("multimodal_projector_bias", True) is not False,
            projector_activation=read_activation(reader, "projector_hidden_act", "gelu"),
            **fields,
        )
