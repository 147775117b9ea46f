"""InternVL 3 and 3.5 (Zhu et al. 2025, arXiv 2504.10479): InternViT over tiles, and a projector of squares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, LayerCache
from octavo.kernels.weight_rows import to_values
from octavo.layers.layer import LayerContext
from octavo.models.checkpoint import CheckpointEntry, Only, Pairs, Rename, Shapes, Tensor, has_values
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.network import Tower, TowerConfig
from octavo.models.vision import (
    Projector,
    VisionLanguageModel,
    VisionTransformer,
    VitConfig,
    VitTower,
    feature_layers,
    is_tied,
    read_image_token,
    read_language_model,
    read_pixels,
    read_vit,
    with_tower,
)

#: Defaults of transformers, which ``vision_config`` may leave out.
_DEFAULTS = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
}


#: The matrix and bias that a layer scale multiplies.
_SCALED = {"lambda_1": "self_attn.o_proj", "lambda_2": "mlp.fc2"}
_OF_LAYER = re.compile(r"(tower\.vision\.layers\.\d+)\.(.+)")


class LayerScale:
    """Multiplies what a layer adds to the stream by a vector (Touvron et al. 2021): rows of its last matrices."""

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            match = _OF_LAYER.fullmatch(name)
            inside = match[2] if match else ""
            part = _SCALED.get(inside) or inside.rpartition(".")[0]
            if match is None or part not in _SCALED.values() or f"{match[1]}.{part}.weight" not in shapes:
                yield name, tensor
                continue
            held = waiting.setdefault(f"{match[1]}.{part}", {})
            held["scale" if inside in _SCALED else inside.rpartition(".")[2]] = tensor
            if len(held) == 3:
                del waiting[f"{match[1]}.{part}"]
                scale = to_values(held["scale"])
                for kind, rows in (("weight", scale[:, None]), ("bias", scale)):
                    values = to_values(held[kind])
                    if has_values(values) and has_values(scale):
                        values = values.astype(np.float32) * rows.astype(np.float32)
                    yield f"{match[1]}.{part}.{kind}", values
        for name, held in waiting.items():
            missing = min({"scale", "weight", "bias"} - held.keys())
            raise WeightError(f"the checkpoint lacks the {missing} of {name!r}")


@dataclass(frozen=True, kw_only=True)
class InternVLTowerConfig(TowerConfig):
    vision: VitConfig
    #: Side, in patches, of the square that makes a feature.
    merge: int
    projector_activation: Activation

    def make(self, width: int, context: LayerContext) -> Tower:
        return InternVLTower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return _NAMES


_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?multi_modal_projector\.", "tower.projector."),
    Rename(r"^(model\.)?vision_tower\.(encoder\.)?", "tower.vision."),
    Rename(r"^tower\.vision\.embeddings\.patch_embeddings\.projection\.weight$", "tower.vision.patches.weight"),
    Rename(r"^tower\.vision\.embeddings\.patch_embeddings\.projection\.bias$", "tower.vision.positions.bias"),
    Rename(r"^tower\.vision\.embeddings\.position_embeddings$", "tower.vision.positions.weight"),
    Rename(r"^tower\.vision\.embeddings\.cls_token$", "tower.vision.positions.class"),
    Only(r"^tower\.vision\.positions\.(weight|class)$"),
    Only(r"^tower\.vision\.positions\.class$"),
    Rename(r"^tower\.vision\.layernorm\.", "tower.vision.post_norm."),
    Rename(r"^tower\.vision\.layer\.", "tower.vision.layers."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.layernorm_before\.", r"\1.attention_norm."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.layernorm_after\.", r"\1.mlp_norm."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.attention\.projection_layer\.", r"\1.self_attn.o_proj."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.attention\.", r"\1.self_attn."),
    LayerScale(),
)


class InternVLTower(VitTower):
    def __init__(self, config: InternVLTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context), context.kernels, config.merge)
        inputs = config.vision.hidden_size * config.merge**2
        projector = Projector(context, [inputs], width, activation=config.projector_activation, norm=True)
        self.projector = self.attach("projector", projector)

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        stream = self.vision(rows, batch, caches[0])
        if self.vision.post_norm is not None:
            stream = self.vision.post_norm(stream)
        return self.projector(self.kernels.take_sampled(stream, batch, self.merge**2))


#: Networks by the model_type of ``text_config``.
_TEXTS = dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "gpt_oss", "llama"))


class InternVLForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = replace(read_language_model(reader, _TEXTS), tie_word_embeddings=is_tied(reader, True))
        reader.only("vision_feature_select_strategy", "default")
        inside = replace(reader, raw=_squares(reader)).with_defaults(**_DEFAULTS)
        inside.only("model_type", "internvl_vision")
        inside.only("use_absolute_position_embeddings", True)
        depth = inside.positive("num_hidden_layers")
        layers = feature_layers(reader, -1, depth)
        if len(layers) > 1 or not layers[0]:
            raise UnsupportedModelError(f"{reader.file}: vision_feature_layer must be the number of one layer here")
        vision = read_vit(
            inside,
            num_layers=layers[0],
            class_token=True,
            qkv_bias=inside.flag("attention_bias"),
            whole_qk_norm=inside.flag("use_qk_norm"),
            norm="rms" if inside.only("norm_type", "layer_norm", "rms_norm") == "rms_norm" else "layer",
            # Inner layers are read without the last norm.
            post_norm=reader.raw.get("vision_feature_layer") in (None, -1)
            and not inside.flag("use_mean_pooling", True),
            normalisation=read_pixels(reader, "internvl"),
        )
        merge = round(1 / reader.number("downsample_ratio", 0.5))
        if abs(merge * reader.number("downsample_ratio", 0.5) - 1) > 1e-6 or vision.side % merge:
            raise ConfigError(
                f"{reader.file}: downsample_ratio ({reader.raw['downsample_ratio']}) must be 1 over a divisor of "
                f"image_size / patch_size ({vision.side})"
            )
        tower = InternVLTowerConfig(
            vision=vision,
            merge=merge,
            projector_activation=read_activation(reader, "projector_hidden_act", "gelu"),
        )
        return with_tower(text, architecture, tower, ImageFacts("internvl", read_image_token(reader, 151667)))


def _squares(reader: ConfigReader) -> dict[str, object]:
    """``vision_config`` with one number for each size that is the same in both directions."""
    values: dict[str, object] = reader.table("vision_config")
    for name in ("image_size", "patch_size"):
        size = values.get(name)
        if isinstance(size, list):
            if len(size) != 2 or size[0] != size[1]:
                raise UnsupportedModelError(f"{reader.file}: {name}={size} is not supported; it must be a square")
            values[name] = size[0]
    return values
