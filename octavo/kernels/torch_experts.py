"""Mixtures of experts in plain torch, on the products of any backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.experts import PackedExperts, RoutingSpec
from octavo.kernels.packed_weight import PackedWeight


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
            result = down(gate_up(x[tokens], activation="silu"), DType.FLOAT32)
            out.index_add_(0, tokens, result * weights[tokens, slots, None])
        return out


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
