"""Tiles of queries of sequences with several tokens: tokens times query heads of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(tokens: int, sequences: int, tile: int) -> int:
    """Tiles that suffice for these tokens, however they are distributed among the sequences; see ``find_tile``."""
    return tokens // tile + sequences


@triton.jit
def find_tile(query_start_ptr, tile, first, sequences, TOKENS: tl.constexpr):
    """Finds the sequence of tile number ``tile``: the tiles of sequences follow each other, each with a spare tile.

    Returns:
        The sequence, the tile's number in it, the sequence's first row, and its number of rows.
    """
    origin = tl.load(query_start_ptr + first)
    low = first
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + middle) - origin) // TOKENS + middle - first
        if start <= tile:
            low = middle
        else:
            high = middle
    row = tl.load(query_start_ptr + low)
    start = (row - origin) // TOKENS + low - first
    return low, tile - start, row, tl.load(query_start_ptr + low + 1) - row


@triton.jit
def position_of(positions_ptr, row, queries, length):
    """The position of the query in ``row``, the first of ``queries`` of its sequence; negative for a padding row."""
    return tl.minimum(tl.load(positions_ptr + row), length - queries).to(tl.int32)


@triton.jit
def last_seen(until_ptr, positions, flat, valid, length, FORM: tl.constexpr):
    """The last position that each row of ``load_queries`` attends to, int32 [rows]; ``until_ptr``: see ``Context``."""
    if not FORM.causal:
        return positions * 0 + length - 1
    elif FORM.spans:
        return tl.maximum(positions, tl.load(until_ptr + flat, mask=valid, other=-1))
    else:
        return positions


@triton.jit
def seen_end(last, valid, end, length, FORM: tl.constexpr):
    """Past the last position that a tile of rows attends to, of which ``end`` is past the last row's."""
    if not FORM.causal:
        return length
    elif FORM.spans:
        return tl.minimum(tl.maximum(end, tl.max(tl.where(valid, last, -1), 0) + 1), length)
    else:
        return end


@triton.jit
def load_queries(
    q_ptr,
    token_stride,
    head_stride,
    row,
    queries,
    local,
    first,
    kv_head,
    head_tile,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of a tile: ``TOKENS`` tokens with ``HEADS`` query heads of a KV head each.

    Args:
        q_ptr: [T, heads, head_dim]
        token_stride: elements between consecutive tokens; ``head_stride`` likewise.
        head_stride: see above.
        row: the sequence's first token in q; ``queries`` follow each other from there.
        queries: see above.
        local: number of the tile in the sequence.
        first: position of the sequence's first query.
        kv_head: the KV head.
        head_tile: number of the tile of ``HEADS`` heads among the KV head's ``FORM.group``.
        FORM: see ``attention_args``.
        HEADS: see above.
        TOKENS: see above.
        ROWS: ``TOKENS * HEADS`` rounded up to a power of two.

    Returns:
        q [ROWS, ``FORM.dim``] of type ``FORM.compute``, 0 in unused elements; and for each row its position in the
        context, its token in q (int64), its query head, and whether the row is used.
    """
    rows = tl.arange(0, ROWS)
    tokens = local * TOKENS + rows // HEADS
    group_heads = head_tile * HEADS + rows % HEADS
    valid = (tokens < queries) & (rows < TOKENS * HEADS) & (group_heads < FORM.group)
    flat = (row + tokens).to(tl.int64)
    heads = kv_head * FORM.group + group_heads
    dims = tl.arange(0, FORM.dim)
    at = flat[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dims[None, :] < FORM.head_dim), other=0.0).to(FORM.compute)
    return q, first + tokens, flat, heads, valid
