"""``DraftHead``: a network beside a model that drafts tokens from the model's hidden states.

Its input at position t is what the model made of token t, the *features*, and the embedding of token t + 1. Its result
stands for the features of token t + 1, so that it is the next input, with the token drafted from it. Its keys and
values at t thus depend on token t + 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from octavo.core.dtypes import DType, Stored
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import LayerContext
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.models.decoder import Decoder
from octavo.models.network import Network


class DraftHead(Network):
    """A head on the model's device; ``attach_target`` must come before it is run.

    ``forward_layers`` is given the features, float32 [T, E]: the model's, or ``next_features`` of the results for the
    row before; the memory may be reused. The token of a row is the one after that of its features, whose position is
    the row's. Of the results, [T, ...], ``logits`` makes float32 [n, vocabulary], outside of recorded steps.
    """

    #: int64 [vocabulary]: the token of each draft id; None: they are the same.
    target_ids: Array | None = None
    #: Number of steps that have a layer of their own; further ones repeat the last.
    depth = 1

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.kernels = context.kernels

    @property
    def feature_width(self) -> int:
        return self.config.hidden_size

    def attach_target(self, target: Decoder) -> None:
        """Sets the model, whose embedding and head this head shares where it has none."""
        self._target = target

    def make_reader(self) -> FeatureReader | None:
        """The reader of the model's residual streams; None where the features are the hidden states."""
        return None

    def forward_step(self, step: int, features: Array, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Array:
        """``forward_layers`` for draft token ``step`` of ``depth``: its row's token is ``step`` further.

        ``features``: the results of the step before at the same positions.
        """
        return self.forward_layers(features, batch, kv_caches)

    def next_features(self, results: Array) -> Array:
        """The features that stand for those of the next tokens, by default the results; outside of recorded steps."""
        return results


class PublishedHead(DraftHead):
    """A head with a checkpoint of its own, which may say by integers which tokens it drafts."""

    #: Name of that tensor, which is no weight.
    token_map: ClassVar[str]

    @abstractmethod
    def check_token_map(self, stored: Stored | None) -> None:
        """Refuses a checkpoint whose tensor ``token_map`` is missing (None), or of another type or shape."""

    @abstractmethod
    def set_token_map(self, values: np.ndarray | None) -> None:
        """``values``: of the tensor; None: of random weights, which draft the first tokens of the vocabulary.

        Raises:
            WeightError: a value is impossible.
        """


class FeatureReader:
    """Multiplies the residual streams before some layers with ``fc``, each as the forward pass reaches it."""

    def __init__(self, fc: ReplicatedConcatLinear, layers: tuple[int, ...]) -> None:
        self._fc, self._layers = fc, layers
        #: float32 [T, E], complete after the last of the layers.
        self.features: Array | None = None

    def read(self, layer: int, residual: Array) -> None:
        if layer in self._layers:
            self.features = self._fc.product(self._layers.index(layer), residual, DType.FLOAT32, self.features)
