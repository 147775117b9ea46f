"""Rotary position embedding (Su et al. 2021, section 3.2), the "half" layout: dimension i turns with i + R / 2."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.rounding import rounded

#: Heads that one program turns.
_HEADS = 8


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_heads,
    k_heads,
    half,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token, and HEADS heads of q or of k."""
    row = tl.program_id(0).to(tl.int64)
    q_programs = tl.cdiv(q_heads, HEADS)
    first = tl.program_id(1)
    if first < q_programs:
        base = q_ptr + row * q_row_stride
        heads = q_heads
        head_stride = q_head_stride
    else:
        first -= q_programs
        base = k_ptr + row * k_row_stride
        heads = k_heads
        head_stride = k_head_stride
    head = first * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    angles = cos_sin_ptr + tl.load(positions_ptr + row) * 2 * half + pair
    cos = tl.load(angles, pair < half, other=0.0)[None, :]
    sin = tl.load(angles + half, pair < half, other=0.0)[None, :]
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    place = base + head[:, None] * head_stride + pair[None, :]
    first_half = tl.load(place, inside, other=0.0).to(tl.float32)
    second_half = tl.load(place + half, inside, other=0.0).to(tl.float32)
    turned = first_half * cos - second_half * sin
    tl.store(place, rounded(turned, base.dtype.element_ty), inside)
    turned = second_half * cos + first_half * sin
    tl.store(place + half, rounded(turned, base.dtype.element_ty), inside)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q [T, H, D] and k [T, K, D] in place, in float32, and returns them.

    Args:
        q: Strided in all but the last dimension.
        k: The same.
        positions: int64 [T].
        cos_sin: float32 [positions, R], R <= D: R / 2 cosines, then R / 2 sines; dimensions past R stay as they are.
    """
    rows, half = q.shape[0], cos_sin.shape[1] // 2
    if rows and half:
        grid = (rows, triton.cdiv(q.shape[1], _HEADS) + triton.cdiv(k.shape[1], _HEADS))
        _rotary_kernel[grid](
            q,
            k,
            positions,
            cos_sin,
            q.shape[1],
            k.shape[1],
            half,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEADS=_HEADS,
            BLOCK=triton.next_power_of_2(half),
            num_warps=4,
        )
    return q, k
