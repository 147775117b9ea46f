"""The interface of networks: an embedding, layers with KV caches, and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.kernels.arrays import Array
from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.layers.context import LayerContext
from octavo.layers.cross_attention import CrossQueries
from octavo.layers.layer import Layer
from octavo.layers.rope import RotaryTable
from octavo.models.checkpoint import CheckpointEntry
from octavo.models.config_reader import ConfigReader
from octavo.models.vision.tower import Tower


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
