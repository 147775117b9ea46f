"""The tower of Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923, section 2.1.1): images of any size.

Patches see those of a window of the image, in a few layers all of them; heads are rotated by line and column. Each
square of neighbouring patches makes a feature. Tensors are named patches.weight, layers.N as those of ``LlamaLayer``,
and merger.{norm, fc1, fc2}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.image_input import ImageInput
from octavo.core.model_config import ModelConfig, RopeConfig
from octavo.images.image_settings import read_settings
from octavo.images.normalise import Normalisation
from octavo.images.processors.qwen2_5_vl import pixel_bounds
from octavo.kernels.arrays import Array, ArrayMaker
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.packed_weight import Activation
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer
from octavo.layers.linear import MergedColumnParallelLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import RotaryRows, rotary_values
from octavo.models.checkpoint import CheckpointEntry, Pairs, Rename, Shapes, Split, has_values, without_values
from octavo.models.config_reader import ConfigReader, read_activation
from octavo.models.llama import LlamaLayer
from octavo.models.vision.pixels import patch_places, patch_rows, read_pixels
from octavo.models.vision.tower import Tower, TowerInput
from octavo.models.vision.vit import PatchEmbedding, Projection

#: Lines and columns of patches of the largest image: more than a processor's largest ratio of sides leaves.
_MAX_SIDE = 8192
#: What config.json leaves out of ``vision_config`` if it is the default of transformers.
_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(ModelConfig):
    """What the tower has beyond ``ModelConfig``."""

    activation: Activation
    normalisation: Normalisation
    #: Pixels of a side of a patch; patches of a side of the square that makes a feature; squares of a side of a window.
    patch_size: int
    merge: int
    window: int
    #: Layers in which each patch sees all.
    full_layers: frozenset[int]
    #: Width of the features.
    outputs: int
    #: Patches of the largest image, where the model's files say how large one may be.
    max_patches: int | None


def read_qwen_vision(reader: ConfigReader) -> QwenVisionConfig:
    """The facts of a ``vision_config``.

    Raises:
        ConfigError: a value is missing, of the wrong type or impossible.
        UnsupportedModelError: the activation is not supported.
    """
    reader = reader.with_defaults(**_DEFAULTS)
    hidden, heads, layers = reader.positive("hidden_size"), reader.positive("num_heads"), reader.positive("depth")
    if hidden % (4 * heads):
        raise ConfigError(
            f"{reader.file}: hidden_size ({hidden}) of the tower must be a multiple of 4 * num_heads ({4 * heads}): "
            "lines and columns turn pairs of dimensions"
        )
    if reader.positive(reader.named("in_channels", "in_chans"), 3) != 3:
        raise ConfigError(f"{reader.file}: the tower must have 3 channels, those of red, green and blue")
    full = reader.raw["fullatt_block_indexes"]
    if not isinstance(full, list) or not all(isinstance(i, int) and 0 <= i < layers for i in full):
        raise ConfigError(f"{reader.file}: fullatt_block_indexes must be a list of layers below {layers}, not {full!r}")
    patch, merge, window = (
        reader.positive(name, default)
        for name, default in (("patch_size", 14), ("spatial_merge_size", 2), ("window_size", 112))
    )
    if window < patch * merge:
        raise ConfigError(f"{reader.file}: window_size must be at least that of a feature ({patch * merge}): {window}")
    theta = ConfigReader(reader.table("rope_parameters"), reader.file).number("rope_theta", 10000.0)
    return QwenVisionConfig(
        architecture="vision tower",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=_MAX_SIDE,
        rope=RopeConfig(theta=theta),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activation=read_activation(reader, "hidden_act", "silu"),
        normalisation=read_pixels(replace(reader, raw={}), "qwen2_5_vl"),
        patch_size=patch,
        merge=merge,
        window=window // merge // patch,
        full_layers=frozenset(full),
        outputs=reader.positive("out_hidden_size"),
        max_patches=_max_patches(reader.file.parent, patch),
    )


def _max_patches(folder: Path, patch: int) -> int | None:
    try:
        _, pixels = pixel_bounds(read_settings(folder, {}))
    except ConfigError:  # it is told where images are to be processed
        return None
    return pixels // patch**2


@dataclass(frozen=True)
class SumFrames:
    """Sums the frames of weights [outputs, colours, frames, lines, columns]: an image is the same in each of them."""

    name: str

    def apply(self, pairs: Pairs, shapes: Shapes) -> Iterator[tuple[str, np.ndarray | QuantizedRows]]:
        """The tensors, that one as [outputs, colours, lines, columns]."""
        for name, tensor in pairs:
            if name == self.name and isinstance(tensor, np.ndarray) and tensor.ndim == 5:
                outputs, colours, _, lines, columns = tensor.shape
                if has_values(tensor):
                    tensor = tensor.astype(np.float32).sum(axis=2)
                else:
                    tensor = without_values((outputs, colours, lines, columns), tensor.dtype)
            yield name, tensor


#: Leads the names of a checkpoint, of transformers 4 or 5, to those of a network's ``tower``.
QWEN_VISION_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?visual\.", "tower."),
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
    """A feature of each square of patches: a norm of each patch, and two products with all of a square."""

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
        """The stream float32 [T, E], in which squares lie behind each other, to features float32 [N, outputs]."""
        return self.fc2(self.fc1(self.kernels.take_sampled(self.norm(stream), batch, self._patches)))


class QwenTower(Tower):
    """Rows are patches, square by square and window by window; windows are the segments of a piece."""

    rotary_axes = 2

    def __init__(self, config: QwenVisionConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        size = config.patch_size
        self.row_width, self.max_rows = 3 * size**2, config.max_patches
        self.patches = self.attach("patches", PatchEmbedding(context, config.hidden_size, (3, size, size), bias=False))
        self._angles = PlaceAngles(config.head_dim, config.rope.theta, context.kernels)
        self.layers = [self.attach(f"layers.{i}", self._layer(i, context)) for i in range(config.num_layers)]
        self.merger = self.attach("merger", PatchMerger(config, context))
        self.workspace = self.layers[0].attention.kv_spec

    def _layer(self, index: int, context: LayerContext) -> LlamaLayer:
        config = self.config
        spec = AttentionSpec(config.head_dim**-0.5, causal=False, cross=index in config.full_layers)
        mlp = GatedMLP(context, config.hidden_size, config.intermediate_size, True, config.activation)
        return LlamaLayer(config, context, Attention(config, context, spec, self._angles), mlp)

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        """See ``Tower``.

        Raises:
            InvalidRequestError: whole features do not cover it, or it is too large.
        """
        size = self.config.patch_size
        unit, largest = self.config.merge * size, _MAX_SIDE * size
        if not all(0 < side <= largest and side % unit == 0 for side in (image.height, image.width)):
            raise InvalidRequestError(
                f"the network sees images whose sides are multiples of {unit}, at most {largest}: not "
                f"{image.height} x {image.width}"
            )
        return [self._piece(pixels) for pixels in image.array()]

    def _piece(self, pixels: np.ndarray) -> TowerInput:
        config, square = self.config, self.config.merge**2
        lines, columns = (side // config.patch_size for side in pixels.shape[:2])
        order, lens = _windows(lines // config.merge, columns // config.merge, config.window)
        patches = patch_rows(config.normalisation.rows(pixels), config.patch_size, config.merge)
        places = np.stack(patch_places(lines, columns, config.merge))
        rows = patches.reshape(len(order), square, -1)[order].reshape(len(patches), -1)
        segments = square * lens
        return TowerInput(
            np.ascontiguousarray(rows),
            np.arange(len(rows)) - np.repeat(np.cumsum(segments) - segments, segments),
            square * np.argsort(order),
            tuple(segments.tolist()),
            np.ascontiguousarray(places.reshape(2, -1, square)[:, order].reshape(2, -1)),
        )

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        """See ``Tower``."""
        stream = self.patches(rows)
        for layer in self.layers:
            stream = layer(stream, caches[layer.attention.spec.cross], batch)
        return self.merger(stream, batch)


def _windows(lines: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid's squares in the order of windows of ``side * side`` of them, each line by line, and how many each has."""
    line, column = np.indices((lines, columns)).reshape(2, -1) // side
    window = line * -(-columns // side) + column
    return np.argsort(window, kind="stable"), np.bincount(window)
