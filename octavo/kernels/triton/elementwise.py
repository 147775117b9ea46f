"""Activations, norms and embeddings, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.interface import SWIGLU_LIMIT, Activation
from octavo.kernels.torch_backend import torch_dtype
from octavo.kernels.triton import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to the nearest number of a type, ties to even; the same on a GPU and under Triton's interpreter."""
    if _INTERPRETED and dtype == tl.bfloat16:  # the interpreter drops the low bits
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + (bits >> 16 & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


_BLOCK = 1024


@triton.jit
def silu(x):
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


_SWIGLU_LIMIT = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _swiglu_oai(gate):
    return _quick_gelu(tl.where(gate > _SWIGLU_LIMIT, _SWIGLU_LIMIT, gate))  # NaN of NaN


@triton.jit
def _relu2(x):
    return _relu(x) * _relu(x)


FUNCTIONS: dict[Activation, triton.JITFunction] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "swiglu_oai": _swiglu_oai,
    "relu2": _relu2,
}


@triton.jit
def _gated_silu(gate, up):
    return silu(gate) * up


@triton.jit
def _gated_gelu(gate, up):
    return _gelu(gate) * up


@triton.jit
def _gated_gelu_tanh(gate, up):
    return _gelu_tanh(gate) * up


@triton.jit
def _gated_quick_gelu(gate, up):
    return _quick_gelu(gate) * up


@triton.jit
def _gated_relu(gate, up):
    return _relu(gate) * up


@triton.jit
def _gated_swiglu_oai(gate, up):
    up = tl.where(up > _SWIGLU_LIMIT, _SWIGLU_LIMIT, tl.where(up < -_SWIGLU_LIMIT, -_SWIGLU_LIMIT, up))
    return _swiglu_oai(gate) * (up + 1.0)


@triton.jit
def _gated_relu2(gate, up):
    return _relu2(gate) * up


#: What gated products make of gate and up.
GATED_FUNCTIONS: dict[Activation, triton.JITFunction] = {
    "silu": _gated_silu,
    "gelu": _gated_gelu,
    "gelu_tanh": _gated_gelu_tanh,
    "quick_gelu": _gated_quick_gelu,
    "relu": _gated_relu,
    "swiglu_oai": _gated_swiglu_oai,
    "relu2": _gated_relu2,
}


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, row_stride, inner, FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate_ptr = x_ptr + row * row_stride + column
    out = tl.load(gate_ptr, inside, other=0.0).to(tl.float32)
    out = FUNCTION(out, tl.load(gate_ptr + inner, inside, other=0.0).to(tl.float32)) if GATED else FUNCTION(out)
    tl.store(out_ptr + row * inner + column, rounded(out, out_ptr.dtype.element_ty), inside)


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """The activation of x [T, I], rows strided; or, gated, of the two halves of x [T, 2 * I]: [T, I]."""
    rows, inner = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(inner, _BLOCK))
        function = (GATED_FUNCTIONS if gated else FUNCTIONS)[activation]
        _activation_kernel[grid](x, out, x.stride(0), inner, FUNCTION=function, GATED=gated, BLOCK=_BLOCK, num_warps=4)
    return out


# Root mean square norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016).

#: Elements of a program, which has several rows if they are short (norms of heads).
_ELEMENTS = 1024


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, add_ptr, out_ptr, rows, inner, outer_stride, inner_stride, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Row r of the input begins at (r // inner) * outer_stride + (r % inner) * inner_stride; CENTRED: layer norm.

    PER_HEAD: the weight, and the bias, are those of r % inner.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
    if PER_HEAD:
        vector, held = (row % inner)[:, None] * width + column[None, :], inside
    else:
        vector, held = column[None, :], (column < width)[None, :]
    weight = tl.load(weight_ptr + vector, held, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / width + eps)
    out = x * scale[:, None] * weight
    if HAS_BIAS:
        out += tl.load(bias_ptr + vector, held, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    if HAS_ADD:
        out += tl.load(add_ptr + place, inside, other=0.0)
    tl.store(out_ptr + place, rounded(out, out_ptr.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out_dtype: DType | None = None, add: Tensor | None = None
) -> Tensor:
    """See ``Kernels.rms_norm``; x [T, E] or [T, heads, D] is strided in all but the last dimension."""
    return _norm(x, weight, None, add, eps, DType.FLOAT32 if add is not None else out_dtype, centred=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out_dtype: DType | None = None) -> Tensor:
    """See ``Kernels.layer_norm``; strides as in ``rms_norm``."""
    return _norm(x, weight, bias, None, eps, out_dtype, centred=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    eps: float,
    out_dtype: DType | None,
    *,
    centred: bool,
) -> Tensor:
    out = torch.empty(x.shape, dtype=torch_dtype(out_dtype) if out_dtype else weight.dtype, device=x.device)
    if not out.numel():
        return out
    width = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    tile_rows, block, warps = _tile(width)
    _norm_kernel[(triton.cdiv(rows, tile_rows),)](
        x, weight, weight if bias is None else bias, out if add is None else add, out, rows, inner, x.stride(0),
        x.stride(1) if x.dim() == 3 else 0, width, eps,
        ROWS=tile_rows, BLOCK=block, CENTRED=centred, HAS_BIAS=bias is not None, HAS_ADD=add is not None,
        PER_HEAD=weight.dim() == 2, num_warps=warps,
    )  # fmt: skip
    return out


def _tile(width: int) -> tuple[int, int, int]:
    """Rows of a program, their padded length, and warps; they depend on the length alone."""
    block = triton.next_power_of_2(width)
    # At most 16 elements per thread in a long row: with a single row, latency dominates.
    warps = min(16, max(4, block // 512))
    return max(1, min(16, _ELEMENTS // block)), block, warps


@triton.jit
def _embedding_kernel(
    ids_ptr, table_ptr, add_ptr, out_ptr, first, rows, width, scale, otherwise,
    HAS_SCALE: tl.constexpr, HAS_ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids_ptr + token) - first
    row = tl.where((row >= 0) & (row < rows), row, otherwise)
    held = tl.where(row >= 0, width, 0)  # columns of the row in the table
    out = tl.load(table_ptr + row * width + column, column < held, other=0.0).to(tl.float32)
    if HAS_SCALE:
        out *= scale
    if HAS_ADD:
        out += tl.load(add_ptr + token * width + column, inside, other=0.0)
    tl.store(out_ptr + token * width + column, out, inside)


def embedding(
    ids: Tensor,
    table: Tensor,
    first: int = 0,
    *,
    scale: float = 1.0,
    add: Tensor | None = None,
    otherwise: int | None = None,
) -> Tensor:
    """See ``Kernels.embedding``; the result reuses the memory of ``add``."""
    tokens, width = len(ids), table.shape[1]
    out = torch.empty((tokens, width), dtype=torch.float32, device=ids.device) if add is None else add
    if out.numel():
        _embedding_kernel[(tokens, triton.cdiv(width, _BLOCK))](
            ids,
            table,
            out,
            out,
            first,
            len(table),
            width,
            scale,
            -1 if otherwise is None else otherwise,
            HAS_SCALE=scale != 1.0,
            HAS_ADD=add is not None,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # product and sum are rounded one after the other, as everywhere
        )
    return out
