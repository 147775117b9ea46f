"""The interface of networks: an embedding, layers with KV caches, and a head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Protocol, cast

import numpy as np

from octavo.config.kv_spec import NUMBER_BYTES, KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.kernels.interface import Array, AttentionSpec, Kernels, LayerCache, LowRankShape
from octavo.layers.attention import CrossQueries
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.layers.rope import RotaryTable
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.registry import make_network


class Network(Layer, ABC):
    """One rank's share of a network: its tensor-parallel part of the layers of its pipeline stage.

    The first stage has the embedding, the last one the final norm and the head. ``checkpoint_map`` maps the tensors of
    checkpoints, ``read_config`` reads their config.json.
    """

    #: From the checkpoint's names and tensors to those that the layers expect (``octavo.models.checkpoint``). Where it
    #: depends on the configuration, ``__init__`` sets it.
    checkpoint_map: tuple[CheckpointEntry, ...] = ()
    #: Comes before it in architectures without a language-model head.
    head_map: tuple[CheckpointEntry, ...] = ()
    #: Comes before both: the tensors of a base model may lack a prefix of the language model's, such as ``model.``.
    base_map: tuple[CheckpointEntry, ...] = ()
    #: The caches of the layers of this stage, in order, on this rank. Most layers have one.
    kv_specs: list[KVSpec]
    #: For each layer of this stage, the index in ``kv_specs`` of the cache that its attention reads: its first own one,
    #: or that of an earlier layer, which computes keys and values for both (shared KV). Others have no entry.
    cache_of_layer: Mapping[int, int] = MappingProxyType({})
    #: First of the last layers, which have queries only: they read caches of earlier layers and write none. Rows that
    #: are not sampled may leave there (YOCO, Sun et al. 2024, section 2.2). None: the last layer writes a cache.
    query_only_from: int | None = None
    #: How many positions further than its own a token is rotated.
    first_rotation: ClassVar[int] = 0
    #: The KV cache that an encoder's layers share for the tokens of one step. Without a decoder ``kv_specs`` are empty,
    #: and ``forward_layers`` gets this cache for each layer; else ``encode`` gets it.
    workspace: KVSpec | None = None
    #: Makes features of images; on the first stage.
    tower: Tower | None = None
    #: Whether its forward consists of operations of kernels, so that steps can be recorded.
    is_recordable = True

    @classmethod
    @abstractmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The model configuration of a config.json with this architecture.

        Raises:
            ConfigError: a value is missing, of the wrong type or impossible.
            UnsupportedModelError: the network does not support a value.
        """

    @abstractmethod
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        """Creates the layers, without weights, and ``kv_specs``."""
        super().__init__()
        self.config = config
        self._rotary_tables: list[tuple[ModelConfig, RotaryTable]] = []

    def load_itself(self, seed: int | None) -> bool:
        """Loads the weights by other means than ``checkpoint_map``, or random ones with a ``seed``; False: it has none.

        Raises:
            WeightError: the checkpoint is incomplete, damaged or does not fit the configuration.
        """
        return False

    def entries(self) -> list[CheckpointEntry]:
        """The whole checkpoint map, in order."""
        config = self.config
        tower = () if config.tower is None else config.tower.names
        language_model = LANGUAGE_MODEL_NAMES if config.text_architecture else ()
        head = self.head_map if config.head != "lm" else ()
        return [*tower, *language_model, *self.base_map, *head, *self.checkpoint_map]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the tensors that are not loaded yet, by name."""
        return {name: layer.expected[shard] for name, layer, shard in self.tensors()}

    def rotary_table(self, config: ModelConfig, context: LayerContext) -> RotaryTable:
        """The rotary table of ``config.rope``; layers with equal configurations share one."""
        for rotated, table in self._rotary_tables:
            if rotated == config:
                return table
        table = RotaryTable(config, context.kernels, context.positions, first=self.first_rotation)
        self._rotary_tables.append((config, table))
        return table

    def position_bytes(self) -> int:
        """Bytes of the rotary tables per position of the context."""
        return sum(table.position_bytes for _, table in self._rotary_tables)

    def extend_positions(self, positions: int) -> None:
        """Extends the rotary tables to ``positions`` tokens, before steps are recorded."""
        for _, table in self._rotary_tables:
            table.extend(positions)

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Array:
        """From token ids to hidden states [T, E], for a network of one stage; writes keys and values."""
        return self.forward_layers(self.embed(batch.token_ids), batch, kv_caches)

    @classmethod
    def prepare_input(cls, config: ModelConfig, kind: str, payload: bytes) -> np.ndarray:
        """Makes what the encoder of an encoder-decoder reads from an ``EncoderInput``'s payload.

        Called on the host, in a thread beside the steps. Returns token ids int64 [T], or float32 [T,
        ``EncoderFacts.feature_width``].

        Raises:
            InvalidRequestError: the network does not take this kind of input, or not this input.
        """
        raise InvalidRequestError(f"{config.architecture} has no encoder that reads {kind}")

    def encode(self, inputs: Array, batch: ForwardBatch, workspace: LayerCache, kv_caches: list[LayerCache]) -> Array:
        """Runs the encoder of an encoder-decoder, and writes the keys and values of cross attention.

        Args:
            inputs: prepared inputs one after the other, float32 [T, width]; or the token ids of the batch.
            batch: the encoder's tokens; each sequence is one whole input. Its KV groups are that of the decoder (slots
                of the contexts' blocks) and the workspace's (slots and block tables).
            workspace: the cache that all of the encoder's layers share.
            kv_caches: those of the decoder's layers.

        Returns:
            The encoder's output [T, E].
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def cross_queries(self, layer: int, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        """The queries of a decoder layer's cross attention, from the layer's input.

        ``residual`` is that input, float32 [T, E], whose memory may be reused. The tokens' own keys and values are
        written to ``cache``, the layer's.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cross attention")

    def set_virtual_tokens(self, first: int, embeddings: np.ndarray) -> None:
        """Writes embeddings [n, E] of virtual tokens, those of ids ``vocab_size + first`` on; a stage without the
        embedding does nothing.
        """

    def set_features(self, first: int, features: np.ndarray) -> None:
        """Writes features of images float32 [n, ``ImageFacts.vectors`` * E] as virtual tokens, ids ``vocab_size +
        first`` on; a stage without the embedding does nothing.
        """
        self.set_virtual_tokens(first, features)

    @abstractmethod
    def embed(self, token_ids: Array) -> Array:
        """Token ids int64 [T] to the residual stream float32 [T, E]; first stage only."""

    @abstractmethod
    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        """The residual stream float32 [T, E] through the layers of this stage, which write their keys and values.

        The last stage returns hidden states [T, E] after the final norm, other stages the residual stream for the next.
        ``kv_caches`` has an entry for each of ``kv_specs``. The memory of ``residual`` may be reused. A ``reader`` is
        shown the stream before each layer and after the last. With ``batch.sampled_only`` the result has the sampled
        rows alone, [N, E].
        """

    def logits(self, hidden: Array) -> Array:
        """Hidden states [n, E] to logits float32 [n, vocab]; last stage only."""
        raise NotImplementedError(f"{type(self).__name__} has no language-model head")

    def scores(self, rows: Array) -> Array:
        """Class scores float32 [n, labels] of hidden states [n, E], pooled or of tokens as ``ModelConfig.head`` says,
        before sigmoid or softmax. Last stage only, and not part of recorded steps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no classification head")


@dataclass(frozen=True)
class TowerInput:
    """One piece of an image as rows for the tower, made on the host beside the steps."""

    #: float32 [T, ``Tower.row_width``]: normalised pixels of each patch, in the tower's order.
    rows: np.ndarray
    #: int64 [T]: ``ForwardBatch.positions``, such as rows of a position table or rotary table.
    positions: np.ndarray
    #: int64 [N]: ``ForwardBatch.sampled_rows``, the first row of each feature.
    feature_rows: np.ndarray
    #: Lengths of the runs of rows that attend to each other, in all T: the sequences of the batch.
    segments: tuple[int, ...]
    #: int64 [``Tower.rotary_axes``, T]: ``ForwardBatch.rotary_positions``, if the tower has rotary axes.
    rotary_positions: np.ndarray | None = None
    #: int64 [N]: places of its features among those of the image; None: they follow those of the piece before it.
    places: np.ndarray | None = None
    #: int64 [T]: ``ForwardBatch.token_ids``, such as rows of another position table; None: zeros.
    token_ids: np.ndarray | None = None


class Tower(Layer, ABC):
    """A network's image tower, with the projection to the width of its embeddings."""

    row_width: int
    #: Most rows of a piece; None: no limit.
    max_rows: int | None = None
    #: Number of positions by which sections of a head are rotated, such as line and column.
    rotary_axes: int = 0
    #: The KV cache of a layer for one batch. Group 0 has block tables by segment; group 1 has one context of all rows
    #: for ``AttentionSpec.cross`` (the batch's cross tables).
    workspace: KVSpec
    #: That of group 1, if its heads are others.
    whole_workspace: KVSpec | None = None

    def weights(self, prefix: str = "") -> Iterator[Weight]:
        """As ``Layer.weights``; a token's step reads none of them."""
        return (weight._replace(active=0.0) for weight in super().weights(prefix))

    @abstractmethod
    def prepare(self, image: ImageInput) -> list[TowerInput]:
        """The pieces of an image; called in a thread beside the steps. Their features follow each other."""

    @abstractmethod
    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array | list[Array]:
        """Rows float32 [T, row_width] to features float32 [N, E]; recorded, and run in parts between steps.

        A list has an array for each of ``ImageFacts.vectors``.

        ``caches``: the workspace as group 0 and as group 1, which are different memory.
        """

    def join(self, places: Sequence[np.ndarray | None], features: Sequence[np.ndarray]) -> np.ndarray:
        """The features of an image, float32 [features, E], from those of its pieces and their ``TowerInput.places``."""
        return np.concatenate(features)


@dataclass(frozen=True, kw_only=True)
class TowerConfig(ABC):
    """The configuration of an image tower, part of that of the language model behind it (``ModelConfig.tower``)."""

    @abstractmethod
    def make(self, width: int, context: LayerContext) -> Tower:
        """The tower, without weights; ``width`` is that of the embeddings, ``context`` that of ``tower_context``."""

    @property
    @abstractmethod
    def names(self) -> tuple[CheckpointEntry, ...]:
        """From the tower's names in checkpoints to those of its layers, which begin with ``tower.``."""


#: Of a language model behind a tower, by transformers 4 and 5. Later pipeline stages have no tower: they drop it.
LANGUAGE_MODEL_NAMES: tuple[CheckpointEntry, ...] = (
    Rename(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model."),
    Rename(r"^model\.lm_head\.", "lm_head."),
    Drop(r"^(tower|(model\.)?(vision_tower|multi_modal_projector))\."),
)


def tower_output(features: Array | list[Array]) -> ForwardOutput:
    """What ``Tower.features`` returns, as the output of a recorded forward."""
    first, *others = features if isinstance(features, list) else [features]
    return ForwardOutput(first, first, layer_features=tuple(others))


def tower_context(context: LayerContext) -> LayerContext:
    """The context of a tower's layers: whole on every rank, not quantised, without adapters.

    ``all_reduce`` is not for them: it would add the whole several times.
    """
    whole = replace(context, tp_rank=0, tp_size=1, layers=None)
    return replace(whole, quantization=None, kv_cache_dtype="auto", max_loras=0, virtual_tokens=0)


class ResidualReader(Protocol):
    """Sees the residual stream between the layers of a network, as part of its forward."""

    def read(self, layer: int, residual: Array) -> None:
        """``residual``, float32 [T, E], is the input of ``layer``, or the output of the last; it must not change."""
        ...


# Networks without memory, and their sizes


class _NoMemory:
    """The kernels' methods that constructors of layers call, without memory."""

    def __init__(self) -> None:
        self.adapters = self

    def array(self, values: np.ndarray, dtype: DType | None = None) -> None: ...

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> None: ...

    def check_attention(self, spec: AttentionSpec) -> None: ...

    def make_low_rank(self, shape: LowRankShape, *, sampled: bool = False) -> LowRankShape:
        return shape

    def make_low_rank_embedding(self, shape: LowRankShape) -> LowRankShape:
        return shape


_NO_MEMORY = cast(Kernels, _NoMemory())


def build_rank_without_weights(config: ModelConfig, context: LayerContext) -> Network:
    """The network for ``context`` without memory: its sizes can be computed; it cannot be loaded or run."""
    return make_network(config, replace(context, kernels=_NO_MEMORY, positions=0))


def caches_of_stage(config: ModelConfig, context: LayerContext) -> range:
    """The caches of this stage's layers, counted through all stages; not every layer has one."""
    first = context.layers_of(config.num_layers).start

    def count(layers: range) -> int:
        return len(build_rank_without_weights(config, replace(context, layers=layers)).kv_specs) if layers else 0

    start = count(range(first))
    return range(start, start + count(context.layers_of(config.num_layers)))


def build_without_weights(
    config: ModelConfig,
    dtype: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_loras: int = 0,
    draft_tokens: int = 0,
    max_lora_rank: int = 0,
) -> Network:
    """As ``build_rank_without_weights`` for the whole network on one rank, by values of the engine's options."""
    context = LayerContext(
        _NO_MEMORY,
        DType(dtype),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        draft_tokens=draft_tokens,
    )
    return build_rank_without_weights(config, context)


def matrices(network: Network) -> list[Weight]:
    """The matrices of layers and head, which every step reads but for experts that no token chose; without a tower."""
    return [weight for weight in network.weights() if weight.kind in ("linear", "head") and weight.active]


def num_parameters(network: Network) -> int:
    """Numbers in the weights of this rank; tied weights count once."""
    return sum(math.prod(weight.shape) for weight in network.weights() if not weight.is_tied)


def num_active_parameters(network: Network) -> int:
    """As ``num_parameters`` without a tower, and with only the experts that a token has."""
    return round(sum(math.prod(weight.shape) * weight.active for weight in network.weights() if not weight.is_tied))


def size_bytes(*weights: Weight) -> int:
    """Bytes of these weights, without the scales of quantised ones."""
    return int(sum(math.prod(weight.shape) * NUMBER_BYTES[weight.dtype] for weight in weights))


def weight_bytes(network: Network, *, maps_tables: bool = False) -> int:
    """Bytes of the weights in memory, without scales and padding of the backend (a lower bound).

    ``maps_tables``: see ``Kernels``; tables that stay in the mapped file do not count.
    """
    return size_bytes(*(w for w in network.weights() if not w.is_tied and not (w.is_mapped and maps_tables)))


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of a token's KV entries in all layers of this rank, without padding."""
    return sum(spec.bytes_per_token for spec in network.kv_specs)


def attended_specs(network: Network) -> list[KVSpec]:
    """The caches that layers of this rank read in a step: one that layers share counts for each of them."""
    readers = Counter(network.cache_of_layer.values())
    return [spec for cache, spec in enumerate(network.kv_specs) for _ in range(max(1, readers[cache]))]


def state_bytes(network: Network) -> int:
    """Bytes of a sequence's recurrent states in all layers of this rank."""
    return sum(int(spec.head_dim * NUMBER_BYTES[spec.dtype]) for spec in network.kv_specs if spec.kind == "state")
