"""Attention of several tokens per sequence: tiles of queries over the paged context (Dao 2023, FlashAttention-2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.triton.attention_args import Context, Tiling, head_tiles
from octavo.kernels.triton.attention_queries import count_tiles, find_tile, load_queries
from octavo.kernels.triton.attention_tile import attend, state_of_nothing, store_attended


def prefill(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context, first: int) -> None:
    """Attention of the batch's sequences from number ``first`` on, which follow its decodes.

    Args:
        q: [T, H, D], all rows of the step.
        out: [T, H, D], contiguous; the rows of those sequences are written.
        batch: the step.
        context: of the layer.
        first: sequences before it have one token each.
    """
    sequences, form = batch.seq_lens.shape[0], context.form
    tiling = _tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    tokens = tiling.rows // heads
    tiles = count_tiles(q.shape[0] - first, sequences - first, tokens)
    _prefill_kernel[(columns, tiles)](
        q,
        out,
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
        first,
        sequences,
        FORM=form,
        HEADS=heads,
        TOKENS=tokens,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )


def _tiling(context: Context) -> Tiling:
    """The tiling with the highest utilisation of Hopper's matrix units that does not spill registers."""
    form = context.form
    if form.wide:
        return Tiling(32, 32, 8, 1)
    if form.dim > 128:
        return Tiling(128, 32, 8, 2)
    if form.quantized or form.alibi:
        return Tiling(128, 64, 8, 3)
    return Tiling(128, 128, 8, 3 if form.dim <= 64 else 2)


@triton.jit(do_not_specialize=["table_stride", "first", "sequences"])
def _prefill_kernel(
    q_ptr,
    out_ptr,
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
    first,
    sequences,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (h, t): ``TOKENS`` tokens of a sequence, for ``HEADS`` query heads of one KV head."""
    sequence, local, row, queries = find_tile(query_start_ptr, first, sequences, TOKENS)
    if local * TOKENS >= queries:
        return
    length = tl.load(seq_lens_ptr + sequence)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % FORM.kv_heads
    q, flat, heads, valid, positions, last, slopes, oldest, end = load_queries(
        q_ptr, q_token_stride, q_head_stride, positions_ptr, until_ptr, slopes_ptr, local, row, queries, length,
        FORM, HEADS, TOKENS, ROWS,
    )  # fmt: skip
    acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
    if FORM.window > 0:
        masked_from = tl.maximum(oldest - FORM.window + 1, 0) // TILE * TILE
    else:
        # Keys that all rows attend to; the remaining ones, on the diagonal or of a span, are masked.
        masked_from = (oldest + 1 if FORM.causal else length) // TILE * TILE
        acc, l, m = attend(  # noqa: E741
            acc, l, m, q, positions, last, 0, masked_from, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, False, TILE,
        )  # fmt: skip
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, last, masked_from, end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
    )  # fmt: skip
    store_attended(out_ptr, acc, l, flat * (FORM.kv_heads * FORM.group) + heads, valid, FORM)
