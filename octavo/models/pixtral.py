"""The tower of Pixtral (Agrawal et al. 2024, arXiv 2410.07073), for images of any size, and Mistral 3, which has it.

Patches have rotary positions by line and column. Mistral Small 3.1 and Ministral 3 make a feature of each square of
patches; Pixtral 12B, a ``LlavaForConditionalGeneration``, of each patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig, RopeConfig
from octavo.core.request import ImageInput
from octavo.images.image_files import Normalisation
from octavo.images.processors import MAX_SIDE, longest_sides, read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, ArrayMaker, AttentionSpec, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.rope import RotaryRows, rotary_values
from octavo.models.checkpoint import CheckpointEntry, Rename, Transform
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.decoder import PreNormLayer
from octavo.models.network import Tower, TowerConfig, TowerInput
from octavo.models.vision import (
    PatchEmbedding,
    Projector,
    VisionLanguageModel,
    feature_layers,
    is_tied,
    patch_places,
    patch_rows,
    read_image_token,
    read_language_model,
    read_pixels,
    with_tower,
)

#: Of the norms, in transformers' code.
_EPS = 1e-5
#: Defaults of transformers, which ``vision_config`` may leave out.
_DEFAULTS = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"patch_size": 16, "rope_theta": 10000.0},
}


@dataclass(frozen=True, kw_only=True)
class PixtralVisionConfig(ModelConfig):
    activation: Activation
    normalisation: Normalisation
    #: Side in pixels.
    patch_size: int
    #: Lines and columns of patches of the largest image, if the model's files limit it.
    largest: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class PixtralTowerConfig(TowerConfig):
    vision: PixtralVisionConfig
    #: Numbers of the layers before which the stream makes features; the one after the last is the output.
    layers: tuple[int, ...]
    #: Side, in patches, of the square that makes a feature, and eps of the norm before it; 0: patches make features.
    merge: int = 0
    merge_eps: float = _EPS
    projector_bias: bool
    projector_activation: Activation

    def make(self, width: int, context: LayerContext) -> Tower:
        return PixtralTower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        merge = self.merge**2

        def by_patch(matrix: np.ndarray) -> np.ndarray:
            """Columns by channel and then by patch of a square, to those by patch and channel."""
            return matrix.reshape(len(matrix), -1, merge).swapaxes(1, 2).reshape(len(matrix), -1)

        return (
            Rename(r"^(model\.)?vision_tower\.(vision_encoder\.)?(transformer\.)?", "tower."),
            Rename(r"^(tower\.layers\.\d+)\.feed_forward\.", r"\1.mlp."),
            Rename(r"^tower\.patch_conv\.", "tower.patches."),
            Rename(r"^(model\.)?multi_modal_projector\.norm\.", "tower.merge_norm."),
            Rename(r"^(model\.)?multi_modal_projector\.patch_merger\.merging_layer\.", "tower.merge."),
            Rename(r"^(model\.)?multi_modal_projector\.", "tower.projector."),
            *((Transform(r"^tower\.merge\.weight$", by_patch),) if merge else ()),
        )


def read_pixtral_tower(
    reader: ConfigReader, family: str, *, layer: int, bias: bool, merge: int = 0
) -> PixtralTowerConfig:
    """The tower of a config.json; ``layer`` and ``bias``, of the projector, are the family's defaults."""
    inside = replace(reader, raw=reader.table("vision_config")).with_defaults(**_DEFAULTS)
    hidden, heads = inside.positive("hidden_size"), inside.positive("num_attention_heads")
    if hidden % (4 * heads):
        raise ConfigError(
            f"{reader.file}: hidden_size ({hidden}) of the tower must be a multiple of 4 * num_attention_heads "
            f"({4 * heads})"
        )
    if inside.positive("num_channels", 3) != 3:
        raise ConfigError(f"{reader.file}: num_channels must be 3, not {inside.raw['num_channels']}")
    inside.only("head_dim", hidden // heads)
    rope = replace(inside, raw={"rope_theta": inside.raw["rope_theta"], **inside.table("rope_parameters")})
    rope.only("rope_type", "axial", "default")
    layers, patch = inside.positive("num_hidden_layers"), inside.positive("patch_size", most=MAX_SIDE)
    largest = None
    with suppress(ConfigError):  # it is reported when images are processed
        unit = patch * max(merge, 1)
        height, width = longest_sides(read_settings(reader.file.parent, {}))
        largest = (-(-height // unit) * max(merge, 1), -(-width // unit) * max(merge, 1))
    vision = PixtralVisionConfig(
        architecture="vision tower",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=inside.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=MAX_SIDE // patch,
        rms_norm_eps=_EPS,
        rope=RopeConfig(theta=rope.number("rope_theta", 10000.0)),
        activation=read_activation(inside, "hidden_act", "gelu"),
        normalisation=read_pixels(reader, family),
        patch_size=patch,
        largest=largest,
    )
    return PixtralTowerConfig(
        vision=vision,
        layers=feature_layers(reader, layer, layers),
        merge=merge,
        projector_bias=reader.flag("multimodal_projector_bias", bias),
        projector_activation=read_activation(reader, "projector_hidden_act", "gelu"),
    )


class AxialAngles(RotaryRows):
    """Every other frequency of a head is that of lines, the others are those of columns."""

    def __init__(self, config: PixtralVisionConfig, kernels: ArrayMaker) -> None:
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        frequencies = 1.0 / np.power(config.rope.theta, exponents.astype(np.float64)).astype(np.float32)
        both = np.concatenate((frequencies[0::2], frequencies[1::2]))
        self.array = kernels.array(rotary_values(both, config.max_position, 1.0))
        self.sections = (config.head_dim // 4, config.head_dim // 4)


class PixtralLayer(PreNormLayer):
    norm_names = ("attention_norm", "ffn_norm")
    mixer_name = "attention"


class PixtralTower(Tower):
    """Rows are patches, which attend to all patches of their image."""

    rotary_axes = 2

    def __init__(self, config: PixtralTowerConfig, width: int, context: LayerContext) -> None:
        super().__init__()
        self.config, self.kernels = config, context.kernels
        vision = config.vision
        hidden, patch = vision.hidden_size, vision.patch_size
        self.row_width = 3 * patch**2
        self.max_rows = None if vision.largest is None else math.prod(vision.largest)
        self.patches = self.attach("patches", PatchEmbedding(context, hidden, (3, patch, patch), bias=False))
        self.norm = self.attach("ln_pre", RMSNorm(context, hidden, _EPS))
        angles = AxialAngles(vision, context.kernels)
        self.layers: list[PixtralLayer] = []
        for index in range(max(1, *config.layers)):
            spec = AttentionSpec(vision.head_dim**-0.5, causal=False)
            mlp = GatedMLP(context, hidden, vision.intermediate_size, False, vision.activation)
            norms = [RMSNorm(context, hidden, _EPS) for _ in range(2)]
            layer = PixtralLayer(Attention(vision, context, spec, angles), mlp, norms)
            self.layers.append(self.attach(f"layers.{index}", layer))
        self.workspace = self.layers[0].attention.kv_spec
        if config.merge:
            self.merge_norm = self.attach("merge_norm", RMSNorm(context, hidden, config.merge_eps))
            merge = MergedColumnParallelLinear(context, [("", hidden)], hidden * config.merge**2, False)
            self.merge = self.attach("merge", merge)
        projector = Projector(
            context,
            [hidden] * len(config.layers),
            width,
            bias=config.projector_bias,
            activation=config.projector_activation,
        )
        self.projector = self.attach("projector", projector)

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        vision, merge = self.config.vision, max(1, self.config.merge)
        unit, largest = merge * vision.patch_size, vision.max_position * vision.patch_size
        if not all(0 < side <= largest and side % unit == 0 for side in (image.height, image.width)):
            raise InvalidRequestError(
                f"sides of images must be multiples of {unit} and at most {largest}, not {image.height} x {image.width}"
            )
        places = np.stack(patch_places(image.height // vision.patch_size, image.width // vision.patch_size, merge))
        count = places.shape[1]
        positions, features = np.arange(count, dtype=np.int64), np.arange(0, count, merge**2, dtype=np.int64)
        return [
            TowerInput(
                np.ascontiguousarray(patch_rows(vision.normalisation.rows(piece), vision.patch_size, merge)),
                positions,
                features,
                (count,),
                places,
            )
            for piece in image.array()
        ]

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        config = self.config
        chosen: dict[int, Array] = {}
        stream = self.norm.float32(self.patches(rows))
        for number in range(len(self.layers) + 1):
            if number:
                stream = self.layers[number - 1](stream, caches[0], batch)
            if number in config.layers:
                chosen[number] = self._taken(stream, batch)
        return self.projector(*(chosen[number] for number in config.layers))

    def _taken(self, stream: Array, batch: ForwardBatch) -> Array:
        if not self.config.merge:
            return self.kernels.take_sampled(stream, batch)
        return self.merge(self.kernels.take_sampled(self.merge_norm(stream), batch, self.config.merge**2))


#: Networks by the model_type of ``text_config``.
_TEXTS = {"mistral": "MinistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}


class Mistral3ForConditionalGeneration(VisionLanguageModel):
    """Mistral Small 3.1 and later, and Ministral 3; without ``vision_config``, their language models alone."""

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = replace(read_language_model(reader, _TEXTS), tie_word_embeddings=is_tied(reader, False))
        facts = ImageFacts("pixtral", read_image_token(reader, 10))
        if not reader.table("vision_config"):
            return with_tower(text, architecture, None, facts)
        replace(reader, raw=reader.table("vision_config")).only("model_type", "pixtral")
        merge = reader.positive("spatial_merge_size", 2)
        tower = read_pixtral_tower(reader, "mistral3", layer=-1, bias=False, merge=merge)
        if len(tower.layers) > 1:
            raise UnsupportedModelError(f"{reader.file}: vision_feature_layer must be one layer's number here")
        return with_tower(text, architecture, replace(tower, merge_eps=text.rms_norm_eps), facts)
