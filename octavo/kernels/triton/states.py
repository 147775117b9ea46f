"""Recurrent states: causal convolution and gated delta rule, token by token in one order.

Where a sequence's states are is computed on the device from block tables, positions and lengths, so that decode steps
can be captured. A sequence of length 0 is padding: it begins with zeros and writes no state.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import DeltaHeads, LayerCache
from octavo.kernels.triton.attention import count_tiles, find_tile
from octavo.kernels.triton.elementwise import rounded, silu

#: Channels of a program, and its tokens in steps with prompts: at least those that the window of a token reaches back.
_CHANNELS, _TOKENS = 128, 32


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    offset: int = 0,
    activation: Literal["silu"] | None = None,
    in_gate: Tensor | None = None,
    out_gate: Tensor | None = None,
) -> Tensor:
    """See ``Kernels.causal_conv``."""
    (tokens, channels), sequences = x.shape, batch.seq_lens.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    taps = weight.shape[0]
    decodes = batch.num_decodes == tokens
    tile = 1 if decodes else max(_TOKENS, triton.next_power_of_2(taps))
    _conv_kernel[(triton.cdiv(channels, _CHANNELS), tokens if decodes else count_tiles(tokens, sequences, tile))](
        x, in_gate, out_gate, weight, bias, out, cache.key, batch.block_tables[cache.group], batch.positions,
        batch.query_start_loc, batch.seq_lens, x.stride(0), 0 if in_gate is None else in_gate.stride(0),
        0 if out_gate is None else out_gate.stride(0), channels, cache.key.stride(0), offset,
        batch.block_tables.stride(1), sequences,
        SILU=activation == "silu", STATE_TOKENS=cache.state_tokens, TAPS=taps, ROWS=triton.next_power_of_2(taps - 1),
        TOKENS=tile, CHANNELS=_CHANNELS, num_warps=1 if tile == 1 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride", "sequences"])
def _conv_kernel(
    x_ptr, in_gate_ptr, out_gate_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, tables_ptr, positions_ptr,
    query_start_ptr, seq_lens_ptr, x_stride, in_gate_stride, out_gate_stride, channels, block_stride, offset,
    table_stride, sequences,
    SILU: tl.constexpr, STATE_TOKENS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (c, t): ``CHANNELS`` channels of ``TOKENS`` tokens of a sequence; if it is one token, of sequence t.

    The first tile of a sequence alone reads the state before it, and writes the block that may hold it.
    """
    if TOKENS == 1:
        sequence, tile, count = tl.program_id(1), 0, 1
        first_row = tl.load(query_start_ptr + sequence)
    else:
        sequence, tile, first_row, count = find_tile(query_start_ptr, 0, sequences, TOKENS)
        if tile * TOKENS >= count:
            return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    start = tl.load(positions_ptr + first_row)
    states_ptr += offset
    before_ptr = states_ptr + block_before(table_ptr, start, block_stride, STATE_TOKENS)
    row = first_row.to(tl.int64)
    x_ptr += row * x_stride
    if in_gate_ptr is not None:
        in_gate_ptr += row * in_gate_stride

    local = tile * TOKENS + tl.arange(0, TOKENS)
    if bias_ptr is not None:
        out = tl.zeros((TOKENS, CHANNELS), tl.float32) + tl.load(bias_ptr + channel, inside, other=0.0)[None, :]
    else:
        out = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight_ptr + tap * channels + channel, inside, other=0.0)
        out += factor[None, :] * _conv_inputs(
            x_ptr, in_gate_ptr, before_ptr, x_stride, in_gate_stride, local + (tap - (TAPS - 1)), count, channel,
            channels, start, TAPS,
        )  # fmt: skip
    if SILU:
        out = silu(out)
    here = (local < count)[:, None] & inside[None, :]
    rows = (row + local)[:, None]
    if out_gate_ptr is not None:
        out *= tl.load(out_gate_ptr + rows * out_gate_stride + channel[None, :], here, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * channels + channel[None, :], rounded(out, out_ptr.dtype.element_ty), here)

    if tl.load(seq_lens_ptr + sequence) > 0:
        end = start + count
        first_block = start // STATE_TOKENS
        low = first_block
        if tile > 0:
            low = tl.maximum(first_block + 1, (start + tile * TOKENS) // STATE_TOKENS)
        tile_end = tl.minimum(count, (tile + 1) * TOKENS)
        high = (start + tile_end - 1) // STATE_TOKENS
        # The last block first: the first one may be where the state before the step is.
        for i in range(0, high - low + 1):
            index = high - i
            tokens = tl.minimum(end, (index + 1) * STATE_TOKENS) - start
            if (tokens <= tile_end) | (index == first_block):
                lag = tl.arange(0, ROWS)
                window = _conv_inputs(
                    x_ptr, in_gate_ptr, before_ptr, x_stride, in_gate_stride, tokens - (TAPS - 1) + lag, count, channel,
                    channels, start, TAPS,
                )  # fmt: skip
                target = block_of(table_ptr, index * STATE_TOKENS, block_stride, STATE_TOKENS)
                tl.debug_barrier()  # all of the program's threads have read
                at = states_ptr + target + lag[:, None] * channels + channel[None, :]
                tl.store(at, window, (lag < TAPS - 1)[:, None] & inside[None, :])


@triton.jit
def block_of(table_ptr, position, block_stride, STATE_TOKENS: tl.constexpr):
    """First number of the block that has the state after a position."""
    return tl.load(table_ptr + position // STATE_TOKENS).to(tl.int64) * block_stride


@triton.jit
def block_before(table_ptr, position, block_stride, STATE_TOKENS: tl.constexpr):
    """First number of the block that has the state before a position; any block of the table if that is 0."""
    return block_of(table_ptr, tl.maximum(position - 1, 0), block_stride, STATE_TOKENS)


@triton.jit
def _conv_inputs(
    x_ptr, in_gate_ptr, before_ptr, x_stride, in_gate_stride, index, count, channel, channels, start,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Inputs [index, channel] of a sequence; those of the step begin at 0, those of the state before it at 1 - TAPS."""
    inside = (channel < channels)[None, :]
    here = ((index >= 0) & (index < count))[:, None] & inside
    rows = index.to(tl.int64)[:, None]
    x = tl.load(x_ptr + rows * x_stride + channel[None, :], here, other=0.0).to(tl.float32)
    if in_gate_ptr is not None:
        x *= tl.load(in_gate_ptr + rows * in_gate_stride + channel[None, :], here, other=0.0).to(tl.float32)
    oldest = tl.where(start > 0, 1 - TAPS, 0)
    there = ((index >= oldest) & (index < 0))[:, None] & inside
    before = tl.load(before_ptr + (rows + (TAPS - 1)) * channels + channel[None, :], there, other=0.0)
    return tl.where(here, x, before)


#: Columns of a state that a program computes, in one warp: sums over the keys are within it, and short prompts of few
#: heads have many programs.
_VALUES = 8


def gated_delta_rule(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    heads: DeltaHeads,
    cache: LayerCache,
    batch: ForwardBatch,
    *,
    offset: int = 0,
) -> Tensor:
    """See ``Kernels.gated_delta_rule``."""
    tokens, sequences, width = len(qkv), batch.seq_lens.shape[0], heads.value_heads * heads.value_dim
    out = torch.empty((tokens, width), dtype=qkv.dtype, device=qkv.device)
    if not out.numel():
        return out
    read = torch.empty((tokens, width), dtype=torch.float32, device=qkv.device)
    _delta_kernel[(heads.value_heads * triton.cdiv(heads.value_dim, _VALUES), sequences)](
        qkv, b, a, heads.decay, heads.dt_bias, heads.beta_scale, read, cache.key, batch.block_tables[cache.group],
        batch.positions, batch.query_start_loc, batch.seq_lens, qkv.stride(0), b.stride(0), a.stride(0),
        cache.key.stride(0), offset, batch.block_tables.stride(1),
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        PER_CHANNEL=heads.per_channel, STATE_TOKENS=cache.state_tokens, KEYS=triton.next_power_of_2(heads.key_dim),
        VALUES=_VALUES, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    columns = triton.next_power_of_2(heads.value_dim)
    rows = max(1, _GATED_ELEMENTS // columns)
    _gated_norm_kernel[(triton.cdiv(tokens * heads.value_heads, rows),)](
        read, z, heads.norm, out, tokens * heads.value_heads, z.stride(0), heads.eps,
        HEADS=heads.value_heads, WIDTH=heads.value_dim, SILU=heads.gate == "silu", ROWS=rows, COLUMNS=columns,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _delta_kernel(
    qkv_ptr, b_ptr, a_ptr, decay_ptr, dt_bias_ptr, beta_scale, out_ptr, states_ptr, tables_ptr, positions_ptr,
    query_start_ptr, seq_lens_ptr, qkv_stride, b_stride, a_stride, block_stride, offset, table_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PER_CHANNEL: tl.constexpr, STATE_TOKENS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (v, s): ``VALUES`` columns of the state of one head, over the tokens of sequence s."""
    tiles: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, sequence = tl.program_id(0) // tiles, tl.program_id(1)
    row = tl.load(query_start_ptr + sequence).to(tl.int64)
    stop = tl.load(query_start_ptr + sequence + 1)
    if row == stop:
        return
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) % tiles * VALUES + tl.arange(0, VALUES)
    inside = (key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :]
    at = offset + head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    position = tl.load(positions_ptr + row)
    held = (key < tl.where(position > 0, KEY_DIM, 0))[:, None] & (value < VALUE_DIM)[None, :]
    before = block_before(table_ptr, position, block_stride, STATE_TOKENS)
    state = tl.load(states_ptr + before + at, held, other=0.0)
    tl.debug_barrier()  # all of the program's threads have read
    is_padding = tl.load(seq_lens_ptr + sequence) == 0

    decay = tl.load(decay_ptr + head)
    if PER_CHANNEL:
        dt_bias = tl.load(dt_bias_ptr + head * KEY_DIM + key, key < KEY_DIM, other=0.0)
        a_ptr += head * KEY_DIM
    else:
        dt_bias = tl.load(dt_bias_ptr + head)
        a_ptr += head
    key_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    value_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    b_ptr += head
    inputs = _delta_inputs(
        qkv_ptr, b_ptr, a_ptr, qkv_stride, b_stride, a_stride, row, key, key_at, value, value_at, KEY_HEADS * KEY_DIM,
        KEY_DIM, VALUE_DIM, PER_CHANNEL,
    )  # fmt: skip
    q, k, v, qk, keep, beta = _delta_token(inputs, decay, dt_bias, beta_scale, KEY_DIM)
    inputs = _delta_inputs(
        qkv_ptr, b_ptr, a_ptr, qkv_stride, b_stride, a_stride, tl.minimum(row + 1, stop - 1), key, key_at, value,
        value_at, KEY_HEADS * KEY_DIM, KEY_DIM, VALUE_DIM, PER_CHANNEL,
    )  # fmt: skip
    for _ in range(row, stop):
        # While a token is computed, the next one is prepared and the one after it is read, which may be the last again.
        ahead = _delta_inputs(
            qkv_ptr, b_ptr, a_ptr, qkv_stride, b_stride, a_stride, tl.minimum(row + 2, stop - 1), key, key_at, value,
            value_at, KEY_HEADS * KEY_DIM, KEY_DIM, VALUE_DIM, PER_CHANNEL,
        )  # fmt: skip
        next_q, next_k, next_v, next_qk, next_keep, next_beta = _delta_token(
            inputs, decay, dt_bias, beta_scale, KEY_DIM
        )
        if PER_CHANNEL:
            state *= keep[:, None]
        else:
            state *= keep
        # Both products are with the state before the token's change, so that one does not wait for the other.
        read_q = tl.sum(state * q[:, None], 0)
        delta = (v - tl.sum(state * k[:, None], 0)) * beta
        state = tl.fma(k[:, None], delta[None, :], state)
        out_at = out_ptr + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
        tl.store(out_at, read_q + qk * delta, value < VALUE_DIM)
        row += 1
        if ((row == stop) | ((position + 1) % STATE_TOKENS == 0)) & (not is_padding):
            after = block_of(table_ptr, position, block_stride, STATE_TOKENS)
            tl.store(states_ptr + after + at, state, inside)
        position += 1
        q, k, v, qk, keep, beta = next_q, next_k, next_v, next_qk, next_keep, next_beta
        inputs = ahead


@triton.jit
def _delta_inputs(
    qkv_ptr, b_ptr, a_ptr, qkv_stride, b_stride, a_stride, row, key, key_at, value, value_at, keys,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A token's query, key, value, b and a."""
    qkv_ptr += row * qkv_stride
    q = tl.load(qkv_ptr + key_at, key < KEY_DIM, other=0.0)
    k = tl.load(qkv_ptr + keys + key_at, key < KEY_DIM, other=0.0)
    v = tl.load(qkv_ptr + value_at, value < VALUE_DIM, other=0.0)
    a_ptr += row * a_stride
    a = tl.load(a_ptr + key, key < KEY_DIM, other=0.0) if PER_CHANNEL else tl.load(a_ptr)
    return q, k, v, tl.load(b_ptr + row * b_stride), a


@triton.jit
def _delta_token(inputs, decay, dt_bias, beta_scale, KEY_DIM: tl.constexpr):
    """A token's scaled query, unit key, value, the product of the first two, its decay and beta."""
    q = inputs[0].to(tl.float32)
    k = inputs[1].to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    keep = tl.exp(decay * softplus(inputs[4].to(tl.float32) + dt_bias))
    beta = beta_scale / (1.0 + tl.exp(-inputs[3].to(tl.float32)))
    return q, k, inputs[2].to(tl.float32), tl.sum(q * k, 0), keep, beta


@triton.jit
def softplus(x):
    """log(1 + e^x); for small e^x by the error of its sum with 1 (Kahan), and x where 1 is lost in the sum."""
    e = tl.exp(tl.where(x > 20.0, 0.0, x))
    sum = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0))))


