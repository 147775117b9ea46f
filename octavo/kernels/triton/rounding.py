"""Rounding to a narrower type, the same on a GPU and under Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.interpreter import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to the nearest number of a type, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:  # the interpreter drops the low bits
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + (bits >> 16 & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
