"""Qwen3-VL (Bai et al. 2025, arXiv 2511.21631), dense and with experts, and the vision of Qwen3.5 and Qwen3.6.

The tower has positions of its own size, which are interpolated for others. In Qwen3-VL the streams after some of its
layers become features, too, which are added in the first layers of the decoder (DeepStack).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from octavo.core.errors import ConfigError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.images.processors import read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache
from octavo.kernels.weight_rows import to_values
from octavo.layers.attention import Attention
from octavo.layers.layer import Layer, LayerContext, LayerNorm
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.layers.mlp import MLP
from octavo.models.checkpoint import CheckpointEntry, Drop, DropPart, Rename, Split
from octavo.models.config_files import ConfigReader, fields_of
from octavo.models.dense import Family
from octavo.models.encoder import EncoderPreNormLayer
from octavo.models.llama import LlamaForCausalLM
from octavo.models.mixtures import MIXTURES, MixtureConfig, MixtureFamily, MixtureForCausalLM, mixture_fields
from octavo.models.network import Tower, TowerInput
from octavo.models.qwen2_5_vl import (
    PlaceAngles,
    QwenTowerConfig,
    check_outputs,
    check_sections,
    check_sides,
    read_layer_numbers,
    read_tower_fields,
    without_sections,
)
from octavo.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from octavo.models.vision import TEXT_NAMES, PatchEmbedding, Projection, patch_places, patch_rows

_EPS = 1e-6
#: Defaults of transformers, which ``vision_config`` may leave out.
_VISION_DEFAULTS = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 3584},
    **{"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
}


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(QwenTowerConfig):
    #: Side, in patches, of the grid that has learned positions.
    side: int
    #: Images in a row of patches: a video's frames beside each other in time; an image is the same in each.
    frames: int
    #: Layers whose streams become further features.
    deep_layers: tuple[int, ...]


def read_qwen3_vision(reader: ConfigReader, *, has_deep_layers: bool) -> Qwen3VisionConfig:
    reader = reader.with_defaults(**_VISION_DEFAULTS)
    fields = read_tower_fields(reader, "qwen3_vl", "gelu_pytorch_tanh", 16)
    positions = reader.positive("num_position_embeddings")
    side = int(positions**0.5)
    if side * side != positions:
        raise ConfigError(f"{reader.file}: num_position_embeddings must be those of a square, not {positions}")
    deep: list[int] = []
    if has_deep_layers:
        deep = read_layer_numbers(reader, "deepstack_visual_indexes", fields["num_layers"])
        if deep != sorted(set(deep)):
            raise ConfigError(f"{reader.file}: deepstack_visual_indexes must be ascending, not {deep}")
    frames = reader.positive("temporal_patch_size", 2)
    return Qwen3VisionConfig(side=side, frames=frames, deep_layers=tuple(deep), **fields)


#: Comes before the language model's names, which may have patterns for the others' names here.
_TOWER: tuple[CheckpointEntry, ...] = (Rename(r"^(model\.)?visual\.", "tower."), DropPart("tower."))
_TOWER_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^tower\.patch_embed\.proj\.", "tower.patches."),
    Rename(r"^tower\.pos_embed\.", "tower.positions."),
    Rename(r"^tower\.blocks\.(\d+)\.norm1\.", r"tower.layers.\1.attention_norm."),
    Rename(r"^tower\.blocks\.(\d+)\.norm2\.", r"tower.layers.\1.mlp_norm."),
    Rename(r"^tower\.blocks\.(\d+)\.attn\.proj\.", r"tower.layers.\1.self_attn.o_proj."),
    Rename(r"^tower\.blocks\.(\d+)\.attn\.", r"tower.layers.\1.self_attn."),
    Rename(r"^tower\.blocks\.", "tower.layers."),
    Rename(r"^(tower\..*)\.linear_fc(\d)\.", r"\1.fc\2."),
    Rename(r"^tower\.deepstack_merger_list\.", "tower.deep_mergers."),
    Split("qkv", ("q_proj", "k_proj", "v_proj")),
    Drop(r"^tower\."),
)


class PlacedPatches(PatchEmbedding):
    """The product with the numbers of each patch, plus a vector that follows them in its row."""

    def __init__(self, context: LayerContext, outputs: int, inputs: tuple[int, ...]) -> None:
        super().__init__(context, outputs, inputs, bias=True)
        weight = self.holds[0]
        self.holds[0] = weight._replace(shape=(outputs, weight.shape[1] + outputs))

    def complete(self) -> None:
        """The matrix of the product and the identity, as one: sums are those of a longer row."""
        weight = self._placed["weight"]
        matrix = weight.reshape(len(weight), -1).astype(np.float32)
        self._placed["weight"] = np.concatenate((matrix, np.eye(len(matrix), dtype=np.float32)), axis=1)
        super().complete()


class InterpolatedPositions(Layer):
    """Learned vectors of the places of a square grid, kept on the host."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self._side, self._width = side, width
        self.expected["weight"] = (side * side, width)
        self._table: np.ndarray

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._table = to_values(tensor).astype(np.float32).reshape(self._side, self._side, self._width)

    def lines(self, lines: int, columns: int) -> Iterator[np.ndarray]:
        """The vectors of each line of a grid, float32 [columns, E]: bilinear, with corners on the table's corners."""
        left, right, part = self._between(columns)
        for above, below, share in zip(*self._between(lines), strict=True):
            line = self._table[above] * (1 - share) + self._table[below] * share
            yield line[left] * (1 - part) + line[right] * part

    def _between(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For ``count`` places along a side, the learned ones around each, and the share [count, 1] of the later."""
        scale = np.float32(max(count - 1, 1))
        place = (np.arange(count, dtype=np.float32) * np.float32(self._side - 1)) / scale
        first = np.floor(place)
        share = (place - first)[:, None]
        first = first.astype(np.int64)
        return first, np.minimum(first + 1, self._side - 1), share


class Qwen3PatchMerger(Layer):
    """Makes a feature of each square of patches: a norm, and an MLP over the square."""

    def __init__(self, config: Qwen3VisionConfig, context: LayerContext, *, norm_of_square: bool) -> None:
        """``norm_of_square``: of all patches of a square together."""
        super().__init__()
        self.kernels, self._patches, self._norm_of_square = context.kernels, config.merge**2, norm_of_square
        inner = config.hidden_size * self._patches
        self.norm = self.attach("norm", LayerNorm(context, inner if norm_of_square else config.hidden_size, _EPS))
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], inner, True, activation="gelu")
        )
        self.fc2 = self.attach("fc2", Projection(context, inner, config.outputs, bias=True))

    def __call__(self, stream: Array, batch: ForwardBatch) -> Array:
        """The stream float32 [T, E], square by square, to features float32 [N, outputs]."""
        if self._norm_of_square:
            squares = self.norm(self.kernels.take_sampled(stream, batch, self._patches))
        else:
            squares = self.kernels.take_sampled(self.norm(stream), batch, self._patches)
        return self.fc2(self.fc1(squares))


class Qwen3Tower(Tower):
    """Rows are patches in the order of squares, with their positions' vectors; all patches attend to each other."""

    rotary_axes = 2

    def __init__(self, config: Qwen3VisionConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.patch_size
        self.row_width, self.max_rows = 3 * config.frames * size**2 + width, config.max_patches
        self.patches = self.attach("patches", PlacedPatches(context, width, (3, config.frames, size, size)))
        self.positions = self.attach("positions", InterpolatedPositions(config.side, width))
        angles = PlaceAngles(config.head_dim, config.rope.theta, context.kernels)
        self.layers: list[EncoderPreNormLayer] = []
        for index in range(config.num_layers):
            attention = Attention(config, context, AttentionSpec(config.head_dim**-0.5, causal=False), angles)
            mlp = MLP(context, width, config.intermediate_size, True, config.activation)
            layer = EncoderPreNormLayer(attention, mlp, [LayerNorm(context, width, _EPS) for _ in range(2)])
            self.layers.append(self.attach(f"layers.{index}", layer))
        self.merger = self.attach("merger", Qwen3PatchMerger(config, context, norm_of_square=False))
        #: By the layer of the tower whose stream they read.
        self.deep_mergers = {
            layer: self.attach(f"deep_mergers.{i}", Qwen3PatchMerger(config, context, norm_of_square=True))
            for i, layer in enumerate(config.deep_layers)
        }
        self.workspace = self.layers[0].attention.kv_spec

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        check_sides(image, self.config)
        config, size, merge = self.config, self.config.patch_size, self.config.merge
        lines, columns = image.height // size, image.width // size
        count, width = lines * columns, self.row_width - config.hidden_size
        places, features = np.stack(patch_places(lines, columns, merge)), np.arange(0, count, merge**2, dtype=np.int64)
        inputs = []
        for pixels in image.array():
            rows = np.empty((count, self.row_width), np.float32)
            patches = patch_rows(config.normalisation.rows(pixels), size, merge).reshape(count, 3, 1, size**2)
            rows[:, :width].reshape(count, 3, config.frames, size**2)[:] = patches
            squares = rows.reshape(lines // merge, columns // merge, merge, merge, -1)[..., width:]
            for i, line in enumerate(self.positions.lines(lines, columns)):
                squares[i // merge, :, i % merge] = line.reshape(columns // merge, merge, -1)
            inputs.append(TowerInput(rows, np.arange(count), features, (count,), places))
        return inputs

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> list[Array]:
        stream, deep = self.patches(rows), []
        for index, layer in enumerate(self.layers):
            stream = layer(stream, caches[0], batch)
            if (merger := self.deep_mergers.get(index)) is not None:
                deep.append(merger(stream, batch))
        return [self.merger(stream, batch), *deep]


# The language models: Qwen3, Qwen3-MoE and Qwen3.5, with interleaved M-RoPE.


def interleaved_sections(reader: ConfigReader, sections: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    """``RopeConfig.sections`` of a head, in which pairs of time, height and width follow each other in turn."""
    check_sections(reader, sections, pairs)
    axes = np.zeros(pairs, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    runs: list[int] = []
    for axis in axes.tolist():
        while not runs or (len(runs) - 1) % 3 != axis:
            runs.append(0)
        runs[-1] += 1
    return tuple(runs)


def _text_reader(reader: ConfigReader, defaults: Mapping[str, Any]) -> ConfigReader:
    """The values of ``text_config``, and what the whole has beside it; of tied embeddings, the whole's count."""
    text = {name: value for name, value in reader.table("text_config").items() if value is not None}
    if reader.raw.get("tie_word_embeddings") is not None:
        text.pop("tie_word_embeddings", None)
    return replace(reader, raw=reader.raw | text).with_defaults(**defaults)


def _vision_fields(reader: ConfigReader, text: ModelConfig, *, has_deep_layers: bool) -> dict[str, Any]:
    """``vision`` and ``image_facts``."""
    table = reader.table("vision_config")
    vision = read_qwen3_vision(replace(reader, raw=table), has_deep_layers=has_deep_layers)
    check_outputs(reader, vision, text)
    layers = tuple(range(1, 1 + len(vision.deep_layers)))
    if len(layers) > text.num_layers:
        raise ConfigError(
            f"{reader.file}: deepstack_visual_indexes has {len(layers)} layers, but the decoder only {text.num_layers}"
        )
    facts = ImageFacts("qwen3_vl", reader.positive("image_token_id"), layers=layers)
    return {"vision": vision, "image_facts": facts}


_SECTIONS = (24, 20, 20)
#: Defaults of transformers, which config.json may leave out.
_IDS = {"image_token_id": 151655, "video_token_id": 151656}
_DEFAULTS = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000.0},
}
_MOE_DEFAULTS = {
    **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 500000.0},
    **{"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60},
}


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(ModelConfig):
    vision: Qwen3VisionConfig


class Qwen3VLForConditionalGeneration(LlamaForCausalLM):
    checkpoint_map = (*_TOWER, *_TOWER_NAMES, *TEXT_NAMES)

    def make_tower(self, config: Qwen3VLConfig, context: LayerContext) -> Tower:
        return Qwen3Tower(config.vision, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(**_IDS)
        text_reader, sections = without_sections(_text_reader(reader, _DEFAULTS), _SECTIONS)
        text = LlamaForCausalLM.read_config("Qwen3ForCausalLM", text_reader)
        rope = replace(text.rope, sections=interleaved_sections(reader, sections, text.head_dim // 2))
        changes = {"architecture": architecture, "rope": rope}
        return Qwen3VLConfig(**(fields_of(text) | changes | _vision_fields(reader, text, has_deep_layers=True)))


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(MixtureConfig):
    vision: Qwen3VisionConfig


_MIXTURE: MixtureFamily = replace(
    MIXTURES["Qwen3MoeForCausalLM"],
    routing=replace(MIXTURES["Qwen3MoeForCausalLM"].routing, renormalize=True),
    reads_renormalize=False,
)


class Qwen3VLMoeForConditionalGeneration(MixtureForCausalLM):
    families: ClassVar[Mapping[str, Family]] = {"Qwen3VLMoeForConditionalGeneration": _MIXTURE}
    transposed_experts = None

    def __init__(self, config: Qwen3VLMoeConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map = (*Qwen3VLForConditionalGeneration.checkpoint_map, *self.checkpoint_map)

    def make_tower(self, config: Qwen3VLMoeConfig, context: LayerContext) -> Tower:
        return Qwen3Tower(config.vision, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        reader = reader.with_defaults(**_IDS)
        text_reader, sections = without_sections(_text_reader(reader, _MOE_DEFAULTS), _SECTIONS)
        fields = mixture_fields(architecture, text_reader, _MIXTURE)
        text = MixtureConfig(**fields)
        rope = replace(text.rope, sections=interleaved_sections(reader, sections, text.head_dim // 2))
        changes = {"rope": rope, "ropes": (rope,) * text.num_layers}
        return Qwen3VLMoeConfig(**(fields | changes | _vision_fields(reader, text, has_deep_layers=True)))


def _reads_images(reader: ConfigReader) -> bool:
    """Whether there is a tower, and the image processor's file; checkpoints that were tuned on texts may lack both."""
    if not reader.table("vision_config"):
        return False
    try:
        read_settings(reader.file.parent, {})
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(Qwen3NextConfig):
    #: None: the network reads texts alone.
    vision: Qwen3VisionConfig | None


class Qwen35ForConditionalGeneration(Qwen3NextForCausalLM):
    """Qwen3.5 and 3.6, dense and with experts, with their tower; without deep layers."""

    def __init__(self, config: Qwen35Config, context: LayerContext) -> None:
        super().__init__(config, context)
        if config.vision is not None:
            self.checkpoint_map = (*_TOWER, *self.checkpoint_map, *_TOWER_NAMES)

    def make_tower(self, config: Qwen35Config, context: LayerContext) -> Tower | None:
        return None if config.vision is None else Qwen3Tower(config.vision, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = super().read_config(architecture, reader)
        if not _reads_images(reader):
            return Qwen35Config(vision=None, **fields_of(text))
        reader = reader.with_defaults(image_token_id=248056, video_token_id=248057)
        _, sections = without_sections(replace(reader, raw=reader.table("text_config")), (11, 11, 10))
        pairs = int(text.head_dim * text.rope.partial_rotary_factor) // 2
        changes = {"rope": replace(text.rope, sections=interleaved_sections(reader, sections, pairs))}
        return Qwen35Config(**(fields_of(text) | changes | _vision_fields(reader, text, has_deep_layers=False)))
