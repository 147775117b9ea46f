"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): a tower for images of any size, and a Qwen2 with M-RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ImageFacts, ModelConfig, RopeConfig
from octavo.core.request import ImageInput
from octavo.images.image_files import Normalisation
from octavo.images.processors import pixel_bounds, read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, ArrayMaker, AttentionSpec, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import Layer, LayerContext, RMSNorm
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.rope import RotaryRows, rotary_values
from octavo.models.checkpoint import (
    CheckpointEntry,
    DropPart,
    Pairs,
    Rename,
    Shapes,
    Split,
    Tensor,
    has_values,
    without_values,
)
from octavo.models.config_files import ConfigReader, fields_of, read_activation
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.network import Tower, TowerInput
from octavo.models.vision import TEXT_NAMES, PatchEmbedding, Projection, patch_places, patch_rows, read_pixels

#: Most lines or columns of patches: more than a processor's largest ratio of sides allows.
_MAX_SIDE = 8192
#: Defaults of transformers, which ``vision_config`` may leave out.
_VISION_DEFAULTS = {
    **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16},
    **{"out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]},
}


@dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(ModelConfig):
    """What the towers of Qwen2.5-VL and Qwen3-VL have in common: positions by line and column, features of squares."""

    activation: Activation
    normalisation: Normalisation
    #: Sides: of a patch in pixels; in patches, of the square that makes a feature.
    patch_size: int
    merge: int
    #: Width of the features.
    outputs: int
    #: Of the largest image, if the model's files limit it.
    max_patches: int | None


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(QwenTowerConfig):
    #: Side of a window in squares.
    window: int
    #: Layers without windows.
    full_layers: frozenset[int]


