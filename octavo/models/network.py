"""The interface of networks: an embedding, layers with KV caches, and a head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from octavo.config.kv_spec import NUMBER_BYTES, KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.request import ImageInput
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, AttentionSpec, Kernels, LayerCache, LowRankShape
from octavo.layers.attention import CrossQueries
from octavo.layers.layer import Layer, LayerContext, Weight
from octavo.layers.rope import RotaryTable
from octavo.models.checkpoint import CheckpointEntry
from octavo.models.config_files import ConfigReader
from octavo.models.registry import make_network

# The interface of towers.


@dataclass(frozen=True)
class TowerInput:
    """One piece, as rows for the tower: made on the host, beside the steps."""

    #: float32 [T, ``Tower.row_width``]: normalised pixels of each patch, in the order in which the tower wants them.
    rows: np.ndarray
    #: int64 [T]: ``ForwardBatch.positions``, such as rows of a table of positions or of a rotary table.
    positions: np.ndarray
    #: int64 [N]: ``ForwardBatch.sampled_rows``, the first row of each that makes a feature.
    feature_rows: np.ndarray
    #: Rows that attend to each other, which lie behind each other; their sum is T. The sequences of the batch.
    segments: tuple[int, ...]
    #: int64 [``Tower.rotary_axes``, T]: ``ForwardBatch.rotary_positions``, of a tower that has any.
    rotary_positions: np.ndarray | None = None


class Tower(Layer, ABC):
    """One network's tower, with the projection to the width of its embeddings."""

    #: Numbers of a row.
    row_width: int
    #: Most rows of a piece; None: as many as the image has.
    max_rows: int | None = None
    #: Positions of a row that sections of a head are rotated by, such as line and column.
    rotary_axes: int = 0
    #: Keys and values of a layer for the rows of one batch. Group 0 has block tables by segment; group 1 has one
    #: context of all rows, which ``AttentionSpec.cross`` sees whole (the batch's cross tables).
    workspace: KVSpec

    def weights(self, prefix: str = "") -> Iterator[Weight]:
        """See ``Layer``; no token's step reads them."""
        return (weight._replace(active=0.0) for weight in super().weights(prefix))

    @abstractmethod
    def prepare(self, image: ImageInput) -> list[TowerInput]:
        """The pieces of an image; called in a thread beside the steps. Their features follow each other."""

    @abstractmethod
    def features(self, rows: Array, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Array:
        """Rows float32 [T, row_width] to features float32 [N, E]; recorded, and run in parts between steps.

        ``caches``: the workspace as group 0 and as group 1, which are different memory.
        """


def tower_context(context: LayerContext) -> LayerContext:
    """What the layers of a tower are built with: all of each on every rank, not quantised, without adapters.

    They are layers whose products need nothing of other ranks: ``all_reduce`` would add the whole several times.
    """
    return replace(
        context,
        quantization=None,
        kv_cache_dtype="auto",
        tp_rank=0,
        tp_size=1,
        layers=None,
        max_loras=0,
        virtual_tokens=0,
    )


class ResidualReader(Protocol):
    """Sees the residual stream between the layers of a network, as part of its forward."""

    def read(self, layer: int, residual: Array) -> None:
        """``residual``, float32 [T, E], is the input of this layer, or the output of the last; it must not change."""
        ...


class Network(Layer, ABC):
    """One rank's share of a network: its tensor-parallel part of the layers of its pipeline stage.

    The first stage has the embedding, the last one the final norm and the head. ``checkpoint_map`` maps the tensors of
    checkpoints, ``read_config`` reads their config.json.
    """

    #: Maps the checkpoint's names and tensors to those that the layers expect; see ``octavo.models.checkpoint``. Where
    #: it depends on the configuration, ``__init__`` sets it.
    checkpoint_map: tuple[CheckpointEntry, ...] = ()

    #: Comes before it, of architectures without a language-model head.
    head_map: tuple[CheckpointEntry, ...] = ()

    #: Comes before both: the tensors of a base model may lack the prefix that they have in a language model, such as
    #: ``model.``, whatever architecture its config.json names.
    base_map: tuple[CheckpointEntry, ...] = ()

    #: The KV entries of each layer of this stage, on this rank.
    kv_specs: list[KVSpec]

    #: Keys and values of a layer of an encoder: its layers share a cache of this shape for the tokens of one step.
    #: Without a decoder ``kv_specs`` are empty, and ``forward_layers`` gets this cache for each layer; else ``encode``
    #: has it.
    workspace: KVSpec | None = None

    #: Of a network that sees images, on its first stage: what makes features of them.
    tower: Tower | None = None

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

    def entries(self) -> list[CheckpointEntry]:
        """What leads the tensors of a checkpoint to those that the layers expect, in order."""
        return [*self.base_map, *(self.head_map if self.config.head != "lm" else ()), *self.checkpoint_map]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the tensors that are not loaded yet, by their names."""
        return {name: layer.expected[shard] for name, layer, shard in self.tensors()}

    def rotary_table(self, config: ModelConfig, context: LayerContext) -> RotaryTable:
        """The table of ``config.rope``, which layers with equal configurations share."""
        for known, table in self._rotary_tables:
            if known == config:
                return table
        table = RotaryTable(config, context.kernels, context.positions)
        self._rotary_tables.append((config, table))
        return table

    def position_bytes(self) -> int:
        """Bytes that each position of the context takes in the rotary tables."""
        return sum(table.position_bytes for _, table in self._rotary_tables)

    def extend_positions(self, positions: int) -> None:
        """Makes the rotary tables long enough for sequences of so many tokens, before steps are recorded."""
        for _, table in self._rotary_tables:
            table.extend(positions)

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Array:
        """The batch's tokens to hidden states [T, E], for a network of one stage; writes keys and values."""
        return self.forward_layers(self.embed(batch.token_ids), batch, kv_caches)

    @classmethod
    def prepare_input(cls, config: ModelConfig, kind: str, payload: bytes) -> np.ndarray:
        """Of an encoder-decoder network: what the encoder reads, made on the host of an ``EncoderInput``'s payload.

        Called in a thread beside the steps.

        Returns:
            Token ids int64 [T], or float32 [T, ``EncoderFacts.feature_width``].

        Raises:
            InvalidRequestError: the network takes no input of this kind, or not this one.
        """
        raise InvalidRequestError(f"{config.architecture} has no encoder that reads {kind}")

    def encode(self, inputs: Array, batch: ForwardBatch, workspace: LayerCache, kv_caches: list[LayerCache]) -> Array:
        """Of an encoder-decoder network: computes the encoder, and writes the keys and values of cross attention.

        Args:
            inputs: prepared inputs behind each other, float32 [T, width]; or the token ids of the batch.
            batch: the encoder's tokens; each sequence is one whole input. Its KV groups are that of the decoder, for
                the slots of the contexts' blocks, and the workspace's, for slots and block tables.
            workspace: the cache that all of the encoder's layers share.
            kv_caches: those of the decoder's layers.

        Returns:
            The encoder's output [T, E].
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def cross_queries(self, layer: int, residual: Array, cache: LayerCache, batch: ForwardBatch) -> CrossQueries:
        """Of an encoder-decoder network: the queries of a layer's cross attention, from the layer's input.

        Args:
            layer: its number.
            residual: its input, float32 [T, E], whose memory may be reused.
            cache: that of the layer, to which the tokens' own keys and values are written.
            batch: the step's tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cross attention")

    def set_virtual_tokens(self, first: int, embeddings: np.ndarray) -> None:
        """Writes embeddings [n, E] of virtual tokens, those of ids ``vocab_size + first`` on; a stage without the
        embedding does nothing.
        """

    @abstractmethod
    def embed(self, token_ids: Array) -> Array:
        """Token ids int64 [T] to the residual stream float32 [T, E]; first stage only."""

    @abstractmethod
    def forward_layers(
        self,
        residual: Array,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        reader: ResidualReader | None = None,
    ) -> Array:
        """The residual stream float32 [T, E] through the layers of this stage, which write their keys and values.

        The last stage returns hidden states [T, E] after the final norm, other stages the residual stream for the next.
        ``kv_caches`` has an entry for each of ``kv_specs``. The memory of ``residual`` may be reused. A ``reader`` is
        shown the stream before each layer and after the last.
        """

    def logits(self, hidden: Array) -> Array:
        """Hidden states [n, E] to logits float32 [n, vocab]; last stage only."""
        raise NotImplementedError(f"{type(self).__name__} has no language-model head")

    def scores(self, rows: Array) -> Array:
        """Class scores float32 [n, labels] of hidden states [n, E], pooled or of tokens as ``ModelConfig.head`` says,
        before sigmoid or softmax. Last stage only, and not part of recorded steps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no classification head")


# Sizes of a network, derived from its weights and KV specs, which need no memory: ``build_without_weights``.


class _NoMemory:
    """What constructors of layers ask of kernels, without memory for anything."""

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
    """The network for ``context`` without memory: its sizes can be computed, it cannot be loaded or run.

    Raises:
        As ``make_network``.
    """
    return make_network(config, replace(context, kernels=_NO_MEMORY, positions=0))


def build_without_weights(
    config: ModelConfig,
    dtype: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    max_loras: int = 0,
) -> Network:
    """As ``build_rank_without_weights``, of the whole network on one rank; types are values of the engine's options."""
    context = LayerContext(
        _NO_MEMORY, DType(dtype), quantization=quantization, kv_cache_dtype=kv_cache_dtype, max_loras=max_loras
    )
    return build_rank_without_weights(config, context)


def matrices(network: Network) -> list[Weight]:
    """The matrices of the layers and the head, which every step reads, except those of experts that none chose; without
    those of a tower.
    """
    return [weight for weight in network.weights() if weight.kind in ("linear", "head") and weight.active]


def num_parameters(network: Network) -> int:
    """Numbers in the weights of this rank, tied ones once."""
    return sum(math.prod(weight.shape) for weight in _parameters(network))


def num_active_parameters(network: Network) -> int:
    """As ``num_parameters``, of a mixture of experts with as many experts as a token has, and without a tower."""
    return round(sum(math.prod(weight.shape) * weight.active for weight in _parameters(network)))


def _parameters(network: Network) -> list[Weight]:
    return [weight for weight in network.weights() if not weight.is_tied]


def size_bytes(*weights: Weight) -> int:
    """Bytes of these weights without scales of quantised ones."""
    return int(sum(math.prod(weight.shape) * NUMBER_BYTES[weight.dtype] for weight in weights))


def weight_bytes(network: Network) -> int:
    """Bytes of the weights in memory, without scales and padding of the backend (a lower bound)."""
    return size_bytes(*(weight for weight in network.weights() if not weight.is_tied))


def kv_bytes_per_token(network: Network) -> int:
    """Bytes of a token's KV entries in all layers of this rank, without padding."""
    return sum(spec.bytes_per_token for spec in network.kv_specs)
