"""Granite 4 Vision: a SigLIP over tiles, whose layers make features for several layers of a Granite (DeepStack).

Each of these layers has a projector: a Q-Former (Li et al. 2023, arXiv 2301.12597, section 3.1) whose queries read a
window of patches. There is a query for each square of 2 x 2 patches, which begins as their mean or as one corner.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.attention import Attention, CrossAttention
from octavo.layers.layer import Layer, LayerContext, LayerNorm, Weight
from octavo.layers.mlp import MLP
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.dense import DenseConfig
from octavo.models.encoder import EncoderConfig
from octavo.models.llava_next import NewlineTower
from octavo.models.network import Tower, TowerConfig, TowerInput
from octavo.models.vision import (
    TOWER_NAMES,
    Projection,
    VisionLanguageModel,
    VisionTransformer,
    VitConfig,
    is_tied,
    patch_rows,
    read_image_token,
    read_language_model,
    read_pixels,
    read_siglip,
    with_tower,
)

#: Patches of a square, which has a query.
_SQUARE = 4
#: Of the norm before a Q-Former, whatever the configuration says.
_EPS = 1e-6


@dataclass(frozen=True)
class WindowProjector:
    """Which stream a projector reads, and where its features go."""

    name: str
    #: The layer of the tower before which the stream is read; the one after the last is the output.
    tower_layer: int
    #: The layer of the language model before which its features are added.
    layer: int
    #: The patch of a square with which its query begins, line by line; None: the mean.
    corner: int | None = None


@dataclass(frozen=True, kw_only=True)
class Granite4TowerConfig(TowerConfig):
    #: The layers up to the last one that is read.
    vision: VitConfig
    projectors: tuple[WindowProjector, ...]
    qformer: EncoderConfig
    #: Layers of the Q-Formers that read the window are every so many, from the first on.
    cross_every: int
    #: Side of a window in patches.
    window: int
    #: Of the language model, which does not multiply features by it.
    embedding_scale: float

    def make(self, width: int, context: LayerContext) -> Tower:
        return Granite4Tower(self, width, context)

    @property
    def names(self) -> tuple[CheckpointEntry, ...]:
        return _NAMES

    @property
    def order(self) -> np.ndarray:
        """The patches of a tile by window, square of the window, and place in the square: int64 [patches]."""
        line, column = np.indices((self.vision.side, self.vision.side)).reshape(2, -1)
        keys = []
        for size in (self.window, 2, 1):
            keys += [line // size, column // size]
        return np.lexsort(keys[::-1])


_LAYER = r"^(tower\.(?:layerwise|spatial)_projectors\.\d+\.layers\.\d+)"
_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?image_newline$", "tower.newline"),
    Rename(r"^(model\.)?((layerwise|spatial)_projectors)\.", r"tower.\2."),
    Rename(r"^(tower\.\w+_projectors\.\d+)\.out_linear\.", r"\1.out."),
    Rename(r"^(tower\.\w+_projectors\.\d+)\.qformer\.layernorm\.", r"\1.query_norm."),
    Rename(r"^(tower\.\w+_projectors\.\d+)\.qformer\.encoder\.layer\.", r"\1.layers."),
    Rename(rf"{_LAYER}\.attention\.attention\.([qkv])\w+\.", r"\1.self_attn.\2_proj."),
    Rename(rf"{_LAYER}\.attention\.output\.dense\.", r"\1.self_attn.o_proj."),
    Rename(rf"{_LAYER}\.attention\.output\.LayerNorm\.", r"\1.attention_norm."),
    Rename(rf"{_LAYER}\.crossattention\.attention\.([qkv])\w+\.", r"\1.cross_attn.\2_proj."),
    Rename(rf"{_LAYER}\.crossattention\.output\.dense\.", r"\1.cross_attn.o_proj."),
    Rename(rf"{_LAYER}\.crossattention\.output\.LayerNorm\.", r"\1.cross_norm."),
    Rename(rf"{_LAYER}\.intermediate_query\.dense\.", r"\1.mlp.fc1."),
    Rename(rf"{_LAYER}\.output_query\.dense\.", r"\1.mlp.fc2."),
    Rename(rf"{_LAYER}\.output_query\.LayerNorm\.", r"\1.mlp_norm."),
    *TOWER_NAMES,
)


class QFormerLayer(Layer):
    """Attention of the queries of a window, of queries to its patches, and an MLP, each with a norm after it."""

    def __init__(self, config: EncoderConfig, context: LayerContext, *, reads_window: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        spec = AttentionSpec(config.head_dim**-0.5, causal=False)
        self.attention = self.attach("self_attn", Attention(config, context, spec))
        self.attention_norm = self.attach("attention_norm", LayerNorm(context, width, eps))
        self.cross: CrossAttention | None = None
        if reads_window:
            self.cross = self.attach("cross_attn", CrossAttention(config, context, of_segment=True))
            self.cross_norm = self.attach("cross_norm", LayerNorm(context, width, eps))
        self.mlp = self.attach("mlp", MLP(context, width, config.intermediate_size, True, config.activation))
        self.mlp_norm = self.attach("mlp_norm", LayerNorm(context, width, eps))

    def __call__(self, stream: Array, patches: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """Queries and patches float32 [T, E], to queries; the memory of the queries may be reused."""
        stream = self.attention_norm.float32(self.attention.add_to(stream, stream, cache, batch))
        if self.cross is not None:
            self.cross.write(patches, cache, batch)
            stream = self.cross_norm.float32(self.cross.add_to(stream, stream, cache, batch))
        return self.mlp_norm.float32(self.mlp.add_to(stream, stream))


class WindowQFormer(Layer):
    """The features of a tile, one for each square of patches.

    Segments are windows. A query has a row for each patch of its square, and these are alike: attention to a window's
    rows is that to its queries, as each counts four times.
    """

    def __init__(self, config: Granite4TowerConfig, corner: int | None, width: int, context: LayerContext) -> None:
        super().__init__()
        self.kernels, self._dtype, self._corner = context.kernels, context.dtype, corner
        hidden, window, self._order = config.vision.hidden_size, config.window, config.order
        self._squares = window**2 // _SQUARE
        line, column = np.divmod(np.arange(config.vision.side**2), config.vision.side)
        #: The place in its window of each patch of a tile, line by line.
        self._places = line % window * window + column % window
        self.norm = self.attach("norm", LayerNorm(context, hidden, _EPS))
        self.query_norm = self.attach("query_norm", LayerNorm(context, hidden, config.qformer.layer_norm_eps))
        self.layers = [
            self.attach(
                f"layers.{index}",
                QFormerLayer(config.qformer, context, reads_window=index % config.cross_every == 0),
            )
            for index in range(config.qformer.num_layers)
        ]
        self.out = self.attach("out", Projection(context, hidden, width, bias=True))
        self.expected["query"] = (1, self._squares, hidden)
        self.expected["image_positions"] = (1, window**2, hidden)
        for name in self.expected:
            self.holds.append(Weight(name, (len(self._places), hidden), "embedding", context.dtype))
        self._tables: dict[str, Array] = {}

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        """Keeps a row for each patch of a tile: of queries by ``token_ids``, of places by ``positions``."""
        rows = np.arange(len(self._order)) // _SQUARE % self._squares if shard == "query" else self._places
        self._tables[shard] = self.kernels.array(np.ascontiguousarray(to_values(tensor)[0][rows]), self._dtype)

    def __call__(self, stream: Array, batch: ForwardBatch, cache: LayerCache) -> Array:
        """The stream of a tile, float32 [T, E] by windows, to float32 [N, width]."""
        kernels, first = self.kernels, batch.token_ids
        patches = self.norm.float32(stream)
        if self._corner is None:
            queries = kernels.embedding(first, patches, scale=1 / _SQUARE)
            for patch in range(1, _SQUARE):
                queries = kernels.embedding(first, patches[patch:], scale=1 / _SQUARE, add=queries)
        else:
            queries = kernels.embedding(first, patches[self._corner :])
        queries = self.query_norm.float32(kernels.embedding(first, self._tables["query"], add=queries))
        patches = kernels.embedding(batch.positions, self._tables["image_positions"], add=patches)
        for layer in self.layers:
            queries = layer(queries, patches, cache, batch)
        return self.out(kernels.take_sampled(queries, batch))


class Granite4Tower(NewlineTower):
    def __init__(self, config: Granite4TowerConfig, width: int, context: LayerContext) -> None:
        super().__init__(VisionTransformer(config.vision, context, whole=True), width, context, config.vision.side // 2)
        self._config = config
        self._projectors = [
            (each, self.attach(each.name, WindowQFormer(config, each.corner, width, context)))
            for each in sorted(config.projectors, key=lambda each: each.layer)
        ]
        self.workspace = self._projectors[0][1].layers[0].attention.kv_spec
        self.whole_workspace = self.vision.kv_spec

    def tiles(self, image: ImageInput) -> list[TowerInput]:
        self.check(image)
        config, order = self.vision.config, self._config.order
        line, column = np.divmod(order[::_SQUARE], config.side)
        squares = line // 2 * self.side + column // 2
        windows = (self._config.window**2,) * (len(order) // self._config.window**2)
        return [
            TowerInput(
                np.ascontiguousarray(patch_rows(config.normalisation.rows(piece), config.patch_size)[order]),
                order,
                _SQUARE * np.argsort(squares),
                windows,
                # The first row of the row's square.
                token_ids=np.arange(len(order)) // _SQUARE * _SQUARE,
            )
            for piece in image.array()
        ]

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> list[Array]:
        made: dict[int, Array] = {}
        for number, stream in enumerate(self.vision.streams(rows, batch, caches[1])):
            for each, projector in self._projectors:
                if each.tower_layer == number:
                    made[each.layer] = projector(stream, batch, caches[0])
        return [made[each.layer] for each, _ in self._projectors]

    def join(self, places: Sequence[np.ndarray | None], features: Sequence[np.ndarray]) -> np.ndarray:
        joined = super().join(places, features)
        joined[:, : len(self.newline)] /= np.float32(self._config.embedding_scale)
        return joined


class Granite4VisionForConditionalGeneration(VisionLanguageModel):
    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_language_model(reader, {"granite4_vision_text": "GraniteForCausalLM", "granite": None})
        assert isinstance(text, DenseConfig)
        text = replace(text, tie_word_embeddings=is_tied(reader, False))
        inside = replace(reader, raw=reader.table("vision_config"))
        inside.only("model_type", "siglip_vision_model")
        if reader.get("vision_feature_select_strategy", "default") != "full":
            raise UnsupportedModelError(
                f"{reader.file}: vision_feature_select_strategy must be full for a tower without a class token"
            )
        vision = replace(read_siglip(inside), post_norm=False, normalisation=read_pixels(reader, "granite4_vision"))
        projectors = _read_projectors(reader, vision.num_layers, text.num_layers)
        table = reader.table("qformer_config")
        qformer = replace(reader, raw=table).with_defaults(**(_QFORMER if table else _QFORMER | _ONE_LAYER))
        tower = Granite4TowerConfig(
            vision=replace(vision, num_layers=max(1, *(each.tower_layer for each in projectors))),
            projectors=projectors,
            qformer=_read_qformer(qformer, vision.hidden_size),
            cross_every=qformer.positive("cross_attention_frequency"),
            window=_read_window(reader, vision.side),
            embedding_scale=text.embedding_scale,
        )
        layers = tuple(sorted(each.layer for each in projectors))[1:]
        facts = ImageFacts("llava_next", read_image_token(reader, 32000), layers=layers)
        return with_tower(text, architecture, tower, facts)


def _read_window(reader: ConfigReader, side: int) -> int:
    """The side of a window, of which the queries' side is half."""
    rate = reader.get("downsample_rate", None)
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", rate) if isinstance(rate, str) else None
    queries, window = (int(match[1]), int(match[2])) if match else (0, 0)
    if not queries or window != 2 * queries or side % window:
        raise ConfigError(
            f"{reader.file}: downsample_rate must be the sides of a window in queries and in patches, such as 4/8, of "
            f"which the second is twice the first and divides image_size / patch_size ({side}), not {rate!r}"
        )
    return window


