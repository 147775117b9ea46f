"""Activations, gated and not, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.packed_weight import Activation
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
def _quick_gelu(x):
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def _relu(x):
    return tl.where(x < 0.0, 0.0, x)  # NaN of NaN


#: Functions of float32, for kernels.
FUNCTIONS: dict[Activation, triton.JITFunction] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
}


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, row_stride, inner, FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate_ptr = x_ptr + row * row_stride + column
    out = FUNCTION(tl.load(gate_ptr, inside, other=0.0).to(tl.float32))
    if GATED:
        out *= tl.load(gate_ptr + inner, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + column, rounded(out, out_ptr.dtype.element_ty), inside)


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """The activation of x [T, I], rows strided; gated, of the first half of x [T, 2 * I], times the second: [T, I]."""
    rows, inner = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(inner, _BLOCK))
        _activation_kernel[grid](
            x, out, x.stride(0), inner, FUNCTION=FUNCTIONS[activation], GATED=gated, BLOCK=_BLOCK, num_warps=4
        )
    return out
