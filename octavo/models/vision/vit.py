"""Vision transformers (Dosovitskiy et al. 2021): patches as rows, learned positions, layers that see all of a piece.

Tensors are named patches.{weight, bias}, positions.weight, pre_norm, layers.N.{self_attn, attention_norm, mlp,
mlp_norm} and post_norm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import InvalidRequestError
from octavo.core.image_input import ImageInput
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec, Kernels
from octavo.kernels.packed_weight import PackedWeight
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.vocabulary import PositionEmbedding
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.encoder import PreNormLayer
from octavo.models.vision.pixels import patch_places, patch_rows
from octavo.models.vision.tower import Tower, TowerInput
from octavo.models.vision.vit_config import VitConfig

#: Names of layers, as all checkpoints have them.
VIT_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(tower\.vision)\.embeddings\.patch_embedding\.", r"\1.patches."),
    Rename(r"^(tower\.vision)\.embeddings\.position_embedding\.", r"\1.positions."),
    Rename(r"^(tower\.vision)\.embeddings\.class_embedding$", r"\1.positions.class"),
    Rename(r"^(tower\.vision)\.encoder\.", r"\1."),
    Rename(r"^(tower\.vision)\.(pre_layrnorm|pre_layernorm)\.", r"\1.pre_norm."),
    Rename(r"^(tower\.vision)\.post_layernorm\.", r"\1.post_norm."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.self_attn\.out_proj\.", r"\1.self_attn.o_proj."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.layer_norm1\.", r"\1.attention_norm."),
    Rename(r"^(tower\.vision\.layers\.\d+)\.layer_norm2\.", r"\1.mlp_norm."),
)


class PatchEmbedding(Layer):
    """A convolution that moves by its own size, as a product with the numbers of each patch, [inputs] in all."""

    def __init__(self, context: LayerContext, outputs: int, inputs: tuple[int, ...], *, bias: bool) -> None:
        """``inputs``: the dimensions of the checkpoint's weight behind ``outputs``."""
        super().__init__()
        self._kernels, self._dtype, self._bias = context.kernels, context.dtype, bias
        self._placed: dict[str, np.ndarray] = {}
        self._packed: PackedWeight
        self.expected["weight"] = (outputs, *inputs)
        self.holds.append(Weight("weight", (outputs, math.prod(inputs)), "linear", context.dtype))
        if bias:
            self.expected["bias"] = (outputs,)
            self.holds.append(Weight("bias", (outputs,), "vector", context.dtype))

    def __call__(self, rows: Array) -> Array:
        """Rows float32 [T, inputs] to float32 [T, outputs]."""
        return self._packed(rows, DType.FLOAT32)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Keeps the tensor until all are there."""
        self._placed[shard] = tensor

    def complete(self) -> None:
        """Packs the matrix."""
        weight = self._placed.pop("weight")
        matrix = weight.reshape(len(weight), -1)
        self._packed = self._kernels.pack([matrix], self._placed.pop("bias", None), dtype=self._dtype)


class ClassPositionEmbedding(PositionEmbedding):
    """Positions of which the first is that of a token without pixels, whose own embedding is added to it."""

    def __init__(self, context: LayerContext, rows: int, hidden_size: int) -> None:
        super().__init__(context, rows, hidden_size)
        self.expected["class"] = (hidden_size,)
        self._parts: dict[str, np.ndarray] = {}

    def place(self, shard: str, tensor: Any) -> None:
        """Keeps both until they are there."""
        self._parts[shard] = tensor

    def complete(self) -> None:
        """Copies the table."""
        table = self._parts["weight"].astype(np.float32)
        table[0] += self._parts["class"].astype(np.float32)
        self._parts.clear()
        super().place("weight", table)


class VisionTransformer(Layer):
    """The patches of one piece, which all see each other, to the stream after the last layer."""

    def __init__(self, config: VitConfig, context: LayerContext) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config = config
        self.patches = self.attach(
            "patches", PatchEmbedding(context, width, (3, patch, patch), bias=not config.class_token)
        )
        table = ClassPositionEmbedding if config.class_token else PositionEmbedding
        self.positions = self.attach("positions", table(context, config.rows, width))
        self.pre_norm = self.attach("pre_norm", self._norm(context)) if config.pre_norm else None
        self.layers = [self.attach(f"layers.{i}", self._layer(context)) for i in range(config.num_layers)]
        self.post_norm = self.attach("post_norm", self._norm(context)) if config.post_norm else None
        self.kv_spec = self.layers[0].attention.kv_spec

    def _norm(self, context: LayerContext) -> LayerNorm:
        return LayerNorm(context, self.config.hidden_size, self.config.layer_norm_eps)

    def _layer(self, context: LayerContext) -> PreNormLayer:
        config = self.config
        attention = Attention(config, context, AttentionSpec(config.head_dim**-0.5, causal=False))
        mlp = MLP(context, config.hidden_size, config.intermediate_size, True, config.activation)
        return PreNormLayer(config, attention, mlp, [self._norm(context), self._norm(context)])

    def __call__(self, rows: Array, batch: ForwardBatch, cache: LayerCache) -> Array:
        """Rows float32 [T, row_width] to the stream float32 [T, E], before ``post_norm``."""
        stream = self.positions.add_to(self.patches(rows), batch.positions)
        if self.pre_norm is not None:
            stream = self.pre_norm.float32(stream)
        for layer in self.layers:
            stream = layer(stream, cache, batch)
        return stream

    def prepare(self, image: ImageInput, merge: int = 1) -> list[TowerInput]:
        """Pieces as rows for ``__call__``: see ``Tower.prepare`` and ``patch_rows``.

        Each square of ``merge * merge`` patches makes a feature.

        Raises:
            InvalidRequestError: they are of a size that the network does not see.
        """
        self.check(image, merge)
        size = self.config.patch_size
        lines, columns = image.height // size, image.width // size
        positions = self.position_ids(lines, columns, merge)
        return [self._rows(piece[: lines * size, : columns * size], positions, merge) for piece in image.array()]

    def check(self, image: ImageInput, merge: int) -> None:
        """Raises InvalidRequestError for pieces of another size than the network's own."""
        size = self.config.image_size
        if (image.height, image.width) != (size, size):
            raise InvalidRequestError(f"the network sees images of {size} x {size}, not {image.height} x {image.width}")

    def position_ids(self, lines: int, columns: int, merge: int) -> np.ndarray:
        """The row of the table of each patch of a grid, int64 [patches], in the order of ``patch_rows``."""
        line, column = patch_places(lines, columns, merge)
        return line * columns + column

    def _rows(self, pixels: np.ndarray, positions: np.ndarray, merge: int) -> TowerInput:
        config = self.config
        rows, first = patch_rows(config.normalisation.rows(pixels), config.patch_size, merge), 0
        if config.class_token:
            rows, first = np.concatenate((np.zeros((1, rows.shape[1]), np.float32), rows)), 1
            positions = np.concatenate((np.zeros(1, np.int64), positions + 1))
        features = np.arange(first, len(rows), merge * merge, dtype=np.int64)
        return TowerInput(np.ascontiguousarray(rows), positions, features, (len(rows),))


class VitTower(Tower):
    """A vision transformer; what a family makes of its output comes to it."""

    def __init__(self, vision: VisionTransformer, kernels: Kernels, merge: int = 1) -> None:
        """``merge``: patches of a side of the square that makes a feature."""
        super().__init__()
        self.kernels, self.merge = kernels, merge
        self.row_width, self.max_rows = vision.config.row_width, vision.config.rows
        self.vision = self.attach("vision", vision)
        self.workspace = vision.kv_spec

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        """See ``Tower``."""
        return self.vision.prepare(image, self.merge)


class Projection(ReplicatedConcatLinear):
    """A matrix product with a float32 result, of which every rank has all."""

    def __init__(self, context: LayerContext, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(context, [inputs], outputs, bias)

    def __call__(self, x: Array) -> Array:
        """x [T, in] to float32 [T, out]."""
        return self.product(0, x, DType.FLOAT32)
