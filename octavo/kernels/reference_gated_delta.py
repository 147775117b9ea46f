"""The gated delta rule in plain torch, token by token: the standard for faster backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import DeltaHeads, LayerCache
from octavo.kernels.reference_states import state_spans


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
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    shape = heads.value_heads, heads.key_dim, heads.value_dim
    states = cache.key.view(len(cache.key), -1)[:, offset : offset + shape[0] * shape[1] * shape[2]]
    x = qkv.float()
    q, k = (
        _unit(part.reshape(-1, heads.key_heads, heads.key_dim)).repeat_interleave(shape[0] // heads.key_heads, 1)
        for part in (x[:, :keys], x[:, keys : 2 * keys])
    )
    q = q / heads.key_dim**0.5
    v = x[:, 2 * keys : 2 * keys + values].reshape(-1, shape[0], heads.value_dim)
    decay = (heads.decay * F.softplus(a.float() + heads.dt_bias)).exp()[:, :, None, None]
    beta = b.float().sigmoid()[:, :, None]
    out = torch.zeros_like(v)
    for rows, read, writes in state_spans(cache, batch):
        state = x.new_zeros(shape) if read is None else states[read].view(shape)
        ends = {count: block for block, count in writes}
        for count, row in enumerate(range(rows.start, rows.stop), 1):
            state = state * decay[row]
            delta = (v[row] - (state * k[row, :, :, None]).sum(1)) * beta[row]
            state = state + k[row, :, :, None] * delta[:, None]
            out[row] = (state * q[row, :, :, None]).sum(1)
            if count in ends:
                states[ends[count]] = state.reshape(-1)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + heads.eps) * heads.norm
    return (normed.reshape(len(x), -1) * F.silu(z.float())).to(qkv.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See ``Kernels.sigmoid_gate``."""
    return x.copy_((x.float() * gate.float().sigmoid()).to(x.dtype))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
