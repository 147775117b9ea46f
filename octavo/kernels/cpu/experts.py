"""Experts of the CPU backend; see csrc/cpu/bind_moe.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cpu.compiled import address, cpu, strided, typed
from octavo.kernels.cpu.linear import CpuDenseWeight, CpuQuantizedWeight
from octavo.kernels.cpu.op_runner import OpRunner
from octavo.kernels.experts import PackedExperts, RoutingSpec
from octavo.kernels.packed_weight import PackedWeight


class CpuExperts(PackedExperts):
    """Experts in any formats of this backend."""

    def __init__(self, runner: OpRunner, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]) -> None:
        self._runner = runner
        self._group = cpu.ExpertGroup([_matrix(weight) for weight in gate_up], [_matrix(weight) for weight in down])

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        """The rows of an expert in one product; a row's bits do not depend on the others."""
        out = self._runner.new(x, tuple(x.shape), torch.float32) if add is None else add
        op = cpu.experts(
            self._group,
            *typed(x),
            experts.data_ptr(),
            weights.data_ptr(),
            experts.shape[1],
            *strided(out),
            *strided(add),
        )
        self._runner.run(op, x)
        return out


def route_op(logits: Tensor, spec: RoutingSpec, bias: Tensor | None, experts: Tensor, weights: Tensor) -> Any:
    """The operation that fills experts and weights; the caller keeps all tensors alive."""
    return cpu.route(
        logits.data_ptr(),
        logits.stride(0),
        address(bias),
        experts.data_ptr(),
        weights.data_ptr(),
        logits.shape[1] - spec.shared,
        spec.shared,
        spec.top_k,
        spec.num_groups,
        spec.top_groups,
        spec.best_of_group,
        spec.scoring == "sigmoid",
        spec.renormalize,
        spec.scale,
    )


def _matrix(weight: PackedWeight) -> Any:
    if isinstance(weight, CpuQuantizedWeight):
        return cpu.quantized_expert(weight.parts)
    assert isinstance(weight, CpuDenseWeight)
    return cpu.dense_expert(weight.packed)
