"""Image towers over vision transformers: pixels to features, which take the place of token embeddings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.files import JsonValues
from octavo.core.model_config import ImageFacts, ModelConfig
from octavo.core.request import ImageInput
from octavo.images.image_files import Normalisation, normalisation_of
from octavo.images.processors import ImageSettings, read_settings
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Activation, Array, AttentionSpec, Kernels, LayerCache, PackedWeight
from octavo.layers.attention import Attention, ProjectionNorm
from octavo.layers.layer import Layer, LayerContext, LayerNorm, RMSNorm, Weight
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.layers.mlp import MLP
from octavo.layers.vocabulary import PositionEmbedding
from octavo.models.checkpoint import CheckpointEntry, Rename
from octavo.models.config_files import ConfigReader, read_activation
from octavo.models.encoder import EncoderConfig, EncoderPreNormLayer
from octavo.models.llama import LlamaForCausalLM
from octavo.models.network import LANGUAGE_MODEL_NAMES, Tower, TowerConfig, TowerInput
from octavo.models.registry import architecture_of_type, network_class

#: Files of a model's folder that may say how images become pixels.
_FILES = ("processor_config.json", "preprocessor_config.json")


def read_pixels(reader: ConfigReader, family: str) -> Normalisation:
    """The normalisation of pixels by the files beside config.json, else the default of the ``family``."""
    folder, config = reader.file.parent, {**reader.raw, "model_type": reader.raw.get("model_type") or family}
    if any((folder / name).is_file() for name in _FILES):
        return normalisation_of(read_settings(folder, config))
    return normalisation_of(ImageSettings({}, folder / _FILES[-1], JsonValues(config, reader.file)))


def patch_rows(pixels: np.ndarray, patch: int, merge: int = 1) -> np.ndarray:
    """The patches of a piece [height, width, 3], as rows [patches, 3 * patch * patch] by colour, line and column.

    They follow each other from left to right, line by line; with ``merge``, so do squares of ``merge * merge`` patches,
    and the patches within each. Height and width are multiples of ``merge * patch``.
    """
    height, width, colours = pixels.shape
    side = merge * patch
    cut = pixels.reshape(height // side, merge, patch, width // side, merge, patch, colours)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, colours * patch * patch)


def patch_places(rows: int, columns: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Line and column of each patch of a grid, int64 [patches] both, in the order of ``patch_rows``."""
    lines, places = np.divmod(np.arange(rows * columns, dtype=np.int64).reshape(rows, columns), columns)
    shape = (rows // merge, merge, columns // merge, merge)
    order = np.arange(rows * columns).reshape(shape).transpose(0, 2, 1, 3).reshape(-1)
    return lines.reshape(-1)[order], places.reshape(-1)[order]


# Vision transformers (Dosovitskiy et al. 2021): CLIP's (Radford et al. 2021) and SigLIP's (Zhai et al. 2023)

#: Defaults of transformers, which config.json may leave out.
_DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224}
_DEFAULTS |= {"num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP = {**_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


@dataclass(frozen=True)
class VitConfig(EncoderConfig):
    #: Sides in pixels.
    image_size: int = 224
    patch_size: int = 14
    normalisation: Normalisation = field(default_factory=Normalisation)
    #: Whether a token without pixels comes first.
    class_token: bool = False
    patch_bias: bool = True
    #: Norms of the layers.
    norm: Literal["layer", "rms"] = "layer"
    #: RMS norms of queries and keys over all heads.
    whole_qk_norm: bool = False
    pre_norm: bool = False
    post_norm: bool = False

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        return self.side**2 + self.class_token

    @property
    def row_width(self) -> int:
        return 3 * self.patch_size**2


def read_clip(reader: ConfigReader) -> VitConfig:
    """CLIP: a class token beside the patches, a norm before the first layer, none after the last."""
    return read_vit(reader.with_defaults(**_CLIP), class_token=True, patch_bias=False, pre_norm=True)


def read_siglip(reader: ConfigReader, **defaults: Any) -> VitConfig:
    """SigLIP: patches alone, a norm after the last layer; ``defaults`` are those of the family."""
    return read_vit(reader.with_defaults(**{**_SIGLIP, **defaults}), post_norm=True)


def read_vit(reader: ConfigReader, **values: Any) -> VitConfig:
    """The configuration by a ``vision_config``; ``values`` are fields that config.json does not have."""
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{reader.file}: hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    image, patch = reader.positive("image_size"), reader.positive("patch_size")
    if patch > image:
        raise ConfigError(f"{reader.file}: patch_size ({patch}) must be at most image_size ({image})")
    if reader.positive("num_channels", 3) != 3:
        raise ConfigError(f"{reader.file}: num_channels must be 3, not {reader.raw['num_channels']}")
    config = VitConfig(
        architecture="vision tower",
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position=(image // patch) ** 2,
        layer_norm_eps=reader.number("layer_norm_eps", 1e-6),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        image_size=image,
        patch_size=patch,
    )
    return replace(config, **values)


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

#: Beside a projector, as LLaVA and many after it name both.
TOWER_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?vision_tower\.(vision_model\.)?", "tower.vision."),
    Rename(r"^(model\.)?multi_modal_projector\.", "tower.projector."),
    *VIT_NAMES,
)


class PatchEmbedding(Layer):
    """A convolution with its own size as stride: a product with the numbers of each patch."""

    def __init__(self, context: LayerContext, outputs: int, inputs: tuple[int, ...], *, bias: bool) -> None:
        """``inputs``: the dimensions of the checkpoint's weight after ``outputs``."""
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
        return self._packed(rows, DType.FLOAT32)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        self._placed[shard] = tensor

    def complete(self) -> None:
        weight = self._placed.pop("weight")
        matrix = weight.reshape(len(weight), -1)
        self._packed = self._kernels.pack([matrix], self._placed.pop("bias", None), dtype=self._dtype)


class ClassPositionEmbedding(PositionEmbedding):
    """Learned positions, with the class token's embedding in the first row, and in the others the bias of patches."""

    def __init__(self, context: LayerContext, rows: int, hidden_size: int, *, bias: bool) -> None:
        super().__init__(context, rows, hidden_size)
        self.expected |= {"class": (hidden_size,), **({"bias": (hidden_size,)} if bias else {})}
        self._parts: dict[str, np.ndarray] = {}

    def place(self, shard: str, tensor: Any) -> None:
        self._parts[shard] = tensor

    def complete(self) -> None:
        table = self._parts["weight"].astype(np.float32)
        table[0] += self._parts["class"].astype(np.float32)
        if "bias" in self._parts:
            table[1:] += self._parts["bias"].astype(np.float32)
        self._parts.clear()
        super().place("weight", table)


class VisionTransformer(Layer):
    """The patches of one piece to the stream after the last layer; all patches attend to each other."""

    def __init__(self, config: VitConfig, context: LayerContext, *, whole: bool = False) -> None:
        """``whole``: the patches of a piece attend to each other though they are in several segments."""
        super().__init__()
        self.config, width, eps = config, config.hidden_size, config.layer_norm_eps
        self.make_embedding(context)
        self.pre_norm = self.attach("pre_norm", LayerNorm(context, width, eps)) if config.pre_norm else None
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.layers: list[EncoderPreNormLayer] = []
        for index in range(config.num_layers):
            spec = AttentionSpec(config.head_dim**-0.5, causal=False, cross=whole)
            attention = Attention(config, context, spec, whole_qk=config.whole_qk_norm)
            if config.whole_qk_norm:
                attention.set_norms(*(ProjectionNorm(context, width, config.rms_norm_eps) for _ in range(2)))
            mlp = MLP(context, width, config.intermediate_size, True, config.activation)
            layer = EncoderPreNormLayer(attention, mlp, [norm(context, width, eps) for _ in range(2)])
            self.layers.append(self.attach(f"layers.{index}", layer))
        self.post_norm = self.attach("post_norm", LayerNorm(context, width, eps)) if config.post_norm else None
        self.kv_spec = self.layers[0].attention.kv_spec

    def make_embedding(self, context: LayerContext) -> None:
        """Attaches the layers of ``embed``."""
        config, width, patch = self.config, self.config.hidden_size, self.config.patch_size
        bias = config.patch_bias and not config.class_token  # which has no pixels
        self.patches = self.attach("patches", PatchEmbedding(context, width, (3, patch, patch), bias=bias))
        if config.class_token:
            table: PositionEmbedding = ClassPositionEmbedding(context, config.rows, width, bias=config.patch_bias)
        else:
            table = PositionEmbedding(context, config.rows, width)
        self.positions = self.attach("positions", table)

    def embed(self, rows: Array, batch: ForwardBatch) -> Array:
        """Rows float32 [T, row_width] to float32 [T, E], with their positions."""
        return self.positions.add_to(self.patches(rows), batch.positions)

    def __call__(self, rows: Array, batch: ForwardBatch, cache: LayerCache) -> Array:
        """Rows float32 [T, row_width] to the stream float32 [T, E], before ``post_norm``."""
        for stream in self.streams(rows, batch, cache):
            last = stream
        return last

    def streams(self, rows: Array, batch: ForwardBatch, cache: LayerCache) -> Iterator[Array]:
        """The stream, float32 [T, E], before the first layer and after each layer, which may reuse its memory."""
        stream = self.embed(rows, batch)
        if self.pre_norm is not None:
            stream = self.pre_norm.float32(stream)
        yield stream
        for layer in self.layers:
            stream = layer(stream, cache, batch)
            yield stream


class VitTower(Tower):
    """A tower over a vision transformer; families define ``features``."""

    def __init__(self, vision: VisionTransformer, kernels: Kernels, merge: int = 1) -> None:
        """``merge``: the side, in patches, of the square that makes a feature."""
        super().__init__()
        self.kernels, self.merge = kernels, merge
        self.row_width, self.max_rows = vision.config.row_width, vision.config.rows
        self.vision = self.attach("vision", vision)
        self.workspace = vision.kv_spec

    def prepare(self, image: ImageInput) -> list[TowerInput]:
        self.check(image)
        config, size, merge = self.vision.config, self.vision.config.patch_size, self.merge
        lines, columns = image.height // size, image.width // size
        positions, first = self.position_ids(lines, columns), int(config.class_token)
        if first:
            positions = np.concatenate((np.zeros(1, np.int64), positions + 1))
        inputs = []
        for piece in image.array():
            rows = patch_rows(config.normalisation.rows(piece[: lines * size, : columns * size]), size, merge)
            if first:
                rows = np.concatenate((np.zeros((1, rows.shape[1]), np.float32), rows))
            features = np.arange(first, len(rows), merge * merge, dtype=np.int64)
            inputs.append(TowerInput(np.ascontiguousarray(rows), positions, features, (len(rows),)))
        return inputs

    def check(self, image: ImageInput) -> None:
        size = self.vision.config.image_size
        if (image.height, image.width) != (size, size):
            raise InvalidRequestError(f"images must be {size} x {size}, not {image.height} x {image.width}")

    def position_ids(self, lines: int, columns: int) -> np.ndarray:
        """The position row of each patch of a grid, int64 [patches], in the order of ``patch_rows``."""
        line, column = patch_places(lines, columns, self.merge)
        return line * columns + column


class Projection(ReplicatedConcatLinear):
    """A linear layer with a float32 result, whole on every rank."""

    def __init__(self, context: LayerContext, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(context, [inputs], outputs, bias)

    def __call__(self, x: Array) -> Array:
        return self.product(0, x, DType.FLOAT32)


class JoinedFeatures(ReplicatedConcatLinear):
    """activation(product with several inputs), whole on every rank."""

    def __init__(
        self, context: LayerContext, widths: Sequence[int], outputs: int, *, bias: bool, activation: Activation
    ) -> None:
        super().__init__(context, widths, outputs, bias)
        self._activation: Activation = activation

    def __call__(self, inputs: Sequence[Array]) -> Array:
        """The inputs [T, width] each, to [T, outputs] of the network's type."""
        total = None
        for index, x in enumerate(inputs[:-1]):
            total = self.product(index, x, DType.FLOAT32, total)
        return self._each[-1](inputs[-1], self.dtype, total, self._activation)


class Projector(Layer):
    """linear_2(activation(linear_1(x))) of one or several features of a patch or square, perhaps after a layer norm."""

    def __init__(
        self,
        context: LayerContext,
        widths: Sequence[int],
        outputs: int,
        *,
        inner: int | None = None,
        bias: bool = True,
        activation: Activation = "gelu",
        norm: bool = False,
    ) -> None:
        """``inner``: width between the matrices, by default that of the outputs. ``norm``: of a single input."""
        super().__init__()
        inner = inner or outputs
        self.norm = self.attach("layer_norm", LayerNorm(context, widths[0], _PROJECTOR_EPS)) if norm else None
        first = JoinedFeatures(context, widths, inner, bias=bias, activation=activation)
        self.first = self.attach("linear_1", first)
        self.second = self.attach("linear_2", Projection(context, inner, outputs, bias=bias))

    def __call__(self, *inputs: Array) -> Array:
        """The inputs [N, width] each, to features float32 [N, outputs]."""
        return self.second(self.first(inputs if self.norm is None else [self.norm(inputs[0])]))


#: Of a norm without an eps in config.json.
_PROJECTOR_EPS = 1e-5


def feature_layers(reader: ConfigReader, default: int, layers: int) -> tuple[int, ...]:
    """The numbers of layers before which ``vision_feature_layer`` reads the stream; ``layers`` is after the last."""
    given = reader.get("vision_feature_layer", default)
    read = []
    for number in given if isinstance(given, list) and given else [given]:
        if not isinstance(number, int) or isinstance(number, bool) or not -layers - 1 <= number <= layers:
            raise ConfigError(
                f"{reader.file}: vision_feature_layer must be a layer from {-layers - 1} to {layers} or a list of "
                f"them, not {given!r}"
            )
        read.append(number if number >= 0 else layers + 1 + number)
    return tuple(read)


# The language model behind a tower


class VisionLanguageModel(ABC):
    """An architecture of a language model with an image tower.

    The network is that of the language model, and has a tower if its configuration has one (``ModelConfig.tower``).
    """

    @classmethod
    @abstractmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """As ``Network.read_config``."""


#: Defaults of transformers by model_type, which ``text_config`` may leave out.
_SHAPE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = {**_SHAPE, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **{**_SHAPE, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
        **{"bos_token_id": 1, "eos_token_id": 2},
    },
    "mistral": {
        **{**_SHAPE, "vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072},
        "num_key_value_heads": 8,
    },
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32},
}
#: Values that may stand at the top level of config.json instead.
_OF_ALL = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
#: Language models by the model_type in ``text_config``, for ``read_language_model``.
LLAMAS: Mapping[str, str | None] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"))
#: Last in the map of a network that makes a tower itself.
TEXT_NAMES: tuple[CheckpointEntry, ...] = (*LANGUAGE_MODEL_NAMES, *LlamaForCausalLM.checkpoint_map)


def read_language_model(reader: ConfigReader, networks: Mapping[str, str | None]) -> ModelConfig:
    """The configuration of the network of ``text_config``.

    ``networks``: architectures by model_type there; None: that of the registry. The first is the default.
    """
    text = reader.table("text_config")
    kind = replace(reader, raw=text).only("model_type", *networks)
    architecture = networks[kind] or architecture_of_type(kind)
    assert architecture is not None
    whole = {name: reader.raw[name] for name in _OF_ALL if reader.raw.get(name) is not None}
    defaults = _TEXT_DEFAULTS.get(kind, {}) | whole
    return network_class(architecture).read_config(architecture, replace(reader, raw=text).with_defaults(**defaults))


def read_image_token(reader: ConfigReader, default: int) -> int:
    """The id of the token that stands for a feature of an image; it is 0 in some vocabularies."""
    name = reader.named("image_token_id", "image_token_index")
    return 0 if reader.raw.get(name) == 0 else reader.positive(name, default)


def is_tied(reader: ConfigReader, default: bool) -> bool:
    """``tie_word_embeddings`` of the whole, else of ``text_config``, else the default of the family."""
    text = replace(reader, raw=reader.table("text_config"))
    return reader.flag("tie_word_embeddings", text.flag("tie_word_embeddings", default))


def with_tower(text: ModelConfig, architecture: str, tower: TowerConfig | None, facts: ImageFacts) -> ModelConfig:
    """The configuration of a language model behind a tower, if there is one."""
    return replace(
        text,
        architecture=architecture,
        text_architecture=text.architecture,
        tower=tower,
        image_facts=None if tower is None else facts,
    )
