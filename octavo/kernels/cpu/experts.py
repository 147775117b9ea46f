"""Experts of the CPU backend; see csrc/cpu/bind_moe.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.dtypes import DType
from octavo.kernels.cpu.array import CpuArray
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

    def __call__(self, x: CpuArray, experts: CpuArray, weights: CpuArray, add: CpuArray | None = None) -> CpuArray:
        """The rows of an expert in one product; a row's bits do not depend on the others."""
        out = self._runner.new(x, tuple(x.shape), DType.FLOAT32) if add is None else add
        op = cpu.experts(
            self._group,
            *typed(x),
            experts.address,
            weights.address,
            experts.shape[1],
            *strided(out),
            *strided(add),
        )
        self._runner.run(op, x)
        return out


def route_op(logits: CpuArray, spec: RoutingSpec, bias: CpuArray | None, experts: CpuArray, weights: CpuArray) -> Any:
    """The operation that fills experts and weights; the caller keeps all tensors alive."""
    return cpu.route(
        logits.address,
        logits.strides[0],
        address(bias),
        experts.address,
        weights.address,
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
