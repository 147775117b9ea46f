"""What every network is to the rest of the engine: an embedding, layers with KV caches, and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache
from octavo.layers.base import Layer
from octavo.layers.context import LayerContext
from octavo.models.checkpoint import Entry
from octavo.models.config import ConfigReader


class Network(Layer, ABC):
    """One rank's share of a network: the layers of its pipeline stage, of each its tensor-parallel part.

    The first stage holds the embedding, the last one the last norm and the head. What a checkpoint calls the tensors is
    in ``checkpoint_map``; what it says of the shape is read by ``read_config``.
    """

    #: From the names and tensors of a checkpoint to those that the layers expect; see ``octavo.models.checkpoint``.
    checkpoint_map: ClassVar[tuple[Entry, ...]] = ()

    #: What each layer of this stage caches, on this rank.
    kv_specs: list[KVSpec]

    @classmethod
    @abstractmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        """The facts of a config.json that names ``architecture``.

        Raises:
            ConfigError: a value is missing, of the wrong type or impossible.
            UnsupportedModelError: the network cannot compute what the file asks for.
        """

    @abstractmethod
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        """The network without weights; its layers and ``kv_specs`` are there."""
        super().__init__()
        self.config = config

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        """The batch's tokens to hidden states [T, E], of a network that is one stage; writes keys and values."""
        return self.forward_layers(self.embed(batch.token_ids), batch, kv_caches)

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] to the residual stream float32 [T, E]; of the first stage."""

    @abstractmethod
    def forward_layers(self, residual: Tensor, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Tensor:
        """The residual stream float32 [T, E] through the layers of this stage, which write their keys and values.

        The last stage returns hidden states [T, E] after the last norm, the others the residual stream for the next.
        ``kv_caches`` has an entry for each of ``kv_specs``. The memory of ``residual`` may be reused.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, E] to logits float32 [n, vocab]; of the last stage."""
        raise NotImplementedError(f"{type(self).__name__} has no language-model head")

    def pool(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the batch's tokens to a vector for each sequence, float32 [S, D]; of the last stage.

        The vectors of sequences whose prompts end in the batch count.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pooling head")
