"""Attention of a step over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec
from octavo.kernels.triton.attention_args import make_context
from octavo.kernels.triton.attention_decode import decode
from octavo.kernels.triton.attention_fixed import fixed_order
from octavo.kernels.triton.attention_prefill import prefill
from octavo.kernels.triton.cache import TritonLayerCache


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    spec: AttentionSpec,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Attention of each token over its sequence's cached context: causal, of spans or of all of it.

    Args:
        q: [T, H, D], tokens and heads strided.
        cache: keys and values, with those of this step.
        batch: the step; the output of an empty sequence (``seq_lens`` 0) is 0.
        spec: not causal without a window only; its scale is positive.
        deterministic: a row's bits are the same in any batch; see ``attention_fixed``.

    Returns:
        [T, H, D] of q's type, contiguous.
    """
    assert isinstance(cache, TritonLayerCache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = batch.seq_lens.shape[0]
    if not sequences:
        return out
    context = make_context(q, cache, batch, spec)
    if deterministic:
        fixed_order(q, out, batch, context)
        return out
    # A decode sees nothing after its token.
    decodes = batch.num_decodes if context.form.causal and not context.form.spans else 0
    if decodes:
        decode(q, out, batch, context)
    if decodes < sequences:
        prefill(q, out, batch, context, decodes)
    return out
