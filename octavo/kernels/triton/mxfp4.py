"""Products with weights of MXFP4 (Open Compute Project, Microscaling Formats 1.0), dequantised in registers.

Matrices stay in the blocks of GGUF: of 32 values of a row, a scale of e8m0, then 16 bytes, of which byte i holds the
codes of values i and i + 16. Such a value times its scale is exact in bfloat16 and float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.interface import Activation, PackedWeight
from octavo.kernels.triton.matmul import dot, gathered_product
from octavo.kernels.triton.quant import TritonDenseWeight

VALUES, BYTES = 32, 17  # of a block
_BYTES = tl.constexpr(BYTES)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class TritonMXFP4Weight(PackedWeight):
    """Products of experts read the blocks; any other product dequantises the matrix first."""

    #: uint8 [N, K / 32 * 17].
    blocks: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    gated: bool
    deterministic: bool

    def __call__(
        self, x: Tensor, out_dtype: DType | None = None, add: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        weight = dequantize(self.blocks, self.dtype)
        return TritonDenseWeight(weight, self.bias, self.gated, self.deterministic)(x, out_dtype, add, activation)


def dequantize(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [N, K] of uint8 blocks [N, K / 32 * 17]."""
    blocks = blocks.unflatten(1, (-1, BYTES))
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=2).long()
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=blocks.device)
    scales = (blocks[..., :1].int() << 23).view(torch.float32)
    return (table[codes] * scales).flatten(1).to(dtype)


@triton.jit
def product_of_rows(
    x_rows, weight_ptr, row, inside, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """Rows x [ROWS] at the pointers ``x_rows`` by the rows ``row`` of a matrix of ``depth`` columns: float32.

    The matrix is of x's type, or of MXFP4: then it is bytes. Rows that are not ``inside`` are zero.
    """
    if weight_ptr.dtype.element_ty == tl.uint8:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        at = tl.arange(0, DEPTH // 2)  # of the bytes of a step
        first = at // 16 * 32 + at % 16  # the columns of their low halves
        blocks = weight_ptr + row[None, :] * (depth // 32 * _BYTES) + (at // 16 * _BYTES)[:, None]
        x_ptrs = x_rows[:, None] + first[None, :]
        for start in range(0, depth, DEPTH):
            left = first < depth - start
            there = inside[:, None] & left[None, :]
            block = blocks + start // 32 * _BYTES
            scale = (tl.load(block, left[:, None], other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            pairs = tl.load(block + 1 + (at % 16)[:, None], left[:, None], other=0).to(tl.int32)
            x = tl.load(x_ptrs + start, there, other=0.0)
            total = dot(x, (_e2m1(pairs & 15) * scale).to(x.dtype), total)
            x = tl.load(x_ptrs + start + 16, there, other=0.0)
            total = dot(x, (_e2m1(pairs >> 4) * scale).to(x.dtype), total)
        return total
    else:
        k = tl.arange(0, DEPTH)
        weight_ptrs = weight_ptr + row[None, :] * depth + k[:, None]
        x_ptrs = x_rows[:, None] + k[None, :]
        return gathered_product(x_ptrs, weight_ptrs, inside, k, 0, depth, depth, ROWS, COLUMNS, DEPTH)


@triton.jit
def _e2m1(code):
    """The float32 values of int32 codes; from 1 on, three bits without the sign are an exponent and a bit after it."""
    bits = code & 7
    normal = ((bits + (126 << 1)) << 22).to(tl.float32, bitcast=True)
    magnitude = tl.where(bits < 2, bits.to(tl.float32) * 0.5, normal)
    return tl.where(code < 8, magnitude, -magnitude)
