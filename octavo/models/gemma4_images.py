"""Gemma 4 with images of any ratio: a tower whose patches turn by column and line, or one matrix for raw patches.

Images are scaled to as many whole features as a budget allows. A feature is the mean of a square of patches after the
tower; the unified models have no tower, and a feature is the square of pixels itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.model_config import ImageFacts, ModelConfig, RopeConfig
from octavo.core.request import ImageInput
from octavo.images.image_files import Normalisation
from octavo.images.processors import GEMMA4_FEATURES, read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, LayerCache
from octavo.kernels.weight_rows import QuantizedRows, to_values
from octavo.layers.layer import Layer, LayerContext, LayerNorm, PlainRMSNorm, RMSNorm, Weight
from octavo.layers.linear import ParallelLinear, Part
from octavo.models.checkpoint import CheckpointEntry, Drop, Permute, Rename
from octavo.models.config_files import ConfigReader, fields_of
from octavo.models.gemma4 import Gemma4Config, Gemma4ForCausalLM, read_gemma4_text
from octavo.models.network import Tower, TowerInput
from octavo.models.qwen2_5_vl import PlaceAngles
from octavo.models.vision import PatchEmbedding, Projection, patch_places, patch_rows, read_pixels


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(ModelConfig):
    """Of the unified models, ``num_layers`` is 0 and ``hidden_size`` the width of the embedded patches."""

    normalisation: Normalisation
    #: Sides: of a patch in pixels; in patches, of the square that makes a feature.
    patch_size: int
    merge: int
    #: Rows of the tables of columns and of lines.
    places: int
    #: Most features of an image.
    max_features: int
    #: Whether matrices clamp inputs and outputs, and features are shifted and scaled.
    clipped: bool = False
    standardized: bool = False


@dataclass(frozen=True, kw_only=True)
class Gemma4ImageConfig(Gemma4Config):
    vision: Gemma4VisionConfig


class ClippedLinear(Layer):
    """A matrix whose inputs and outputs are clamped to bounds of the checkpoint, if it has any."""

    def __init__(self, context: LayerContext, inputs: int, outputs: int, *, clipped: bool) -> None:
        super().__init__()
        self.kernels, self._dtype = context.kernels, context.dtype
        part = Part("", outputs, slice(0, outputs))
        self.linear = self.attach("linear", ParallelLinear(context, [part], inputs, False))
        self._bounds: dict[str, float] = {}
        if clipped:
            for name in ("input_min", "input_max", "output_min", "output_max"):
                self.expected[name] = ()
                self.holds.append(Weight(name, (), "vector", DType.FLOAT32))

    def __call__(self, x: Array, out_dtype: DType | None = None) -> Array:
        """x [T, inputs], which may be changed, to [T, outputs] of ``out_dtype``, by default the network's type."""
        return self._clamp(self.linear.packed(self._clamp(x, "input"), out_dtype or self._dtype), "output")

    def _clamp(self, x: Array, side: str) -> Array:
        least, most = self._bounds.get(f"{side}_min", -math.inf), self._bounds.get(f"{side}_max", math.inf)
        return x if least == -math.inf and most == math.inf else self.kernels.clamp(x, most, least)

    def place(self, shard: str, tensor: np.ndarray | QuantizedRows) -> None:
        self._bounds[shard] = float(to_values(tensor).astype(np.float32).reshape(()))


