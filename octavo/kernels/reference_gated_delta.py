"""The gated delta rule in plain torch, token by token: the standard for faster backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import DeltaHeads, LayerCache, delta_numbers
from octavo.kernels.reference_states import state_spans, walk_heads


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
    factors = heads.key_dim if heads.per_channel else 1
    size = delta_numbers(*shape, cache.draft_tokens, per_channel=heads.per_channel)
    numbers = cache.key.view(len(cache.key), -1)[:, offset : offset + size]
    x = qkv.float()
    q, k = (
        _unit(part.reshape(-1, heads.key_heads, heads.key_dim)).repeat_interleave(shape[0] // heads.key_heads, 1)
        for part in (x[:, :keys], x[:, keys : 2 * keys])
    )
    q = q / heads.key_dim**0.5
    v = x[:, 2 * keys : 2 * keys + values].reshape(-1, shape[0], heads.value_dim)
    inputs = F.softplus(a.float() + heads.dt_bias).reshape(len(x), shape[0], -1)
    decay = (heads.decay[:, None] * inputs).exp()
    beta = heads.beta_scale * b.float().sigmoid()[:, :, None]
    out = torch.zeros_like(v)

    def change_of(state: Tensor, row: int) -> Tensor:
        delta = (v[row] - (state * decay[row, :, :, None] * k[row, :, :, None]).sum(1)) * beta[row]
        return torch.cat((decay[row], k[row], delta), 1)

    def advance(state: Tensor, change: Tensor) -> Tensor:
        factor, key, delta = change.split((factors, heads.key_dim, heads.value_dim), 1)
        return state * factor[:, :, None] + key[:, :, None] * delta[:, None]

    for span in state_spans(cache, batch):
        for row, state in walk_heads(span, cache, numbers, shape, change_of, advance):
            out[row] = (state * q[row, :, :, None]).sum(1)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + heads.eps) * heads.norm
    gate = F.silu if heads.gate == "silu" else torch.sigmoid
    return (normed.reshape(len(x), -1) * gate(z.float())).to(qkv.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See ``Kernels.sigmoid_gate``."""
    return x.copy_((x.float() * gate.float().sigmoid()).to(x.dtype))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
