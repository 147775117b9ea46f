"""Selective state spaces in plain torch, token by token: the standard for faster backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import LayerCache, ScanChannels, ScanHeads, scan_numbers, ssd_numbers
from octavo.kernels.reference_states import state_spans, walk_heads


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
    shape, kept = tuple(channels.decay.shape), cache.draft_tokens
    size, rows = shape[0] * shape[1], 2 + 2 * kept if kept else 0
    numbers = cache.key.view(len(cache.key), -1)[:, offset : offset + scan_numbers(shape[1], shape[0], kept)]
    parts = numbers.split((size, rows * shape[1], numbers.shape[1] - size - rows * shape[1]), 1)
    # Of the two b's of drafts, the first is always meant: no channel is ahead of another one.
    states, changes, kept_b = (
        part.unflatten(1, sizes)
        for part, sizes in zip(parts, (shape, (rows, shape[1]), (2, kept, shape[0])), strict=True)
    )
    inputs, dt = x.float(), F.softplus(dt + channels.dt_bias)
    out = torch.zeros_like(inputs)

    def advance(state: Tensor, dt: Tensor, dt_x: Tensor, b: Tensor) -> Tensor:
        return state * (dt * channels.decay).exp() + b[:, None] * dt_x

    for span in state_spans(cache, batch):
        state, certain = x.new_zeros(shape, dtype=torch.float32), span.writes[-1][1]
        if span.read is not None:
            state = states[span.read]
            for i in range(span.accepted(changes[span.read], cache)):
                before, dt_x = changes[span.read, 2 + 2 * i : 4 + 2 * i]
                state = advance(state, before, dt_x, kept_b[span.read, 0, i])
        for count, row in enumerate(range(span.rows.start, span.rows.stop), 1):
            dt_x = dt[row] * inputs[row]
            state = advance(state, dt[row], dt_x, b[row])
            out[row] = (state * c[row, :, None]).sum(0)
            for block, end in span.writes:
                if count == end:
                    states[block] = state
                    if kept:
                        changes[block, 0], changes[block, 1] = span.position + count - 1, 0
                elif count > end == certain:
                    at = count - end - 1
                    changes[block, 2 + 2 * at], changes[block, 3 + 2 * at] = dt[row], dt_x
                    kept_b[block, 0, at] = b[row]
    return ((out + channels.skip * inputs) * F.silu(z.float())).to(x.dtype)


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
    shape = heads.heads, heads.state_size, heads.head_dim
    inner, keys = heads.heads * heads.head_dim, heads.groups * heads.state_size
    size = ssd_numbers(heads.heads, heads.head_dim, heads.state_size, cache.draft_tokens)
    numbers = cache.key.view(len(cache.key), -1)[:, offset : offset + size]
    x, b, c = xbc.float().split((inner, keys, keys), dim=1)
    x = x.reshape(-1, heads.heads, heads.head_dim)
    b, c = (
        part.reshape(-1, heads.groups, heads.state_size).repeat_interleave(heads.heads // heads.groups, 1)
        for part in (b, c)
    )
    dt = F.softplus(dt.float() * heads.dt_scale + heads.dt_bias).clamp(*heads.dt_limits)
    decay = (dt * heads.decay).exp()[:, :, None]
    out = torch.zeros_like(x)

    def change_of(state: Tensor, row: int) -> Tensor:
        return torch.cat((decay[row], b[row], dt[row, :, None] * x[row]), 1)

    def advance(state: Tensor, change: Tensor) -> Tensor:
        factor, key, value = change.split((1, heads.state_size, heads.head_dim), 1)
        return state * factor[:, :, None] + key[:, :, None] * value[:, None]

    for span in state_spans(cache, batch):
        for row, state in walk_heads(span, cache, numbers, shape, change_of, advance):
            out[row] = (state * c[row, :, :, None]).sum(1)
    result = ((out + heads.skip[:, None] * x) * heads.scale).reshape(len(x), -1)
    if z is not None:
        result = result * F.silu(z.float() * heads.gate_scale)
    return result.to(xbc.dtype if out_dtype is None else getattr(torch, out_dtype))


def silu_gate(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """See ``Kernels.silu_gate``."""
    return (x * F.silu(gate.float() * scale)).to(gate.dtype)