def _read_projectors(reader: ConfigReader, tower_layers: int, layers: int) -> tuple[WindowProjector, ...]:
    def tower_layer(number: Any, name: str) -> int:
        if type(number) is not int or not -tower_layers - 1 <= number <= tower_layers:
            raise ConfigError(f"{reader.file}: {name} has the tower's layer {number!r}; there are {tower_layers}")
        return number if number >= 0 else tower_layers + 1 + number

    pairs, targets = reader.get("deepstack_layer_map", None), reader.get("spatial_target_layers", [12, 15, 18, 21])
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"{reader.file}: deepstack_layer_map must be pairs of layers, not {pairs!r}")
    if not isinstance(targets, list) or len(targets) > _SQUARE:
        raise ConfigError(f"{reader.file}: spatial_target_layers must be up to {_SQUARE} layers, not {targets!r}")
    spatial = tower_layer(reader.get("spatial_vision_layer", -1), "spatial_vision_layer")
    projectors = [
        WindowProjector(f"layerwise_projectors.{i}", tower_layer(number, "deepstack_layer_map"), layer)
        for i, (number, layer) in enumerate(pairs)
    ]
    projectors += [
        WindowProjector(f"spatial_projectors.{i}", spatial, layer, corner=i) for i, layer in enumerate(targets)
    ]
    numbers = [each.layer for each in projectors]
    if not all(type(layer) is int and 0 <= layer < layers for layer in numbers):
        raise ConfigError(f"{reader.file}: features go to the layers {numbers}; the decoder has {layers}")
    if len(set(numbers)) < len(numbers) or 0 not in numbers:
        raise UnsupportedModelError(
            f"{reader.file}: deepstack_layer_map and spatial_target_layers must name different layers of the decoder, "
            f"and the first, not {numbers}"
        )
    return tuple(projectors)


#: Defaults of transformers for values that ``qformer_config`` lacks, and where it is missing.
_QFORMER = {"intermediate_size": 3072, "num_hidden_layers": 12, "cross_attention_frequency": 2}
_ONE_LAYER = {"num_hidden_layers": 1, "cross_attention_frequency": 1}


def _read_qformer(reader: ConfigReader, hidden: int) -> EncoderConfig:
    """transformers computes widths and heads from the tower's width, whatever the file says."""
    reader.only("model_type", "blip_2_qformer")
    reader.only("use_qformer_text_input", False)
    heads = hidden // 64
    if not heads or hidden % heads:
        raise ConfigError(f"{reader.file}: hidden_size of vision_config ({hidden}) cannot have {heads} heads of 64")
    return EncoderConfig(
        architecture="Q-Former",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=0,
        layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=read_activation(reader, "hidden_act", "gelu"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