class VisionLayer(Layer):
    """Attention with norms of queries, keys and values, and a gated MLP; norms before and after both.

    Each matrix may change its input, so each gets the norm of its own.
    """

    def __init__(self, config: Gemma4VisionConfig, context: LayerContext, angles: PlaceAngles) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.kernels, self.head_dim, self._angles = context.kernels, head_dim, angles
        self._spec = AttentionSpec(1.0, causal=False)
        context.kernels.check_attention(self._spec)

        def matrix(name: str, inputs: int, outputs: int) -> ClippedLinear:
            return self.attach(name, ClippedLinear(context, inputs, outputs, clipped=config.clipped))

        self.q = matrix("self_attn.q_proj", hidden, heads * head_dim)
        self.k, self.v = (matrix(f"self_attn.{name}_proj", hidden, kv_heads * head_dim) for name in "kv")
        self.out = matrix("self_attn.o_proj", heads * head_dim, hidden)
        self.q_norm, self.k_norm = (
            self.attach(f"self_attn.{name}_norm", RMSNorm(context, head_dim, eps)) for name in "qk"
        )
        self.v_norm = PlainRMSNorm(context, head_dim, eps)
        self.gate, self.up = (matrix(f"mlp.{name}_proj", hidden, inner) for name in ("gate", "up"))
        self.down = matrix("mlp.down_proj", inner, hidden)
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            self.attach(f"{name}_layernorm", RMSNorm(context, hidden, eps))
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.kv_spec = KVSpec("full", kv_heads, head_dim, context.kv_dtype_name)

    def __call__(self, stream: Array, cache: LayerCache, batch: ForwardBatch) -> Array:
        """The stream float32 [T, E] after this layer; its memory may be reused."""
        kernels, tokens = self.kernels, stream.shape[0]
        q, k, v = (
            matrix(self.attention_norm(stream)).reshape(tokens, -1, self.head_dim)
            for matrix in (self.q, self.k, self.v)
        )
        angles = self._angles
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        q = kernels.rotary_and_cache(q, k, v, batch, angles.array, cache, angles.sections)
        attended = kernels.paged_attention(q, cache, batch, self._spec).reshape(tokens, -1)
        stream = self.attention_post_norm.add_to(stream, self.out(attended, DType.FLOAT32))
        gate = kernels.activate(self.gate(self.mlp_norm(stream)), "gelu_tanh")
        inner = kernels.multiply(gate, self.up(self.mlp_norm(stream), DType.FLOAT32))
        return self.mlp_post_norm.add_to(stream, self.down(inner, DType.FLOAT32))


class PlaceTables(Layer):
    """Learned embeddings of columns and lines; ``axis``: the dimension of the tensor that tells one from the other."""

    def __init__(self, context: LayerContext, places: int, width: int, *, axis: int) -> None:
        super().__init__()
        self.kernels, self._dtype, self._axis = context.kernels, context.dtype, axis
        self.expected["weight"] = (2, places, width) if axis == 0 else (places, 2, width)
        self.holds.append(Weight("weight", (2 * places, width), "embedding", context.dtype))
        self._tables: list[Array] = []

    def add_to(self, stream: Array, batch: ForwardBatch) -> Array:
        """The stream float32 [T, width] + the rows of each patch's column and line; its memory may be reused."""
        columns, lines = self._tables
        stream = self.kernels.embedding(batch.positions, columns, add=stream)
        return self.kernels.embedding(batch.token_ids, lines, add=stream)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._tables = [
            self.kernels.array(np.ascontiguousarray(tensor.take(place, self._axis)), self._dtype) for place in range(2)
        ]


class PlacedPatches(Tower):
    """A tower over patches in any grid; families say what a feature is."""

    rotary_axes = 2

    def __init__(self, config: Gemma4VisionConfig, context: LayerContext, hidden: int, *, merge: int) -> None:
        """``merge``: the side, in rows, of the square that makes a feature; ``hidden``: of the language model."""
        super().__init__()
        self.config, self.kernels, self._merge = config, context.kernels, merge
        #: Side of a row's pixels.
        self._side = config.merge * config.patch_size // merge
        self.row_width, self.max_rows = 3 * self._side**2, config.max_features * merge**2
        self._norm = PlainRMSNorm(context, config.hidden_size, config.rms_norm_eps)
        self.projector = self.attach("projector", Projection(context, config.hidden_size, hidden, bias=False))

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        config, merge, unit = self.config, self._merge, self._side * self._merge
        lines, columns = image.height // self._side, image.width // self._side
        if image.height % unit or image.width % unit or not 0 < max(lines, columns) <= config.places:
            raise InvalidRequestError(
                f"sides of images must be multiples of {unit} and at most {config.places * self._side}, not "
                f"{image.height} x {image.width}"
            )
        line, column = patch_places(lines, columns, merge)
        inputs = []
        for pixels in image.array():
            rows = np.ascontiguousarray(patch_rows(config.normalisation.rows(pixels), self._side, merge))
            features = np.arange(0, len(rows), merge**2, dtype=np.int64)
            inputs.append(TowerInput(rows, column, features, (len(rows),), np.stack((column, line)), token_ids=line))
        return inputs


