"""Rows of an embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _embedding_kernel(
    ids_ptr,
    table_ptr,
    add_ptr,
    out_ptr,
    first,
    rows,
    width,
    scale,
    HAS_SCALE: tl.constexpr,
    HAS_ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids_ptr + token) - first
    held = tl.where((row >= 0) & (row < rows), width, 0)  # columns that the table has of it
    out = tl.load(table_ptr + row * width + column, column < held, other=0.0).to(tl.float32)
    if HAS_SCALE:
        out *= scale
    if HAS_ADD:
        out += tl.load(add_ptr + token * width + column, inside, other=0.0)
    tl.store(out_ptr + token * width + column, out, inside)


def embedding(ids: Tensor, table: Tensor, first: int, scale: float, add: Tensor | None) -> Tensor:
    """See ``Kernels.embedding``; the result is in the memory of ``add``, if given."""
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
            HAS_SCALE=scale != 1.0,
            HAS_ADD=add is not None,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,  # product and sum are rounded one after the other, as everywhere
        )
    return out
