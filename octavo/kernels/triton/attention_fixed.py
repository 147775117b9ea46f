"""Batch-invariant attention: a row's bits are the same in any batch, as a decode or within a prefill.

The context is cut into pieces at fixed positions. Each piece is computed from a zero state, tile by tile, with tiles of
one shape in all steps, and pieces are merged in order of position. So a row's arithmetic does not depend on other rows:
the other rows of its tile do not affect its part of a matrix product, and tiles or pieces of keys that are masked for
the row leave its state unchanged (weights of exactly 0, factors of exactly 1). For small batches, pieces are computed
by different programs and merged in a second launch by the same formula. Fused multiply-add is off, as the compiler
would choose it by context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.triton.attention_args import Context, Tiling, head_tiles
from octavo.kernels.triton.attention_decode import count_parts
from octavo.kernels.triton.attention_queries import count_tiles, find_tile, load_queries, position_of
from octavo.kernels.triton.attention_tile import NOTHING, attend, merge, state_of_nothing, store_attended

#: Tokens of a piece.
PIECE = 512
#: Largest memory for the states of pieces, in bytes; above it they are not split among programs.
_MAX_BYTES = 64 << 20


def fixed_order(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context) -> None:
    """Attention of all sequences of the batch: q [T, H, D] to out [T, H, D], contiguous."""
    sequences, form = batch.seq_lens.shape[0], context.form
    tiling = _tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0], sequences, tokens)
    flat_rows, pieces = q.shape[0] * q.shape[1], -(-batch.max_seq_len // PIECE)
    parts = count_parts(tiles * columns, batch.max_seq_len, PIECE, q.device)
    if flat_rows * pieces * form.dim * 4 > _MAX_BYTES:
        parts = 1
    partial = sums = None
    if parts > 1:
        partial = torch.empty(flat_rows, pieces, form.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(flat_rows, pieces, 2, dtype=torch.float32, device=q.device)
    _pieces_kernel[(columns, tiles, parts)](
        q,
        out,
        partial,
        sums,
        batch.query_start_loc,
        batch.positions,
        batch.seq_lens,
        batch.block_tables[context.kv_group],
        context.cache,
        context.slopes,
        context.until,
        *q.stride()[:2],
        batch.block_tables.stride(1),
        context.scale,
        sequences,
        pieces,
        FORM=form,
        PIECE_TOKENS=PIECE,
        HEADS=heads,
        TOKENS=tokens,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        SPLIT=parts > 1,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=False,
    )
    if parts > 1:
        _merge_kernel[(q.shape[0], form.kv_heads)](
            partial,
            sums,
            out,
            batch.query_start_loc,
            batch.positions,
            batch.seq_lens,
            context.until,
            sequences,
            pieces,
            FORM=form,
            PIECE_TOKENS=PIECE,
            ROWS=triton.next_power_of_2(form.group),
            num_warps=4,
            enable_fp_fusion=False,
        )


def _tiling(context: Context) -> Tiling:
    """The tiling, which does not depend on the batch, as it determines the order of sums."""
    form = context.form
    if form.wide:
        return Tiling(32, 32, 8, 1)
    return Tiling(64, 32, 8, 2) if form.dim > 128 else Tiling(64, 64, 4, 3)


@triton.jit(do_not_specialize=["table_stride", "sequences", "pieces"])
def _pieces_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    query_start_ptr,
    positions_ptr,
    seq_lens_ptr,
    tables_ptr,
    cache,
    slopes_ptr,
    until_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    sequences,
    pieces,
    FORM: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (h, t, i): ``TOKENS`` tokens of a sequence, ``HEADS`` heads of one KV head, part i of the pieces."""
    sequence, local, row, queries = find_tile(query_start_ptr, 0, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % FORM.kv_heads
    q, flat, heads, valid, positions, last_key, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        FORM, HEADS, TOKENS, ROWS,
    )  # fmt: skip

    begin = 0
    if FORM.window > 0:
        begin = tl.maximum(oldest - FORM.window + 1, 0) // TILE * TILE
    first = begin // PIECE_TOKENS
    # An empty sequence has one piece, without keys.
    count = tl.maximum((end + PIECE_TOKENS - 1) // PIECE_TOKENS - first, 1)
    share = (count + tl.num_programs(2) - 1) // tl.num_programs(2)
    first += tl.program_id(2) * share
    last = tl.minimum(first + share, begin // PIECE_TOKENS + count)

    dims = tl.arange(0, FORM.dim)
    flat_row = flat * (FORM.kv_heads * FORM.group) + heads
    total_acc, total_l, total_m = state_of_nothing(ROWS, FORM)
    for piece in range(first, last):
        acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
        piece_begin = tl.maximum(piece * PIECE_TOKENS, begin)
        piece_end = tl.minimum((piece + 1) * PIECE_TOKENS, end)
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last_key, piece_begin, piece_end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
        )  # fmt: skip
        if SPLIT:
            at = flat_row * pieces + piece
            tl.store(partial_ptr + at[:, None] * FORM.dim + dims[None, :], acc, mask=valid[:, None])
            tl.store(sums_ptr + 2 * at, l, mask=valid)
            tl.store(sums_ptr + 2 * at + 1, m, mask=valid)
        else:
            total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    if not SPLIT:
        store_attended(out_ptr, total_acc, total_l, flat_row, valid, FORM)


@triton.jit(do_not_specialize=["sequences", "pieces"])
def _merge_kernel(
    partial_ptr,
    sums_ptr,
    out_ptr,
    query_start_ptr,
    positions_ptr,
    seq_lens_ptr,
    until_ptr,
    sequences,
    pieces,
    FORM: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (t, k): merges the pieces that token t attends to, in order, for the query heads of KV head k."""
    token = tl.program_id(0)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    left = tl.load(query_start_ptr + low + 1) - token
    length = tl.load(seq_lens_ptr + low)
    position = position_of(positions_ptr, token, left, length)
    last_key = position
    if FORM.spans:
        last_key = tl.maximum(position, tl.load(until_ptr + token))
    if not FORM.causal:
        last_key = length - 1
    rows = tl.arange(0, ROWS)
    valid = rows < FORM.group
    dims = tl.arange(0, FORM.dim)
    flat_row = token.to(tl.int64) * (FORM.kv_heads * FORM.group) + tl.program_id(1) * FORM.group + rows
    first = 0
    if FORM.window > 0:
        first = tl.maximum(position - FORM.window + 1, 0) // PIECE_TOKENS
    last = tl.maximum(last_key // PIECE_TOKENS, 0) + 1
    total_acc, total_l, total_m = state_of_nothing(ROWS, FORM)
    for piece in range(first, last):
        at = flat_row * pieces + piece
        acc = tl.load(partial_ptr + at[:, None] * FORM.dim + dims[None, :], mask=valid[:, None], other=0.0)
        l = tl.load(sums_ptr + 2 * at, mask=valid, other=0.0)  # noqa: E741
        m = tl.load(sums_ptr + 2 * at + 1, mask=valid, other=NOTHING)
        total_acc, total_l, total_m = merge(total_acc, total_l, total_m, acc, l, m)
    store_attended(out_ptr, total_acc, total_l, flat_row, valid, FORM)