#: Elements of a program of the norm.
_GATED_ELEMENTS = 512


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, rows, z_stride, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """rms_norm(x) * weight * silu(z), or sigmoid(z), of ``ROWS`` heads of tokens."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + at, inside, other=0.0)
    z_at = (row // HEADS * z_stride + row % HEADS * WIDTH)[:, None] + column[None, :]
    z = tl.load(z_ptr + z_at, inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < WIDTH, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / WIDTH + eps)
    gate = silu(z) if SILU else 1.0 / (1.0 + tl.exp(-z))
    out = x * scale[:, None] * weight[None, :] * gate
    tl.store(out_ptr + at, rounded(out, out_ptr.dtype.element_ty), inside)


_GATE_COLUMNS = 1024


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See ``Kernels.sigmoid_gate``."""
    rows, width = x.shape
    if x.numel():
        _sigmoid_gate_kernel[(rows, triton.cdiv(width, _GATE_COLUMNS))](
            x, gate, x.stride(0), gate.stride(0), width, COLUMNS=_GATE_COLUMNS, num_warps=4
        )
    return x


@triton.jit
def _sigmoid_gate_kernel(x_ptr, gate_ptr, x_stride, gate_stride, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    x_ptr += row * x_stride + column
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, other=0.0).to(tl.float32)
    out = tl.load(x_ptr, inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(x_ptr, rounded(out, x_ptr.dtype.element_ty), inside)
