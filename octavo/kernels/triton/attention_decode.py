"""Attention of one token per sequence, with its context split among programs (flash decoding: Dao et al. 2023).

A decode is limited by memory bandwidth: enough loads must be in flight on every multiprocessor. The query heads of a KV
head are rows of one tile, so that nothing is read twice, and each sequence's context is split into enough parts to fill
the GPU. The number of parts depends on the shapes of the batch alone, which a captured graph fixes; their length on the
length of each sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.triton.attention_args import Context, Tiling, head_tiles, processors
from octavo.kernels.triton.attention_tile import NOTHING, attend, state_of_nothing, store_attended
from octavo.kernels.triton.rounding import rounded

#: Programs that run side by side on one multiprocessor, and how many times these are wanted over.
_RESIDENT = 3
_ROUNDS = 2
#: More parts than this take longer to combine than they save.
_MOST_PARTS = 64
_COMBINE_PARTS = 32


def decode(q: Tensor, out: Tensor, batch: ForwardBatch, context: Context) -> None:
    """Attention of the batch's decodes.

    Args:
        q: [T, H, D], all rows of the step; the first ``batch.num_decodes`` are used.
        out: [T, H, D], contiguous; those rows are written.
        batch: the step.
        context: of the layer.
    """
    sequences, form = batch.num_decodes, context.form
    tiling = _tiling(context).fitted(context, q.device)
    heads, columns = head_tiles(context, tiling.rows)
    parts = count_parts(sequences * columns, batch.max_seq_len, tiling.keys, q.device)
    total_heads = form.kv_heads * form.group
    partial = sums = None
    if parts > 1:
        partial = torch.empty(sequences, total_heads, parts, form.dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(sequences, total_heads, 2, parts, dtype=torch.float32, device=q.device)
    _decode_kernel[(parts, columns, sequences)](
        q,
        out,
        partial,
        sums,
        batch.positions,
        batch.seq_lens,
        batch.block_tables[context.kv_group],
        context.cache,
        context.slopes,
        *q.stride()[:2],
        batch.block_tables.stride(1),
        context.scale,
        FORM=form,
        HEADS=heads,
        ROWS=tiling.rows,
        TILE=tiling.keys,
        SPLIT=parts > 1,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        _combine_kernel[(sequences * total_heads,)](
            partial,
            sums,
            out,
            parts,
            HEAD_DIM=form.head_dim,
            DIM=form.dim,
            CHUNK=_COMBINE_PARTS,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _tiling(context: Context) -> Tiling:
    """A tiling that fits three programs on a multiprocessor, each with one or two tiles in flight."""
    form = context.form
    rows = min(64, max(16, triton.next_power_of_2(form.group)))
    if form.wide:
        return Tiling(rows, 32, 4, 1)
    # Conversion of bytes is limited by instructions, not bandwidth: larger tiles have less overhead.
    keys = 128 if form.quantized else 64
    return Tiling(rows, keys if form.dim <= 128 else keys // 2, 4, 3)


def count_parts(programs: int, max_seq_len: int, tile: int, device: torch.device) -> int:
    """Parts of each context, for the given number of programs without a split; none is shorter than a tile."""
    wanted = -(-_RESIDENT * _ROUNDS * processors(device) // programs)
    return max(1, min(wanted, _MOST_PARTS, -(-max_seq_len // tile)))


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    positions_ptr,
    seq_lens_ptr,
    tables_ptr,
    cache,
    slopes_ptr,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    FORM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (i, h, s): part i of sequence s's context, for ``HEADS`` query heads of one KV head."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    kv_head = tl.program_id(1) % FORM.kv_heads
    sequence = tl.program_id(2).to(tl.int64)
    # Keys up to the query, which need not be the last token of the context; a padding row has none.
    length = tl.minimum(tl.load(seq_lens_ptr + sequence), tl.load(positions_ptr + sequence) + 1).to(tl.int32)
    rows = tl.arange(0, ROWS)
    group_heads = tl.program_id(1) // FORM.kv_heads * HEADS + rows
    heads = kv_head * FORM.group + group_heads
    in_group = (rows < HEADS) & (group_heads < FORM.group)
    dims = tl.arange(0, FORM.dim)
    inside = in_group[:, None] & (dims[None, :] < FORM.head_dim)
    q_at = sequence * q_token_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0).to(FORM.compute)

    slopes = tl.full([ROWS], 0.0, dtype=tl.float32)
    if FORM.alibi:
        slopes = tl.load(slopes_ptr + heads, mask=in_group, other=0.0)

    first = 0
    if FORM.window > 0:
        first = tl.maximum(length - FORM.window, 0) // TILE
    share = ((length + TILE - 1) // TILE - first + parts - 1) // parts
    begin = (first + part * share) * TILE
    end = tl.minimum(begin + share * TILE, length)

    table_ptr = tables_ptr + sequence * table_stride
    positions = length - 1 + rows * 0
    acc, l, m = state_of_nothing(ROWS, FORM)  # noqa: E741
    acc, l, m = attend(  # noqa: E741
        acc, l, m, q, positions, positions, begin, end, length, kv_head, table_ptr, cache, scale, slopes,
            FORM, True, TILE,
    )  # fmt: skip
    row = sequence * (FORM.kv_heads * FORM.group) + heads
    if SPLIT:
        at = (row[:, None] * parts + part) * FORM.dim + dims[None, :]
        tl.store(partial_ptr + at, acc, mask=(in_group & (l != 0.0))[:, None])
        tl.store(sums_ptr + row * 2 * parts + part, m, mask=in_group)
        tl.store(sums_ptr + (row * 2 + 1) * parts + part, l, mask=in_group)
    else:
        store_attended(out_ptr, acc, l, row, in_group, FORM)


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    partial_ptr, sums_ptr, out_ptr, parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr
):
    """Program r: row r of the flattened [sequences, heads], its parts ``CHUNK`` at a time."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)
    acc = tl.full([DIM], 0.0, dtype=tl.float32)
    total = 0.0
    greatest = NOTHING
    for start in range(0, parts, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        m = tl.load(sums_ptr + row * 2 * parts + chunk, mask=chunk < parts, other=NOTHING)
        l = tl.load(sums_ptr + (row * 2 + 1) * parts + chunk, mask=chunk < parts, other=0.0)  # noqa: E741
        at = (row * parts + chunk)[:, None] * DIM + dims[None, :]
        values = tl.load(partial_ptr + at, mask=(chunk < parts)[:, None], other=0.0)
        values = tl.where((l != 0.0)[:, None], values, 0.0)  # a part without keys has not written its values
        new_greatest = tl.maximum(greatest, tl.max(m, 0))
        weights = tl.exp2(m - new_greatest)
        kept = tl.exp2(greatest - new_greatest)
        acc = acc * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(l * weights, 0)
        greatest = new_greatest
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, rounded(acc, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
