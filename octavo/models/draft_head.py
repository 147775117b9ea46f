"""``DraftHead``: a network beside a model that drafts tokens from the model's hidden states.

Its input at position t is what the model made of token t, the *features*, and the embedding of token t + 1. Its output
stands for the features of token t + 1, so that it is the next input, with the token drafted from it. Its keys and
values at t thus depend on token t + 1.
"""

from __future__ import annotations

from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.models.decoder import Decoder
from octavo.models.network import Network


class DraftHead(Network):
    """A head on the model's device; ``attach_target`` must come before it is run.

    ``forward_layers`` is given the features, float32 [T, E]: the model's, or the result for the row before; the memory
    may be reused. The token of a row is the one after that of its features, whose position is the row's. The result,
    float32 [T, E], stands for the features of that token; ``logits`` makes float32 [n, vocabulary] of it.
    """

    #: int64 [vocabulary]: the token of each draft id; None: they are the same.
    target_ids: Array | None = None
    #: Number of steps that have a layer of their own; further ones repeat the last.
    depth = 1

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


class FeatureReader:
    """Multiplies the residual streams before some layers with ``fc``, each as the forward pass reaches it."""

    def __init__(self, fc: ReplicatedConcatLinear, layers: tuple[int, ...]) -> None:
        self._fc, self._layers = fc, layers
        #: float32 [T, E], complete after the last of the layers.
        self.features: Array | None = None

    def read(self, layer: int, residual: Array) -> None:
        if layer in self._layers:
            self.features = self._fc.product(self._layers.index(layer), residual, DType.FLOAT32, self.features)