class Gemma4Tower(PlacedPatches):
    """Patches, layers in which all of them attend to each other, and the means of squares."""

    def __init__(self, config: Gemma4VisionConfig, context: LayerContext, hidden: int) -> None:
        super().__init__(config, context, hidden, merge=config.merge)
        width = config.hidden_size
        self.patches = self.attach("patches", PatchEmbedding(context, width, (self.row_width,), bias=False))
        self.places = self.attach("places", PlaceTables(context, config.places, width, axis=0))
        angles = PlaceAngles(config.head_dim, config.rope.theta, context.kernels)
        self.layers = [
            self.attach(f"layers.{index}", VisionLayer(config, context, angles)) for index in range(config.num_layers)
        ]
        self.workspace = self.layers[0].kv_spec
        self._placed: dict[str, np.ndarray] = {}
        self._standard: tuple[Array, Array] | None = None
        if config.standardized:
            for name in ("std_bias", "std_scale"):
                self.expected[name] = (width,)
                self.holds.append(Weight(name, (width,), "vector", DType.FLOAT32))

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        kernels, stream = self.kernels, self.places.add_to(self.patches(rows), batch)
        for layer in self.layers:
            stream = layer(stream, caches[0], batch)
        pooled = kernels.mean_sampled(stream, batch, self._merge**2)
        pooled = kernels.scale(pooled, self.config.hidden_size**0.5)
        if self._standard is not None:
            pooled = kernels.multiply(pooled, *self._standard)
        return self.projector(self._norm(pooled))

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._placed[shard] = tensor.astype(np.float32)

    def complete(self) -> None:
        bias, scale = self._placed.pop("std_bias"), self._placed.pop("std_scale")
        self._standard = self.kernels.array(scale), self.kernels.array(-bias * scale)


class UnifiedPatches(PlacedPatches):
    """Squares of raw pixels through one matrix, with norms around it and around their places."""

    #: Of layer norms, whatever the configuration says.
    _EPS = 1e-5

    def __init__(self, config: Gemma4VisionConfig, context: LayerContext, hidden: int) -> None:
        super().__init__(config, context, hidden, merge=1)
        width = config.hidden_size
        self.pixel_norm = self.attach("pixel_norm", LayerNorm(context, self.row_width, self._EPS))
        self.patches = self.attach("patches", Projection(context, self.row_width, width, bias=True))
        self.patch_norm = self.attach("patch_norm", LayerNorm(context, width, self._EPS))
        self.places = self.attach("places", PlaceTables(context, config.places, width, axis=1))
        self.place_norm = self.attach("place_norm", LayerNorm(context, width, self._EPS))
        # No layer attends; a batch has a cache of one anyway.
        self.workspace = KVSpec("full", 1, 8, context.kv_dtype_name)

    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        stream = self.patch_norm.float32(self.patches(self.pixel_norm(rows)))
        placed = self.place_norm.float32(self.places.add_to(stream, batch))
        return self.projector(self._norm(placed))


def _order(numbers: np.ndarray) -> Callable[[int], np.ndarray]:
    """The order for ``Permute`` of rows or columns in groups that are all ordered alike."""

    def order(size: int) -> np.ndarray:
        groups = np.arange(size).reshape(-1, len(numbers))
        return groups[:, numbers].ravel()

    return order


def _by_colour(side: int) -> np.ndarray:
    """The place of each of a patch's numbers, by colour, line and column, among those by line, column and colour."""
    return np.arange(3 * side * side).reshape(side, side, 3).transpose(2, 0, 1).ravel()


