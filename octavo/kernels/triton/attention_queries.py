"""Tiles of queries of sequences with several tokens: tokens times query heads of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(tokens: int, sequences: int, tile: int) -> int:
    """Tiles that suffice for these tokens, however they are distributed among the sequences; see ``find_tile``."""
    return tokens // tile + sequences


@triton.jit
def find_tile(query_start_ptr, first, sequences, TOKENS: tl.constexpr):
    """Finds the sequence of the program's tile: the tiles of sequences follow each other, each with a spare tile.

    The last tiles, which have the longest contexts, are started first, so that programs end at about the same time.

    Returns:
        The sequence, the tile's number in it, the sequence's first row, and its number of rows.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
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
def load_queries(
    q_ptr,
    token_stride,
    head_stride,
    positions_ptr,
    until_ptr,
    slopes_ptr,
    local,
    row,
    queries,
    length,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of the program's tile: ``TOKENS`` tokens with ``HEADS`` query heads of a KV head each.

    Args:
        q_ptr: [T, heads, head_dim]
        token_stride: elements between consecutive tokens; ``head_stride`` likewise.
        head_stride: see above.
        positions_ptr: of all tokens.
        until_ptr: see ``Context``; ``slopes_ptr`` likewise.
        slopes_ptr: see above.
        local: number of the tile in the sequence.
        row: the sequence's first token in q; ``queries`` follow each other from there.
        queries: see above.
        length: of the sequence's context.
        FORM: see ``attention_args``.
        HEADS: see above.
        TOKENS: see above.
        ROWS: ``TOKENS * HEADS`` rounded up to a power of two.

    Returns:
        q [ROWS, ``FORM.dim``] of type ``FORM.compute``, 0 in unused elements; for each row its token in q (int64), its
        query head, whether the row is used, its position in the context, the last position that it attends to (int32)
        and its slope (0 without ALiBi); then the position of the tile's first token, and the position past the last
        that a row attends to.
    """
    rows = tl.arange(0, ROWS)
    tokens = local * TOKENS + rows // HEADS
    group_heads = tl.program_id(0) // FORM.kv_heads * HEADS + rows % HEADS
    valid = (tokens < queries) & (rows < TOKENS * HEADS) & (group_heads < FORM.group)
    flat = (row + tokens).to(tl.int64)
    heads = tl.program_id(0) % FORM.kv_heads * FORM.group + group_heads
    dims = tl.arange(0, FORM.dim)
    at = flat[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dims[None, :] < FORM.head_dim), other=0.0).to(FORM.compute)
    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if FORM.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=valid, other=0.0)

    first = position_of(positions_ptr, row, queries, length)
    oldest = first + local * TOKENS
    positions = first + tokens
    last = positions
    end = tl.minimum(oldest + TOKENS, first + queries)
    if not FORM.causal:
        last = positions * 0 + length - 1
        end = length
    elif FORM.spans:
        last = tl.maximum(positions, tl.load(until_ptr + flat, mask=valid, other=-1))
        end = tl.minimum(tl.maximum(end, tl.max(tl.where(valid, last, -1), 0) + 1), length)
    return q, flat, heads, valid, positions, last, slopes, oldest, end
