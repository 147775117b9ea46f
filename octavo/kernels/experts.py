"""Mixtures of experts: how a router chooses the experts of a token, and the interface of a layer's packed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.core.errors import ConfigError
from octavo.kernels.arrays import Array
from octavo.kernels.packed_weight import PackedWeight


@dataclass(frozen=True)
class RoutingSpec:
    """How experts are chosen from the logits of a router, and what weights they get.

    Scores are the softmax of a token's logits or the sigmoid of each, in float32. The ``top_k`` experts with the
    highest scores are chosen, of equal ones the lowest; with a bias, those with the highest sum of score and bias. A
    weight is the score, without the bias.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    #: Whether the weights are divided by their sum.
    renormalize: bool = False
    #: The weights are multiplied by it at the end.
    scale: float = 1.0
    #: The experts are so many groups of equal size, and only those of the best ``top_groups`` are chosen
    #: (DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2).
    num_groups: int = 1
    top_groups: int = 1
    #: A group's own score is the sum of the highest so many in it: 1 in DeepSeek-V2, 2 in V3.
    best_of_group: int = 1
    #: Experts behind the routed ones that every token has: in the last slots, weighted by the sigmoid of their logits.
    shared: int = 0

    def check(self, num_experts: int) -> None:
        """Refuses a number of routed experts of which it cannot choose.

        Raises:
            ConfigError: it does not divide into the groups, or there are too few experts in the best groups.
        """
        groups, size = self.num_groups, num_experts // max(1, self.num_groups)
        if groups < 1 or num_experts % groups or not 1 <= self.top_groups <= groups:
            raise ConfigError(f"{num_experts} experts cannot be limited to {self.top_groups} of {groups} equal groups")
        if not 1 <= self.best_of_group <= size or not 1 <= self.top_k <= size * self.top_groups:
            raise ConfigError(
                f"{self.top_k} experts of a token cannot be chosen from {size * self.top_groups}, with groups of "
                f"{size} compared by their best {self.best_of_group}"
            )


class PackedExperts(ABC):
    """The feed-forward networks of a layer's experts, made by ``ExpertKernels.pack_experts``."""

    @abstractmethod
    def __call__(self, x: Array, experts: Array, weights: Array, add: Array | None = None) -> Array:
        """add + the sum over the token's experts of weight * down(silu(gate(x)) * up(x)).

        The sum is in ascending order of the experts, whatever the order of the slots: it depends on the token alone, so
        that batch-invariant backends can hold it, and lets a backend read each expert's weights once. The weights of
        experts that no token has are not read.

        Args:
            x: [T, E], rows may be strided.
            experts: int32 [T, slots], each from 0 to the number of experts, those of a token distinct.
            weights: float32 [T, slots].
            add: float32 [T, E]; its memory may be reused.

        Returns:
            Float32 [T, E].
        """


class ExpertKernels(ABC):
    """What a backend does for mixtures of experts."""

    @abstractmethod
    def pack_experts(
        self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight], shared: int = 0
    ) -> PackedExperts:
        """The experts of a layer, from what ``pack`` made of their matrices; the caller then drops these.

        Args:
            gate_up: of each expert, gated, without bias; the sizes between the two matrices may differ.
            down: of each expert, without bias, all with the same ``pieces``.
            shared: the last so many are experts that every token has.

        Raises:
            ConfigError: the backend has no products of experts in that format.
        """

    @abstractmethod
    def route(self, logits: Array, spec: RoutingSpec, bias: Array | None = None) -> tuple[Array, Array]:
        """The experts of each token, int32 [T, top_k + shared], and their weights, float32, as ``spec`` says.

        A token whose logits have a NaN gets some experts, with NaN as their weights.

        Args:
            logits: float32 [T, experts + shared].
            spec: checked against the number of experts by ``RoutingSpec.check``.
            bias: float32 [experts], added to the scores for the choice alone (DeepSeek-AI 2024, arXiv 2412.19437,
                section 2.1.2).
        """