def _halves(head_dim: int) -> np.ndarray:
    """Of heads whose halves turn by column and by line, each in pairs of its quarters: quarters in pairs of halves."""
    return np.arange(head_dim).reshape(4, -1)[[0, 2, 1, 3]].ravel()


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Without a tower in the checkpoint its language model; of audio there is nothing."""

    def __init__(self, config: Gemma4Config, context: LayerContext) -> None:
        super().__init__(config, context)
        entries: tuple[CheckpointEntry, ...] = ()
        if isinstance(config, Gemma4ImageConfig):
            vision = config.vision
            side = vision.patch_size * (1 if vision.num_layers else vision.merge)
            colours = _order(_by_colour(side))
            entries = (
                *_TOWER_NAMES,
                Permute(r"^tower\.patches\.weight$", colours, columns=True),
                Permute(r"^tower\.pixel_norm\.", colours),
                Permute(
                    r"^tower\.layers\.\d+\.self_attn\.[qk]_(proj\.linear|norm)\.weight$",
                    _order(_halves(vision.head_dim)),
                ),
                Drop(r"^tower\."),
            )
        self.checkpoint_map = (*entries, *self.checkpoint_map)

    def make_tower(self, config: Gemma4Config, context: LayerContext) -> Tower | None:
        if not isinstance(config, Gemma4ImageConfig):
            return None
        return (Gemma4Tower if config.vision.num_layers else UnifiedPatches)(config.vision, context, config.hidden_size)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        text = read_gemma4_text(architecture, reader)
        table = reader.table("vision_config")
        if not table:
            return text
        sees_spans = (reader.raw | reader.table("text_config")).get(
            "use_bidirectional_attention", "vision" if _is_unified(architecture) else None
        )
        vision = _read_vision(architecture, reader, replace(reader, raw=table))
        whole = vision.max_features if sees_spans == "vision" else 0
        token = reader.positive("image_token_id", 258880)
        facts = ImageFacts("gemma4", token, whole=whole)
        return Gemma4ImageConfig(vision=vision, **(fields_of(text) | {"image_facts": facts}))


_TOWER_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?vision_tower\.patch_embedder\.input_proj\.", "tower.patches."),
    Rename(r"^(model\.)?vision_tower\.patch_embedder\.position_embedding_table$", "tower.places.weight"),
    Rename(r"^(model\.)?vision_tower\.(encoder\.)?", "tower."),
    Rename(r"^(model\.)?embed_vision\.(multimodal_embedder\.)?embedding_projection\.", "tower.projector."),
    Rename(r"^(model\.)?(vision_embedder|embed_vision)\.patch_ln1\.", "tower.pixel_norm."),
    Rename(r"^(model\.)?(vision_embedder|embed_vision)\.patch_dense\.", "tower.patches."),
    Rename(r"^(model\.)?(vision_embedder|embed_vision)\.patch_ln2\.", "tower.patch_norm."),
    Rename(r"^(model\.)?(vision_embedder|embed_vision)\.pos_embedding$", "tower.places.weight"),
    Rename(r"^(model\.)?(vision_embedder|embed_vision)\.pos_norm\.", "tower.place_norm."),
)

#: Defaults of transformers, which ``vision_config`` may leave out.
_DEFAULTS: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
    **{"head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "position_embedding_size": 10240},
    **{"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120},
}


def _is_unified(architecture: str) -> bool:
    return architecture.startswith("Gemma4Unified")


def _read_vision(architecture: str, whole: ConfigReader, reader: ConfigReader) -> Gemma4VisionConfig:
    """The tower of a ``vision_config``; ``whole``: config.json."""
    is_unified = _is_unified(architecture)
    reader = reader.with_defaults(**_DEFAULTS)
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    heads = reader.positive("num_attention_heads")
    features = GEMMA4_FEATURES
    with suppress(ConfigError):  # it is reported when images are processed
        features = read_settings(reader.file.parent, {}).positive("max_soft_tokens", GEMMA4_FEATURES)
    pixels = read_pixels(whole, "gemma4")
    if not is_unified:  # the network takes colours from -1 to 1
        mean, std = (np.array(values) for values in (pixels.mean, pixels.std))
        first, second = (tuple(values.tolist()) for values in (mean + 0.5 * std, 0.5 * std))
        pixels = Normalisation(first, second, pixels.rescale)
    head_dim = reader.positive("head_dim")
    if head_dim % 4:
        raise ConfigError(f"{reader.file}: head_dim ({head_dim}) of the tower must be a multiple of 4")
    rope = ConfigReader(reader.table("rope_parameters"), reader.file)
    rope.only("rope_type", "axial", "default")
    return Gemma4VisionConfig(
        architecture="vision tower",
        vocab_size=0,
        hidden_size=reader.positive("mm_embed_dim" if is_unified else "hidden_size"),
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=0 if is_unified else reader.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=reader.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=reader.positive("mm_posemb_size" if is_unified else "position_embedding_size"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=RopeConfig(theta=rope.number("rope_theta", 100.0)),
        normalisation=pixels,
        patch_size=reader.positive("patch_size"),
        merge=reader.positive("pooling_kernel_size"),
        places=reader.positive("mm_posemb_size" if is_unified else "position_embedding_size"),
        max_features=features,
        clipped=reader.flag("use_clipped_linears"),
        standardized=reader.flag("standardize"),
    )
