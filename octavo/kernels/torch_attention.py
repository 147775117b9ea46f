"""Attention over paged keys and values in plain torch.

It computes in float32 for all input types. Cache entries past a sequence's end are excluded by zeroing their values as
well as masking their scores: a stale NaN in a reused block must not affect a sequence (0 * NaN is NaN).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cache import LayerCache
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import AttentionSpec

#: Most float32 elements that one gathered key or score tensor may hold (64 MiB).
_MAX_ELEMENTS = 1 << 24


def plain_attention(q: Tensor, cache: LayerCache, batch: ForwardBatch, spec: AttentionSpec) -> Tensor:
    """``Kernels.paged_attention``: all decodes in one computation, then each prefill in slices of its queries."""
    decodes, sequences = batch.num_decodes, batch.seq_lens.shape[0]
    tables, seq_lens, longest = batch.block_tables[cache.group], batch.seq_lens, batch.max_seq_len
    if spec.cross:
        tables, seq_lens, longest = batch.cross_tables, batch.cross_lens, int(batch.cross_lens.max())
    later = None
    if spec.sees_spans and batch.has_spans:
        later, decodes = (batch.sees_until - batch.positions).clamp(min=0), 0
    if decodes == sequences:
        return _decode(q, cache, tables, batch.positions, seq_lens, longest, spec)
    starts, lens = batch.query_start_loc.tolist(), seq_lens.tolist()
    parts = []
    if decodes:
        device_lens, positions = seq_lens[:decodes], batch.positions[:decodes]
        parts.append(_decode(q[:decodes], cache, tables[:decodes], positions, device_lens, max(lens[:decodes]), spec))
    for s in range(decodes, sequences):
        rows = slice(starts[s], starts[s + 1])
        seen = None if later is None else later[rows]
        parts.append(_prefill(q[rows], cache, tables[s], batch.positions[rows], lens[s], spec, seen))
    return torch.cat(parts)


def _decode(
    q: Tensor, cache: LayerCache, tables: Tensor, positions: Tensor, lens: Tensor, max_len: int, spec: AttentionSpec
) -> Tensor:
    """One query per sequence: q [S, H, D], tables [S, max_blocks], positions and lens [S] to [S, H, D].

    Computed in slices of the batch, of at most ``_MAX_ELEMENTS`` gathered elements.
    """
    block_size, kv_heads, head_dim = cache.key.shape[1:]
    num_blocks = -(-max_len // block_size)
    if spec.before is not None and spec.after is not None:
        # The window's tokens lie in at most this many blocks.
        num_blocks = min(num_blocks, -(-(spec.before + 1 + spec.after) // block_size) + 1)
    at_once = max(1, _MAX_ELEMENTS // max(1, num_blocks * block_size * kv_heads * head_dim))
    pieces = zip(*(x.split(at_once) for x in (q, tables, positions, lens)), strict=True)
    outs = [_decode_slice(rows, cache, table, at, ends, num_blocks, spec) for rows, table, at, ends in pieces]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode_slice(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    positions: Tensor,
    lens: Tensor,
    num_blocks: int,
    spec: AttentionSpec,
) -> Tensor:
    sequences, heads, head_dim = q.shape
    block_size, kv_heads = cache.key.shape[1:3]
    offsets = torch.arange(num_blocks * block_size, device=q.device)
    if spec.before is None:
        tables, columns = tables[:, :num_blocks], offsets
    else:
        first_block = (positions.unsqueeze(1) - spec.before).clamp_(min=0) // block_size
        tables = tables.gather(1, (first_block + offsets[:num_blocks]).clamp_(max=tables.shape[1] - 1).long())
        columns = first_block * block_size + offsets
    beyond = columns >= lens.unsqueeze(1)
    shape = (sequences, num_blocks * block_size, kv_heads, head_dim)
    blocks = tables.reshape(-1)
    key = _as_heads(cache.key.index_select(0, blocks).view(shape))
    value = _as_heads(cache.value.index_select(0, blocks).view(shape)[..., : spec.value_dim])
    value.masked_fill_(beyond[:, None, :, None], 0.0)
    query = q.reshape(sequences, kv_heads, heads // kv_heads, head_dim).float() * spec.scale
    scores = torch.matmul(query, key.transpose(2, 3)).unsqueeze(3)
    distance = columns - positions.unsqueeze(1)
    weights = _weights(scores, distance[:, None, None, None], beyond[:, None, None, None], spec, spec.after).squeeze(3)
    return torch.matmul(weights, value).view(sequences, heads, value.shape[-1]).to(q.dtype)


def _prefill(
    q: Tensor,
    cache: LayerCache,
    table: Tensor,
    positions: Tensor,
    seq_len: int,
    spec: AttentionSpec,
    later: Tensor | None = None,
) -> Tensor:
    """Consecutive tokens of one sequence: q [L, H, D], table [max_blocks], positions [L] to [L, H, D].

    ``later`` [L]: how many tokens after itself each sees, if that differs.
    """
    length, heads, head_dim = q.shape
    if not length:
        return q.clone()
    block_size, kv_heads = cache.key.shape[1:3]
    first_query, before = int(positions[0]), spec.before
    after = spec.after if later is None else int(later.max())
    origin = 0 if before is None else max(0, first_query - before) // block_size * block_size
    last = seq_len if after is None else min(seq_len, first_query + length + after)
    blocks = table[origin // block_size : -(-last // block_size)]
    shape = (1, blocks.shape[0] * block_size, kv_heads, head_dim)
    # [K, context, D], from position `origin` to the last one that a query attends to.
    key = _as_heads(cache.key.index_select(0, blocks).view(shape)[:, : last - origin])[0]
    value = _as_heads(cache.value.index_select(0, blocks).view(shape)[:, : last - origin, :, : spec.value_dim])[0]
    query = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, length, head_dim).float() * spec.scale
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    step = max(1, _MAX_ELEMENTS // (heads * (last - origin)))
    for start in range(0, length, step):
        end = min(start + step, length)
        oldest = origin if before is None else max(origin, first_query + start - before)
        newest = seq_len if after is None else min(seq_len, first_query + end + after)
        seen = slice(oldest - origin, newest - origin)
        columns = torch.arange(oldest, newest, device=q.device)
        distance = columns - positions[start:end].unsqueeze(1)
        # The query heads of a KV head are rows of one product, so keys are not repeated.
        rows_of_head = query[:, :, start:end].reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows_of_head, key[:, seen].transpose(1, 2))
        beyond = columns >= seq_len
        if later is not None:
            beyond = beyond | (distance > later[start:end].unsqueeze(1))
        last_seen = spec.after if later is None else None
        weights = _weights(scores.view(kv_heads, -1, *distance.shape), distance, beyond, spec, last_seen)
        attended = torch.matmul(weights.view_as(scores), value[:, seen])
        out[:, :, start:end] = attended.view(kv_heads, -1, end - start, value.shape[-1])
    return out.view(heads, length, value.shape[-1]).transpose(0, 1).to(q.dtype, memory_format=torch.contiguous_format)


def _weights(scores: Tensor, distance: Tensor, beyond: Tensor, spec: AttentionSpec, after: int | None) -> Tensor:
    """The masked softmax of scores [.., K, G, queries, keys], which are overwritten.

    ``distance`` (position of the key - position of the query) and ``beyond`` (whether the key is past the context) are
    broadcast against the scores; keys more than ``after`` past the query are masked, too.
    """
    if spec.soft_cap:
        scores = scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, device=scores.device).view(scores.shape[-4:-2])
        scores = scores.add_(slopes[..., None, None] * distance)
    if spec.bias is not None:
        table = torch.from_numpy(spec.bias.values).to(scores.device).view(*scores.shape[-4:-2], 1, -1)
        index = (distance + spec.bias.reach).clamp(0, 2 * spec.bias.reach).expand(scores.shape)
        scores = scores.add_(table.expand(*scores.shape[:-1], -1).gather(-1, index))
    if after is not None:
        beyond = beyond | (distance > after)
    if spec.before is not None:
        beyond = beyond | (distance < -spec.before)
    return scores.masked_fill_(beyond, float("-inf")).softmax(-1)


def _as_heads(x: Tensor) -> Tensor:
    """[S, L, K, D] to a new, contiguous float32 [S, K, L, D]."""
    out = torch.empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=torch.float32, device=x.device)
    return out.copy_(x.transpose(1, 2))
