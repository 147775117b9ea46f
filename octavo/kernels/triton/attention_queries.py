"""Which queries a program attends for, where a sequence has several: a tile of tokens times heads of one KV head."""

from __future__ import annotations

import triton
import triton.language as tl


def count_tiles(tokens: int, sequences: int, tile: int) -> int:
    """Tiles that hold so many tokens, however they are shared between so many sequences; see ``find_tile``."""
    return tokens // tile + sequences


@triton.jit
def find_tile(query_start_ptr, tile, first, sequences, TOKENS: tl.constexpr):
    """Where the tile of flat number ``tile`` lies: sequences follow each other, each with a tile to spare.

    Returns:
        The sequence, the tile's number in it, the sequence's first row, and how many it has.
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
    """The position of the query in ``row``, the first of ``queries`` of its sequence; below 0 of a padding row."""
    return tl.minimum(tl.load(positions_ptr + row), length - queries).to(tl.int32)


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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of a tile: ``TOKENS`` tokens, of each ``HEADS`` query heads of a KV head.

    Args:
        q_ptr: [T, heads, HEAD_DIM]
        token_stride: elements from a token to the next; ``head_stride`` likewise.
        head_stride: see above.
        row: the sequence's first token in q; ``queries`` follow each other from there.
        queries: see above.
        local: which tile of the sequence.
        first: position of the sequence's first query.
        kv_head: whose query heads.
        head_tile: which ``HEADS`` of its ``GROUP``.
        GROUP: query heads of a KV head.
        HEAD_DIM: head size.
        DIM: a power of two that holds ``HEAD_DIM``.
        COMPUTE: type that is computed in.
        HEADS: see above.
        TOKENS: see above.
        ROWS: a power of two that holds ``TOKENS`` times ``HEADS``.

    Returns:
        q [ROWS, DIM] of type ``COMPUTE``, 0 where there is nothing; and for each row its position in the context, its
        token in q (int64), its query head, and whether there is such a row.
    """
    rows = tl.arange(0, ROWS)
    tokens = local * TOKENS + rows // HEADS
    group_heads = head_tile * HEADS + rows % HEADS
    valid = (tokens < queries) & (rows < TOKENS * HEADS) & (group_heads < GROUP)
    flat = (row + tokens).to(tl.int64)
    heads = kv_head * GROUP + group_heads
    dims = tl.arange(0, DIM)
    at = flat[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None] & (dims[None, :] < HEAD_DIM), other=0.0).to(COMPUTE)
    return q, first + tokens, flat, heads, valid