def read_tower_fields(reader: ConfigReader, family: str, activation: str, patch: int) -> dict[str, Any]:
    """Fields of ``QwenTowerConfig``; ``activation`` and the side of a ``patch`` are defaults."""
    hidden, heads, layers = reader.positive("hidden_size"), reader.positive("num_heads"), reader.positive("depth")
    if hidden % (4 * heads):
        raise ConfigError(
            f"{reader.file}: hidden_size ({hidden}) of the tower must be a multiple of 4 * num_heads ({4 * heads})"
        )
    if reader.positive(reader.named("in_channels", "in_chans"), 3) != 3:
        raise ConfigError(f"{reader.file}: the tower must have 3 channels, those of red, green and blue")
    patch = reader.positive("patch_size", patch)
    theta = ConfigReader(reader.table("rope_parameters"), reader.file).number("rope_theta", 10000.0)
    max_patches = None
    with suppress(ConfigError):  # it is reported when images are processed
        max_patches = pixel_bounds(read_settings(reader.file.parent, {}))[1] // patch**2
    return {
        "architecture": "vision tower",
        "vocab_size": 0,
        "hidden_size": hidden,
        "intermediate_size": reader.positive("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_position": _MAX_SIDE,
        "rope": RopeConfig(theta=theta),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "activation": read_activation(reader, "hidden_act", activation),
        "normalisation": read_pixels(replace(reader, raw={}), family),
        "patch_size": patch,
        "merge": reader.positive("spatial_merge_size", 2),
        "outputs": reader.positive("out_hidden_size"),
        "max_patches": max_patches,
    }


def read_layer_numbers(reader: ConfigReader, name: str, layers: int) -> list[int]:
    """A list of layers of the tower."""
    numbers = reader.raw[name]
    if not isinstance(numbers, list | tuple) or not all(isinstance(i, int) and 0 <= i < layers for i in numbers):
        raise ConfigError(f"{reader.file}: {name} must be a list of layers below {layers}, not {numbers!r}")
    return [*numbers]


def read_qwen_vision(reader: ConfigReader) -> QwenVisionConfig:
    reader = reader.with_defaults(**_VISION_DEFAULTS)
    fields = read_tower_fields(reader, "qwen2_5_vl", "silu", 14)
    full = read_layer_numbers(reader, "fullatt_block_indexes", fields["num_layers"])
    window, patch, merge = reader.positive("window_size", 112), fields["patch_size"], fields["merge"]
    if window < patch * merge:
        raise ConfigError(f"{reader.file}: window_size must be at least that of a feature ({patch * merge}): {window}")
    return QwenVisionConfig(window=window // merge // patch, full_layers=frozenset(full), **fields)


def check_sides(image: ImageInput, config: QwenTowerConfig) -> None:
    """Raises InvalidRequestError unless an image consists of whole features."""
    unit, largest = config.merge * config.patch_size, _MAX_SIDE * config.patch_size
    if not all(0 < side <= largest and side % unit == 0 for side in (image.height, image.width)):
        raise InvalidRequestError(
            f"sides of images must be multiples of {unit} and at most {largest}, not {image.height} x {image.width}"
        )


@dataclass(frozen=True)
class SumFrames:
    """Sums weights [outputs, colours, frames, lines, columns] over the frames: an image is the same in each."""

    name: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if name == self.name and isinstance(tensor, np.ndarray) and tensor.ndim == 5:
                outputs, colours, _, lines, columns = tensor.shape
                if has_values(tensor):
                    tensor = tensor.astype(np.float32).sum(axis=2)
                else:
                    tensor = without_values((outputs, colours, lines, columns), tensor.dtype)
            yield name, tensor


QWEN_VISION_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?visual\.", "tower."),
    DropPart("tower."),
    Rename(r"^tower\.patch_embed\.proj\.", "tower.patches."),
    SumFrames("tower.patches.weight"),
    Rename(r"^tower\.blocks\.(\d+)\.norm1\.", r"tower.layers.\1.input_layernorm."),
    Rename(r"^tower\.blocks\.(\d+)\.norm2\.", r"tower.layers.\1.post_attention_layernorm."),
    Rename(r"^tower\.blocks\.(\d+)\.attn\.proj\.", r"tower.layers.\1.self_attn.o_proj."),
    Rename(r"^tower\.blocks\.(\d+)\.attn\.", r"tower.layers.\1.self_attn."),
    Rename(r"^tower\.blocks\.", "tower.layers."),
    Split("qkv", ("q_proj", "k_proj", "v_proj")),
    Rename(r"^tower\.merger\.ln_q\.", "tower.merger.norm."),
    Rename(r"^tower\.merger\.mlp\.0\.", "tower.merger.fc1."),
    Rename(r"^tower\.merger\.mlp\.2\.", "tower.merger.fc2."),
)


class PlaceAngles(RotaryRows):
    """Angles by line for the first half of a head's pairs, by column for the others, with the same frequencies."""

    def __init__(self, head_dim: int, theta: float, kernels: ArrayMaker) -> None:
        pairs = head_dim // 4
        exponents = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
        frequencies = 1.0 / np.power(theta, exponents.astype(np.float64)).astype(np.float32)
        self.array = kernels.array(rotary_values(np.tile(frequencies, 2), _MAX_SIDE, 1.0))
        self.sections = (pairs, pairs)


class PatchMerger(Layer):
    """Makes a feature of each square of patches: a norm of each patch, and an MLP over the square."""

    def __init__(self, config: QwenVisionConfig, context: LayerContext) -> None:
        super().__init__()
        self.kernels, self._patches = context.kernels, config.merge**2
        inner = config.hidden_size * self._patches
        self.norm = self.attach("norm", RMSNorm(context, config.hidden_size, config.rms_norm_eps))
        self.fc1 = self.attach(
            "fc1", MergedColumnParallelLinear(context, [("", inner)], inner, True, activation="gelu")
        )
        self.fc2 = self.attach("fc2", Projection(context, inner, config.outputs, bias=True))

    def __call__(self, stream: Array, batch: ForwardBatch) -> Array:
        """The stream float32 [T, E], square by square, to features float32 [N, outputs]."""
        return self.fc2(self.fc1(self.kernels.take_sampled(self.norm(stream), batch, self._patches)))


class QwenTower(Tower):
    """Rows are patches in the order of squares and windows; windows are the segments of a piece."""

    rotary_axes = 2

    def __init__(self, config: QwenVisionConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        size = config.patch_size
        self.row_width, self.max_rows = 3 * size**2, config.max_patches
        self.patches = self.attach("patches", PatchEmbedding(context, config.hidden_size, (3, size, size), bias=False))
        self._angles = PlaceAngles(config.head_dim, config.rope.theta, context.kernels)
        self.layers: list[LlamaLayer] = []
        for index in range(config.num_layers):
            spec = AttentionSpec(config.head_dim**-0.5, causal=False, cross=index in config.full_layers)
            mlp = GatedMLP(context, config.hidden_size, config.intermediate_size, True, config.activation)
            layer = LlamaLayer(config, context, Attention(config, context, spec, self._angles), mlp)
            self.layers.append(self.attach(f"layers.{index}", layer))
        self.merger = self.attach("merger", PatchMerger(config, context))
        self.workspace = self.layers[0].attention.kv_spec

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        check_sides(image, self.config)
        config, size, square = self.config, self.config.patch_size, self.config.merge**2
        lines, columns = image.height // size, image.width // size
        order, lens = _windows(lines // config.merge, columns // config.merge, config.window)
        places = np.stack(patch_places(lines, columns, config.merge))
        segments = square * lens
        inputs = []
        for pixels in image.array():
            patches = patch_rows(config.normalisation.rows(pixels), size, config.merge)
            rows = patches.reshape(len(order), square, -1)[order].reshape(len(patches), -1)
            inputs.append(
                TowerInput(
                    np.ascontiguousarray(rows),
                    np.arange(len(rows)) - np.repeat(np.cumsum(segments) - segments, segments),
                    square * np.argsort(order),
                    tuple(segments.tolist()),
                    np.ascontiguousarray(places.reshape(2, -1, square)[:, order].reshape(2, -1)),
                )
            )
        return inputs

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        stream = self.patches(rows)
        for layer in self.layers:
            stream = layer(stream, caches[layer.attention.spec.cross], batch)
        return self.merger(stream, batch)


def _windows(lines: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of a grid's squares by windows of ``side * side`` squares, and the number of squares of each window."""
    line, column = np.indices((lines, columns)).reshape(2, -1) // side
    window = line * -(-columns // side) + column
    return np.argsort(window, kind="stable"), np.bincount(window)


#: Defaults of transformers, which config.json may leave out.
_DEFAULTS = {
    **{"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    **{"rope_theta": 1e6, "max_window_layers": 80, "bos_token_id": 151643, "eos_token_id": 151645},
}


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(ModelConfig):
    vision: QwenVisionConfig


class Qwen25VLForConditionalGeneration(LlamaForCausalLM):
    checkpoint_map = (*QWEN_VISION_NAMES, *TEXT_NAMES)

    def make_tower(self, config: Qwen25VLConfig, context: LayerContext) -> Tower:
        return QwenTower(config.vision, context)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        fields = {name: value for name, value in reader.table("text_config").items() if value is not None}
        if reader.raw.get("tie_word_embeddings") is not None:
            fields.pop("tie_word_embeddings", None)  # that of the whole counts
        text_reader = replace(reader, raw=reader.raw | fields).with_defaults(**_DEFAULTS)
        text_reader, sections = without_sections(text_reader, (16, 24, 24))
        text = LlamaForCausalLM.read_config("Qwen2ForCausalLM", text_reader)
        check_sections(reader, sections, text.head_dim // 2)
        vision = read_qwen_vision(replace(reader, raw=reader.table("vision_config")))
        check_outputs(reader, vision, text)
        facts = ImageFacts("qwen2_5_vl", reader.positive("image_token_id", 151655))
        changes = {"architecture": architecture, "image_facts": facts, "rope": replace(text.rope, sections=sections)}
        return Qwen25VLConfig(vision=vision, **(fields_of(text) | changes))


def without_sections(reader: ConfigReader, default: tuple[int, ...]) -> tuple[ConfigReader, tuple[int, ...]]:
    """The reader with a plain RoPE, and mrope_section, the sections of a head."""
    rope: dict[str, Any] = reader.table("rope_parameters") or reader.table("rope_scaling")
    sections = rope.pop("mrope_section", None) or default
    if not isinstance(sections, list | tuple) or not all(isinstance(size, int) and size >= 0 for size in sections):
        raise ConfigError(f"{reader.file}: mrope_section must be a list of numbers of pairs, not {sections!r}")
    # The name that transformers 4 has for rows that are not scaled.
    rope.update({name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"})
    rope.pop("mrope_interleaved", None)
    return replace(reader, raw=reader.raw | {"rope_parameters": rope, "rope_scaling": None}), tuple(sections)


def check_sections(reader: ConfigReader, sections: tuple[int, ...], pairs: int) -> None:
    """Raises ConfigError unless there are three sections, of all ``pairs`` that are rotated."""
    if len(sections) != 3 or sum(sections) != pairs:
        raise ConfigError(f"{reader.file}: the three numbers of mrope_section must sum to {pairs}: {list(sections)}")


def check_outputs(reader: ConfigReader, vision: QwenTowerConfig, text: ModelConfig) -> None:
    if vision.outputs != text.hidden_size:
        raise ConfigError(f"{reader.file}: out_hidden_size ({vision.outputs}) must be hidden_size ({text.hidden_size})")
