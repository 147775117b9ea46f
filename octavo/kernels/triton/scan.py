"""Selective scans of Mamba 1 and 2, token by token in one order; states and padding as in ``states``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache, ScanChannels, ScanHeads
from octavo.kernels.torch_backend import torch_dtype
from octavo.kernels.triton.elementwise import rounded, silu
from octavo.kernels.triton.states import block_before, block_of, softplus

#: Channels of a program of ``selective_scan``, and columns of a state of one of ``ssd_scan``; both are one warp.
_CHANNELS, _VALUES = 32, 8


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor,
    channels: ScanChannels,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    offset: int = 0,
) -> Tensor:
    """See ``Kernels.selective_scan``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    states, width = channels.decay.shape
    _channels_kernel[(triton.cdiv(width, _CHANNELS), batch.seq_lens.shape[0])](
        x, dt, b, c, z, channels.decay, channels.dt_bias, channels.skip, out, cache.key,
        batch.block_tables[cache.group], batch.positions, batch.query_start_loc, batch.seq_lens, x.stride(0),
        dt.stride(0), b.stride(0), c.stride(0), z.stride(0), width, cache.key.stride(0), offset,
        batch.block_tables.stride(1),
        SIZE=states, STATE_TOKENS=cache.state_tokens, STATES=triton.next_power_of_2(states), CHANNELS=_CHANNELS,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _channels_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, decay_ptr, dt_bias_ptr, skip_ptr, out_ptr, states_ptr, tables_ptr,
    positions_ptr, query_start_ptr, seq_lens_ptr, x_stride, dt_stride, b_stride, c_stride, z_stride, width,
    block_stride, offset, table_stride,
    SIZE: tl.constexpr, STATE_TOKENS: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (c, s): ``CHANNELS`` channels, over the tokens of sequence s."""
    sequence = tl.program_id(1)
    row = tl.load(query_start_ptr + sequence).to(tl.int64)
    stop = tl.load(query_start_ptr + sequence + 1)
    if row == stop:
        return
    number = tl.arange(0, STATES)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < width
    inside = (number < SIZE)[:, None] & here[None, :]
    at = number[:, None] * width + channel[None, :]
    states_ptr += offset
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    position = tl.load(positions_ptr + row)
    held = (number < tl.where(position > 0, SIZE, 0))[:, None] & here[None, :]
    before = block_before(table_ptr, position, block_stride, STATE_TOKENS)
    state = tl.load(states_ptr + before + at, held, other=0.0)
    tl.debug_barrier()  # all of the program's threads have read
    is_padding = tl.load(seq_lens_ptr + sequence) == 0

    decay = tl.load(decay_ptr + at, inside, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + channel, here, other=0.0)
    skip = tl.load(skip_ptr + channel, here, other=0.0)
    for _ in range(row, stop):
        x = tl.load(x_ptr + row * x_stride + channel, here, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + row * z_stride + channel, here, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride + number, number < SIZE, other=0.0)
        c = tl.load(c_ptr + row * c_stride + number, number < SIZE, other=0.0)
        dt = softplus(tl.load(dt_ptr + row * dt_stride + channel, here, other=0.0) + dt_bias)
        state = state * tl.exp(dt[None, :] * decay) + b[:, None] * (dt * x)[None, :]
        out = (tl.sum(state * c[:, None], 0) + skip * x) * silu(z)
        tl.store(out_ptr + row * width + channel, rounded(out, out_ptr.dtype.element_ty), here)
        row += 1
        if ((row == stop) | ((position + 1) % STATE_TOKENS == 0)) & (not is_padding):
            after = block_of(table_ptr, position, block_stride, STATE_TOKENS)
            tl.store(states_ptr + after + at, state, inside)
        position += 1


def ssd_scan(
    xbc: Tensor,
    dt: Tensor,
    heads: ScanHeads,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    z: Tensor | None = None,
    offset: int = 0,
    out_dtype: DType | None = None,
) -> Tensor:
    """See ``Kernels.ssd_scan``."""
    dtype = xbc.dtype if out_dtype is None else torch_dtype(out_dtype)
    out = torch.empty((len(xbc), heads.heads * heads.head_dim), dtype=dtype, device=xbc.device)
    if not out.numel():
        return out
    _heads_kernel[(heads.heads * triton.cdiv(heads.head_dim, _VALUES), batch.seq_lens.shape[0])](
        xbc, dt, z, heads.decay, heads.dt_bias, heads.skip, out, cache.key, batch.block_tables[cache.group],
        batch.positions, batch.query_start_loc, batch.seq_lens, xbc.stride(0), dt.stride(0),
        0 if z is None else z.stride(0), cache.key.stride(0), offset, batch.block_tables.stride(1), *heads.dt_limits,
        heads.dt_scale, heads.gate_scale, heads.scale,
        HEADS=heads.heads, GROUPS=heads.groups, HEAD_DIM=heads.head_dim, SIZE=heads.state_size,
        STATE_TOKENS=cache.state_tokens, STATES=triton.next_power_of_2(heads.state_size), VALUES=_VALUES, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _heads_kernel(
    xbc_ptr, dt_ptr, z_ptr, decay_ptr, dt_bias_ptr, skip_ptr, out_ptr, states_ptr, tables_ptr, positions_ptr,
    query_start_ptr, seq_lens_ptr, xbc_stride, dt_stride, z_stride, block_stride, offset, table_stride, least_dt,
    most_dt, dt_scale, gate_scale, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, STATE_TOKENS: tl.constexpr,
    STATES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (v, s): ``VALUES`` columns of the state of one head, over the tokens of sequence s."""
    tiles: tl.constexpr = (HEAD_DIM + VALUES - 1) // VALUES
    head, sequence = tl.program_id(0) // tiles, tl.program_id(1)
    row = tl.load(query_start_ptr + sequence).to(tl.int64)
    stop = tl.load(query_start_ptr + sequence + 1)
    if row == stop:
        return
    number = tl.arange(0, STATES)
    value = tl.program_id(0) % tiles * VALUES + tl.arange(0, VALUES)
    here = value < HEAD_DIM
    inside = (number < SIZE)[:, None] & here[None, :]
    at = offset + head * (SIZE * HEAD_DIM) + number[:, None] * HEAD_DIM + value[None, :]
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    position = tl.load(positions_ptr + row)
    held = (number < tl.where(position > 0, SIZE, 0))[:, None] & here[None, :]
    before = block_before(table_ptr, position, block_stride, STATE_TOKENS)
    state = tl.load(states_ptr + before + at, held, other=0.0)
    tl.debug_barrier()  # all of the program's threads have read
    is_padding = tl.load(seq_lens_ptr + sequence) == 0

    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    x_at = head * HEAD_DIM + value
    b_at = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * SIZE + number
    for _ in range(row, stop):
        xbc_row_ptr = xbc_ptr + row * xbc_stride
        x = tl.load(xbc_row_ptr + x_at, here, other=0.0).to(tl.float32)
        b = tl.load(xbc_row_ptr + b_at, number < SIZE, other=0.0).to(tl.float32)
        c = tl.load(xbc_row_ptr + GROUPS * SIZE + b_at, number < SIZE, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) * dt_scale + dt_bias)
        dt = tl.where(dt < least_dt, least_dt, tl.where(dt > most_dt, most_dt, dt))  # NaN of NaN
        state = state * tl.exp(dt * decay) + b[:, None] * (dt * x)[None, :]
        out = (tl.sum(state * c[:, None], 0) + skip * x) * scale
        if z_ptr is not None:
            out *= silu(tl.load(z_ptr + row * z_stride + x_at, here, other=0.0).to(tl.float32) * gate_scale)
        tl.store(out_ptr + row * (HEADS * HEAD_DIM) + x_at, rounded(out, out_ptr.dtype.element_ty), here)
        row += 1
        if ((row == stop) | ((position + 1) % STATE_TOKENS == 0)) & (not is_padding):
            after = block_of(table_ptr, position, block_stride, STATE_TOKENS)
            tl.store(states_ptr + after + at, state, inside)
        position += 1


_COLUMNS = 1024


def silu_gate(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """See ``Kernels.silu_gate``."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=x.device)
    if out.numel():
        _silu_gate_kernel[(rows, triton.cdiv(width, _COLUMNS))](
            x, gate, out, x.stride(0), gate.stride(0), width, scale, COLUMNS=_COLUMNS, num_warps=4
        )
    return out


@triton.jit
def _silu_gate_kernel(x_ptr, gate_ptr, out_ptr, x_stride, gate_stride, width, scale, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    out = tl.load(x_ptr + row * x_stride + column, inside, other=0.0) * silu(gate * scale)
    tl.store(out_ptr + row * width + column, rounded(out, out_ptr.dtype.element_ty), inside)
