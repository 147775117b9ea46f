"""Gated activations: act(gate) * up, of x [T, 2 * I] with the gates first; computed in float32, rounded once."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.rounding import rounded

_BLOCK = 1024


@triton.jit
def silu(x):
    """Of float32 (Elfwing et al. 2017)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    # 0.5 * x * (1 + tanh(z)) is x * sigmoid(2 * z), with z = sqrt(2 / pi) * (x + 0.044715 * x**3).
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gated_kernel(x_ptr, out_ptr, row_stride, inner, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate_ptr = x_ptr + row * row_stride + column
    gate = tl.load(gate_ptr, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + inner, inside, other=0.0).to(tl.float32)
    out = ACTIVATION(gate) * up
    tl.store(out_ptr + row * inner + column, rounded(out, out_ptr.dtype.element_ty), inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up: x [T, 2 * I], rows strided, to [T, I]."""
    return _gated(x, silu)


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "tanh") -> Tensor:
    """gelu(gate) * up: x [T, 2 * I], rows strided, to [T, I] (Hendrycks & Gimpel 2016); by erf or its tanh form."""
    return _gated(x, _gelu_tanh if approximate == "tanh" else _gelu)


def _gated(x: Tensor, activation: triton.JITFunction) -> Tensor:
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(inner, _BLOCK))
        _gated_kernel[grid](x, out, x.stride(0), inner, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4)
    return out
