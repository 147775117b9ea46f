"""Root mean square norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016).

A row is reduced by one program, in an order that depends on its length alone: its result does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.rounding import rounded

#: Elements of a program: several rows if they are short (norms of heads).
_ELEMENTS = 1024


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    add_ptr,
    out_ptr,
    rows,
    inner,
    outer_stride,
    inner_stride,
    width,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADD: tl.constexpr,
):
    """Row r of the input begins at (r // inner) * outer_stride + (r % inner) * inner_stride; CENTRED: layer norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
    weight = tl.load(weight_ptr + column, column < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / width + eps)
    out = x * scale[:, None] * weight[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, column < width, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    if HAS_ADD:
        out += tl.load(add_ptr + place, inside, other=0.0)
    tl.store(out_ptr + place, rounded(out, out_ptr.dtype.element_ty), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None, add: Tensor | None = None
) -> Tensor:
    """The norm over the last dimension, in float32, rounded to ``out_dtype``, by default the weight's type.

    Args:
        x: [T, E] or [T, heads, D], strided in all but the last dimension.
        weight: [E] or [D].
        eps: Added to the mean of squares.
        out_dtype: Of the result.
        add: float32 of x's shape, contiguous: the result is float32, and so much more.

    Returns:
        A contiguous tensor of x's shape.
    """
    return _norm(x, weight, None, add, eps, torch.float32 if add is not None else out_dtype, centred=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As ``rms_norm``, of x less its mean, and + bias [E] or [D]."""
    return _norm(x, weight, bias, None, eps, out_dtype, centred=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    *,
    centred: bool,
) -> Tensor:
    out = torch.empty(x.shape, dtype=out_dtype or weight.dtype, device=x.device)
    if not out.numel():
        return out
    width = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    tile_rows, block, warps = _tile(width)
    _norm_kernel[(triton.cdiv(rows, tile_rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out if add is None else add,
        out,
        rows,
        inner,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        width,
        eps,
        ROWS=tile_rows,
        BLOCK=block,
        CENTRED=centred,
        HAS_BIAS=bias is not None,
        HAS_ADD=add is not None,
        num_warps=warps,
    )
    return out


def _tile(width: int) -> tuple[int, int, int]:
    """Rows of a program, their padded length, and warps; they depend on the length alone."""
    block = triton.next_power_of_2(width)
    # At most 16 elements per thread in a long row: with a single row, latency dominates.
    warps = min(16, max(4, block // 512))
    return max(1, min(16, _ELEMENTS // block)), block, warps
