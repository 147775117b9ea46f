"""Experts of the CPU backend; see csrc/cpu/bind_moe.cpp."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.cpu.linear import DenseWeight, QuantizedWeight
from octavo.kernels.experts import PackedExperts, RoutingSpec
from octavo.kernels.packed_weight import PackedWeight

if TYPE_CHECKING:
    from octavo.kernels.cpu.backend import CpuKernels

_cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read
_DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}


class CpuExperts(PackedExperts):
    """Experts in any formats of this backend."""

    def __init__(self, kernels: CpuKernels, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]) -> None:
        self._kernels = kernels
        self._group = _cpu.ExpertGroup([_matrix(weight) for weight in gate_up], [_matrix(weight) for weight in down])

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        """The rows of an expert in one product; a row's bits do not depend on the others."""
        out = self._kernels._new(x, tuple(x.shape), torch.float32) if add is None else add
        op = _cpu.experts(
            self._group,
            x.data_ptr(),
            x.stride(0),
            _DTYPES[x.dtype],
            experts.data_ptr(),
            weights.data_ptr(),
            experts.shape[1],
            out.data_ptr(),
            out.stride(0),
            0 if add is None else add.data_ptr(),
            0 if add is None else add.stride(0),
        )
        self._kernels._do(op, _cpu.Step(x.shape[0]), x)
        return out


def route_op(logits: Tensor, spec: RoutingSpec, bias: Tensor | None, experts: Tensor, weights: Tensor) -> Any:
    """The operation that fills experts and weights; the caller keeps all tensors alive."""
    return _cpu.route(
        logits.data_ptr(),
        logits.stride(0),
        0 if bias is None else bias.data_ptr(),
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
    if isinstance(weight, QuantizedWeight):
        return _cpu.quantized_expert(weight.parts)
    assert isinstance(weight, DenseWeight)
    return _cpu.dense_expert(weight.packed)
