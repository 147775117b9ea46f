"""Rotary embedding and cache write in one launch.

Queries and keys are rotated (Su et al. 2021, RoFormer, section 3.4.2, with dimension i paired with i + R/2), and keys
and values are written to their slots of the cache, quantised if the cache is. All operations are elementwise and
without fused multiply-add, so the bits are those of the plain formulas on every device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.cache import LayerCache
from octavo.kernels.triton.cache import QUANTIZED, TritonLayerCache
from octavo.kernels.triton.rounding import rounded

#: Approximate number of query elements that a program rotates: 16 per thread, which fit into its registers.
_PROGRAM_ELEMENTS = 2048


class Sections(NamedTuple):
    """An argument of the kernel: how many sections there are, and the pair with which each but the first begins."""

    number: int
    second: int
    third: int
    fourth: int


class Queries(NamedTuple):
    """An argument of the kernel: what is rotated, and how."""

    q: Tensor
    out: Tensor
    positions: Tensor
    cos_sin: Tensor
    token_stride: int
    head_stride: int
    cos_sin_stride: int
    #: From the positions of one section to those of the next.
    axis_stride: int


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    sections: Sequence[int] = (),
) -> Tensor:
    """Rotates q and k and writes k and v to their slots.

    Args:
        q: [T, H, D]; it, k and v may be views of one tensor, and are not changed.
        k: [T, K, D]
        v: [T, K, D]
        positions: int64 [T], rows of ``cos_sin``; with ``sections`` [sections, T].
        cos_sin: float32 [max_position, R], R <= D: R/2 cosines, then R/2 sines.
        cache: of the layer; k and v are rounded to q's type first.
        slots: int64 [T]; negative: not written.
        sections: how many pairs of a head are rotated by each of a token's positions, up to four of them.

    Returns:
        q rotated: [T, H, D], contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    queries = Queries(q, out, positions, cos_sin, q.stride(0), q.stride(1), cos_sin.stride(0), positions.stride(0))
    _launch(queries, k, v, cache, slots, q.shape[1] // k.shape[1], cos_sin.shape[1], sections)
    return out


def reshape_and_cache(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Writes k and v [T, K, D], which may be strided views, to their slots; negative slots are skipped."""
    _launch(None, k, v, cache, slots, 1, 0)


def _launch(
    queries: Queries | None,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    slots: Tensor,
    group: int,
    rotated: int,
    sections: Sequence[int] = (),
) -> None:
    assert isinstance(cache, TritonLayerCache)
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    dim = triton.next_power_of_2(head_dim)
    kv_tile = min(triton.next_power_of_2(kv_heads), max(1, _PROGRAM_ELEMENTS // (group * dim)))
    kv_tile = 1 << (kv_tile.bit_length() - 1)
    tile = triton.next_power_of_2(kv_tile * group)
    _rotary_and_cache_kernel[(tokens, triton.cdiv(kv_heads, kv_tile))](
        queries,
        k,
        v,
        slots,
        cache.argument,
        *k.stride()[:2],
        *v.stride()[:2],
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTATED=rotated,
        SECTIONS=_sections(sections),
        BLOCK_SIZE=cache.block_size,
        LARGEST=QUANTIZED.get(cache.dtype, 0.0),
        TILE=tile,
        KV_TILE=kv_tile,
        DIM=dim,
        num_warps=min(16, max(1, tile * dim // 512)),
        enable_fp_fusion=False,
    )


def _sections(pairs: Sequence[int]) -> Sections:
    starts = [*itertools.accumulate(pairs)][:-1]
    return Sections(len(pairs), *starts, *[sum(pairs)] * (3 - len(starts)))


@triton.jit
def _rotary_and_cache_kernel(
    queries,
    k_ptr,
    v_ptr,
    slots_ptr,
    cache,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    SECTIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (t, j): the j-th few KV heads of token t, and the query heads that share them."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KV_TILE
    dims = tl.arange(0, DIM)
    if ROTATED > 0:
        angles = tl.where(dims < ROTATED // 2, dims, dims - ROTATED // 2)
        if SECTIONS.number > 0:
            axis = (angles >= SECTIONS.second).to(tl.int64) + (angles >= SECTIONS.third) + (angles >= SECTIONS.fourth)
            at = queries.positions + axis * queries.axis_stride + token
            row = queries.cos_sin + tl.load(at, mask=dims < ROTATED, other=0) * queries.cos_sin_stride
        else:
            row = queries.cos_sin + tl.load(queries.positions + token) * queries.cos_sin_stride
        cos = tl.load(row + angles, mask=dims < ROTATED, other=1.0)
        sin = tl.load(row + ROTATED // 2 + angles, mask=dims < ROTATED, other=0.0)
        sin = tl.where(dims < ROTATED // 2, -sin, sin)

        heads = first * GROUP + tl.arange(0, TILE)
        last = tl.minimum(first + KV_TILE, KV_HEADS) * GROUP
        q_inside = (heads[:, None] < last) & (dims[None, :] < HEAD_DIM)
        q_ptr = queries.q + token * queries.token_stride
        q = _rotated(q_ptr, queries.head_stride, heads, dims, q_inside, cos, sin, ROTATED)
        at = token * (GROUP * KV_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(queries.out + at, q, mask=q_inside)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        kv_heads = first + tl.arange(0, KV_TILE)
        inside = (kv_heads[:, None] < KV_HEADS) & (dims[None, :] < HEAD_DIM)
        k_ptr += token * k_token_stride
        if ROTATED > 0:
            k = _rotated(k_ptr, k_head_stride, kv_heads, dims, inside, cos, sin, ROTATED)
        else:
            k = _heads_of(k_ptr, k_head_stride, kv_heads, dims, inside)
        v = _heads_of(v_ptr + token * v_token_stride, v_head_stride, kv_heads, dims, inside)
        numbers_at = (
            slot // BLOCK_SIZE * cache.block_stride
            + kv_heads[:, None] * (BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM + dims[None, :]
        )  # fmt: skip
        scale_at = slot // BLOCK_SIZE * cache.scale_stride + kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE
        here = kv_heads < KV_HEADS
        _write(k, inside, cache.key + numbers_at, cache.key_scale, scale_at, here, LARGEST)
        _write(v, inside, cache.value + numbers_at, cache.value_scale, scale_at, here, LARGEST)


@triton.jit
def _heads_of(x_ptr, head_stride, heads, dims, inside):
    """Heads of one token [heads, DIM]."""
    return tl.load(x_ptr + heads[:, None] * head_stride + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _rotated(x_ptr, head_stride, heads, dims, inside, cos, sin, ROTATED: tl.constexpr):
    """Heads of one token [heads, DIM], rotated, of x's type; ``sin`` is negative in the first half."""
    partners = tl.where(dims < ROTATED // 2, dims + ROTATED // 2, dims - ROTATED // 2)
    x = _heads_of(x_ptr, head_stride, heads, dims, inside)
    partner = _heads_of(x_ptr, head_stride, heads, partners, inside & (dims[None, :] < ROTATED))
    rotated = x.to(tl.float32) * cos[None, :] + partner.to(tl.float32) * sin[None, :]
    return rounded(rotated, x.dtype)


@triton.jit
def _write(x, inside, cache_ptrs, scale_ptr, scale_at, here, LARGEST: tl.constexpr):
    """Writes x [heads, DIM] to the cache; with ``LARGEST``, each head is scaled to this greatest magnitude."""
    if LARGEST > 0:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 1)
        largest = tl.where(largest < 1e-30, 1e-30, largest)  # keeps NaN, as tl.maximum need not
        tl.store(scale_ptr + scale_at, largest / LARGEST, mask=here)
        x = x * (LARGEST / largest)[:, None]
        x = _to_integer(x) if cache_ptrs.dtype.element_ty == tl.int8 else _to_e4m3(x)
    tl.store(cache_ptrs, rounded(x.to(tl.float32), cache_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _to_integer(x):
    """The nearest integer, ties to even: adding 1.5 * 2^23 rounds off the fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """The nearest e4m3 number, ties to even, so that the following cast is exact (in the interpreter too).

    Four significant bits by Veltkamp's splitting (Dekker 1971); below 2^-6 multiples of 2^-9.
    """
    large = x * 1048577.0  # 2^20 + 1
    normal = large - (large - x)
    subnormal = (x + 24576.0) - 24576.0  # 1.5 * 2^14
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)
