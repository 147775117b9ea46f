"""Logprobs of tokens on the device: log-softmax, rank, and the most likely tokens.

As in ``sampling``, many programs survey a row, and one program goes on from what they leave of its columns. The k best
tokens are in the k columns with the best tokens, ties settled in both by order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ranking import (
    COLUMN,
    LAST_KEY,
    SURVEYED,
    behind,
    column_distances,
    digit_bits,
    greatest,
    list_columns,
    listed_tokens,
    reach_of_columns,
    top_of,
    weights,
)

#: Largest number of most likely tokens that ``token_logprobs`` returns.
MOST_NAMED = 128


#: Read and written element by element: their alignment is irrelevant and must not cause another compilation.
_SMALL = ["rows_ptr", "tokens_ptr", "logprobs_ptr", "ranks_ptr", "ids_ptr", "named_ptr"]


def token_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Log-softmax of one token for each of some rows, its rank, and the k most likely tokens.

    Args:
        logits: [rows, vocab] float32, contiguous in the last dimension.
        rows: [n] int64, rows of ``logits``.
        tokens: [n] int64; the result for one outside the vocabulary is undefined.
        k: at most vocab and ``MOST_NAMED``.

    Returns:
        One tensor, to be copied to the host at once; ``unpack`` separates its parts.

    Raises:
        ValueError: k is too large.
    """
    n, vocab = len(tokens), logits.shape[1]
    if k > min(MOST_NAMED, vocab):
        raise ValueError(f"k must be at most {MOST_NAMED} and the size of the vocabulary, {vocab}, not {k}")
    found = torch.empty(n * (2 + 2 * k), dtype=torch.int64, device=logits.device)
    if not n:
        return found
    columns = triton.cdiv(vocab, COLUMN.value)
    pieces = triton.cdiv(columns, SURVEYED.value)
    best = torch.empty(n, columns, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(best)
    greater = torch.empty(n, pieces, dtype=torch.int32, device=logits.device)
    listed = torch.empty(n, max(k, 1), dtype=torch.int32, device=logits.device)
    survey_kernel[(pieces, n)](
        logits, logits.stride(0), vocab, rows, tokens, best, mass, greater, columns, pieces, num_warps=4
    )
    logprobs_kernel[(n,)](
        logits,
        logits.stride(0),
        vocab,
        rows,
        tokens,
        best,
        mass,
        greater,
        listed,
        *unpack(found, n),
        columns,
        pieces,
        k,
        COLUMNS=triton.next_power_of_2(columns),
        PIECES=triton.next_power_of_2(pieces),
        TILE=triton.next_power_of_2(max(k, 1)) * COLUMN.value,
        DIGIT=digit_bits(columns),
        num_warps=16,
    )
    return found


def unpack(found: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of a result of ``token_logprobs`` for n tokens.

    Returns:
        Logprobs float64 [n]; ranks int64 [n], 1 + the number of greater logits; ids int64 [n, k] and logprobs float64
        [n, k] of the most likely tokens in order of rank. If a row's greatest logit is not finite, or there is a NaN,
        the logprob is NaN and the rest is undefined.
    """
    logprobs, ranks, top = found.split([n, n, len(found) - 2 * n])
    ids, named = top.view(2, n, -1) if n else top.view(2, 0, 0)
    return logprobs.view(torch.float64), ranks, ids, named.view(torch.float64)


@triton.jit
def _chosen_logit(row_ptr, vocab, token_ptr):
    """The logit of the requested token; infinite outside the vocabulary."""
    token = tl.load(token_ptr)
    return tl.load(row_ptr + token, (token >= 0) & (token < vocab), other=float("inf"))


@triton.jit(do_not_specialize_on_alignment=_SMALL[:2])
def survey_kernel(
    logits_ptr, row_stride, vocab, rows_ptr, tokens_ptr, best_ptr, mass_ptr, greater_ptr, columns, pieces
):
    """For each of SURVEYED columns of a row: the greatest logit, or NaN, and the sum of probabilities over the best's.

    And for all of them: the number of logits greater than that of the row's token.
    """
    index = tl.program_id(1).to(tl.int64)
    row_ptr = logits_ptr + tl.load(rows_ptr + index) * row_stride
    column = tl.program_id(0) * SURVEYED + tl.arange(0, SURVEYED)
    token = column[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
    logits = tl.load(row_ptr + token, token < vocab, other=float("-inf"))
    best = greatest(logits)
    place = index * columns + column
    tl.store(best_ptr + place, best, column < columns)
    tl.store(mass_ptr + place, tl.sum(weights(behind(best, logits), 1.0), axis=1), column < columns)
    above = (logits > _chosen_logit(row_ptr, vocab, tokens_ptr + index)).to(tl.int32)
    tl.store(greater_ptr + index * pieces + tl.program_id(0), tl.sum(tl.sum(above, axis=1), axis=0))


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=_SMALL)
def logprobs_kernel(
    logits_ptr,
    row_stride,
    vocab,
    rows_ptr,
    tokens_ptr,
    best_ptr,
    mass_ptr,
    greater_ptr,
    list_ptr,
    logprobs_ptr,
    ranks_ptr,
    ids_ptr,
    named_ptr,
    columns,
    pieces,
    k,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """Logprob and rank of one token of a row, and the most likely tokens, from the row's columns."""
    index = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(rows_ptr + index) * row_stride
    column = tl.arange(0, COLUMNS)
    best = tl.load(best_ptr + index * columns + column, column < columns, other=float("-inf"))
    top, _column = top_of(best)
    if (top != top) | (tl.abs(top) == float("inf")):
        tl.store(logprobs_ptr + index, float("nan"))
    else:
        distance, bits = column_distances(best, top, column, columns)
        mass = tl.load(mass_ptr + index * columns + column, column < columns, other=0.0) * weights(distance, 1.0)
        log_sum = tl.log(tl.sum(mass.to(tl.float64), axis=0))
        chosen = _chosen_logit(row_ptr, vocab, tokens_ptr + index)
        tl.store(logprobs_ptr + index, -(top - chosen).to(tl.float64) - log_sum)
        piece = tl.arange(0, PIECES)
        greater = tl.load(greater_ptr + index * pieces + piece, piece < pieces, other=0)
        tl.store(ranks_ptr + index, 1 + tl.sum(greater, axis=0).to(tl.int64))
        if k > 0:
            list_ptr += index * k
            one, none = tl.full((COLUMNS,), 1.0, tl.float32), tl.zeros((COLUMNS,), tl.float32)
            reach = reach_of_columns(bits, one, none, k, 1.0, DIGIT)
            count = list_columns(list_ptr, column, columns, bits, reach, k)
            _token, _distance, keys = listed_tokens((row_ptr, vocab, top, list_ptr, count), 0, TILE)
            for i in range(k):
                first = tl.min(keys, axis=0)
                away = (first >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                tl.store(ids_ptr + index * k + i, first & 0xFFFFFFFF)
                tl.store(named_ptr + index * k + i, -away.to(tl.float64) - log_sum)
                keys = tl.where(keys == first, LAST_KEY, keys)
