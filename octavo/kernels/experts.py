"""Mixtures of experts: how a router chooses the experts of a token, and the interface of a layer's packed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
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
    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
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


class PlainExperts(PackedExperts):
    """A loop over the experts, on the products of any backend."""

    def __init__(self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]) -> None:
        self._experts = [*zip(gate_up, down, strict=True)]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        """The tokens of each expert together."""
        out = x.new_zeros(x.shape, dtype=torch.float32) if add is None else add
        for expert in experts.unique().tolist():
            gate_up, down = self._experts[expert]
            tokens, slots = (experts == expert).nonzero(as_tuple=True)
            result = down(gate_up(x[tokens], activation="silu"), torch.float32)
            out.index_add_(0, tokens, result * weights[tokens, slots, None])
        return out


class ExpertKernels:
    """What a backend does for mixtures of experts; here on its products and in plain torch."""

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
        return PlainExperts(gate_up, down)

    def route(self, logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int32 [T, top_k + shared], and their weights, float32, as ``spec`` says.

        A token whose logits have a NaN gets some experts, with NaN as their weights.

        Args:
            logits: float32 [T, experts + shared].
            spec: checked against the number of experts by ``RoutingSpec.check``.
            bias: float32 [experts], added to the scores for the choice alone (DeepSeek-AI 2024, arXiv 2412.19437,
                section 2.1.2).
        """
        return plain_route(logits, spec, bias)


def plain_route(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``ExpertKernels.route`` in plain torch."""
    routed, shared = logits.split([logits.shape[1] - spec.shared, spec.shared], dim=1)
    scores = routed.softmax(-1) if spec.scoring == "softmax" else routed.sigmoid()
    choices = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        groups = choices.unflatten(1, (spec.num_groups, -1))
        of_group = groups.sort(-1, descending=True).values[..., : spec.best_of_group].sum(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, _best(of_group, spec.top_groups), True)
        choices = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    experts = _best(choices, spec.top_k)
    weights = scores.gather(1, experts)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    behind = torch.arange(routed.shape[1], logits.shape[1], device=logits.device).expand(len(logits), -1)
    weights = torch.cat((weights * spec.scale, shared.sigmoid()), 1)
    return torch.cat((experts, behind), 1).to(torch.int32), weights


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores of each row, of equal ones the lowest first."""
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count]
