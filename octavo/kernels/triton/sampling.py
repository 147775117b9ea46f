"""Sampling from rows of logits: greedy, or by the scores of ``octavo/kernels/numpy_sampling.py``.

There are two launches. The survey reads the logits, with many programs per row, and writes the greatest logit of each
column (see ``ranking``) and, for a row without filters, a lower bound on the scores of the column. Then one program per
row chooses. With filters it first finds the last token that passes, among the columns that can include it. Then it
computes exact scores, in float64, in the columns with bounds low enough to win: usually one or two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.ranking import (
    COLUMN,
    LARGEST_TILE,
    LAST_KEY,
    SURVEYED,
    behind,
    column_distances,
    digit_bits,
    end_of_prefix,
    greatest,
    key_of,
    list_columns,
    listed_tokens,
    reach_of_columns,
    top_of,
    weights,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
#: Margin of the float32 bounds (in powers of two): far above their rounding errors, small enough to keep few tokens.
_MARGIN = tl.constexpr(0.01)
#: Relative margin for the rounding of float32 masses.
_ROOM = tl.constexpr(1e-5)


#: Read element by element: their alignment is irrelevant and must not cause another compilation.
_SMALL = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "keys_ptr"]


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """A token for each row, which does not depend on other rows.

    Args:
        logits: [n, vocab] float32, contiguous in the last dimension.
        temperature: [n] float64; 0 takes the most likely token, the lowest id among equals.
        top_k: [n] int64, from 1.
        top_p: [n] float64, above 0.
        min_p: [n] float64. A disabled filter has the value that keeps all tokens.
        keys: [n, 2] int32 or int64, contiguous: hash keys of the rows in the low 32 bits.
        mask: [n, columns] int32, contiguous, a word for each column: the logits of tokens with a clear bit become -inf
            in place.

    Returns:
        [n] int64 token ids; -1 where there is a NaN, -2 where the greatest logit is infinite, -3 where all are masked.
    """
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return chosen
    columns = triton.cdiv(vocab, COLUMN.value)
    best = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    second = torch.empty_like(best)
    listed = torch.empty(rows, columns, dtype=torch.int32, device=logits.device)
    filters = (temperature, top_k, top_p, min_p, keys)
    survey_kernel[(triton.cdiv(columns, SURVEYED.value), rows)](
        logits,
        logits.stride(0),
        vocab,
        *filters,
        best if mask is None else mask,
        best,
        second,
        columns,
        MASKED=mask is not None,
        num_warps=4,
    )
    choose_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        *filters,
        best,
        second,
        listed,
        chosen,
        columns,
        COLUMNS=triton.next_power_of_2(columns),
        DIGIT=digit_bits(columns),
        TILE=min(LARGEST_TILE, triton.next_power_of_2(columns) * COLUMN.value),
        num_warps=16,
    )
    return chosen


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def survey_kernel(
    logits_ptr,
    row_stride,
    vocab,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    mask_ptr,
    best_ptr,
    second_ptr,
    columns,
    MASKED: tl.constexpr,
):
    """For each of SURVEYED columns of a row: the greatest logit, or NaN, and a second value for ``choose_kernel``.

    That is, for rows without filters, the bound on the scores relative to the column's best token, and for rows with
    top-p alone the sum of the tempered probabilities divided by the best one's.

    If MASKED, -inf is written to the tokens that are not allowed, so that ``choose_kernel`` needs no mask.
    """
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * SURVEYED + tl.arange(0, SURVEYED)
    token = column[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + token, token < vocab, other=float("-inf"))
    place = row * columns + column
    if MASKED:
        word = tl.load(mask_ptr + place, column < columns, other=-1)
        masked = ((word[:, None] >> tl.arange(0, COLUMN)[None, :]) & 1) == 0
        logits = tl.where(masked, float("-inf"), logits)
        tl.store(logits_ptr + row * row_stride + token, logits, masked & (token < vocab))
    best = greatest(logits)
    tl.store(best_ptr + place, best, column < columns)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        cuts = (tl.load(top_k_ptr + row) < vocab) | (tl.load(min_p_ptr + row) > 0.0)
        nucleus = tl.load(top_p_ptr + row) < 1.0
        if nucleus & (not cuts):
            mass = tl.sum(weights(behind(best, logits), temperature.to(tl.float32)), axis=1)
            tl.store(second_ptr + place, mass, column < columns)
        if not (nucleus | cuts):
            bound = _bounds(behind(best, logits), token, temperature, keys_ptr + 2 * row)
            tl.store(second_ptr + place, tl.min(bound, axis=1), column < columns)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def choose_kernel(
    logits_ptr,
    row_stride,
    vocab,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    best_ptr,
    second_ptr,
    list_ptr,
    chosen_ptr,
    columns,
    COLUMNS: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """A row's token from its columns."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    key_ptr = keys_ptr + 2 * row
    second_ptr += row * columns
    column = tl.arange(0, COLUMNS)
    best = tl.load(best_ptr + row * columns + column, column < columns, other=float("-inf"))
    top, top_column = top_of(best)
    temperature = tl.load(temperature_ptr + row)
    if top != top:
        chosen = tl.full((), -1, tl.int64)
    elif top == float("inf"):
        chosen = tl.full((), -2, tl.int64)
    elif top == float("-inf"):
        chosen = tl.full((), -3, tl.int64)
    elif temperature == 0.0:
        chosen = _first_of(row_ptr, vocab, top, top_column)
    else:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        distance, bits = column_distances(best, top, column, columns)
        second = tl.load(second_ptr + column, column < columns, other=0.0)
        if (top_k >= vocab) & (top_p >= 1.0) & (min_p <= 0.0):
            slope = _slope(temperature)
            bound = tl.where(column < columns, second + distance * slope, float("inf"))
            last = tl.full((), LAST_KEY, tl.int64)
        else:
            list_ptr += row * columns
            row_place = (row_ptr, vocab, top, list_ptr)
            count, last = _survivors(
                row_place, temperature, top_k, top_p, min_p, column, columns, distance, bits, second, DIGIT, TILE
            )
            bound = _survivors_bounds(
                row_ptr, vocab, top, temperature, key_ptr, list_ptr, count, last, second_ptr, column, columns, TILE
            )
        chosen = _winner(row_ptr, vocab, top, temperature, key_ptr, last, column, bound)
    tl.store(chosen_ptr + row, chosen)


@triton.jit
def _first_of(row_ptr, vocab, top, column):
    """The first token of a column that has the greatest logit."""
    token = column * COLUMN + tl.arange(0, COLUMN)
    logit = tl.load(row_ptr + token, token < vocab, other=float("-inf"))
    return tl.min(tl.where(logit == top, token, vocab), axis=0).to(tl.int64)


@triton.jit
def _survivors(
    row_place,
    temperature,
    top_k,
    top_p,
    min_p,
    column,
    columns,
    distance,
    bits,
    mass,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """(number of columns listed that hold all survivors of the filters, key of the last survivor)."""
    row_ptr, vocab, top, list_ptr = row_place
    temperature32 = temperature.to(tl.float32)
    least = tl.full(distance.shape, 1.0, tl.float32)
    reach = tl.full((), 0xFFFFFFFF, tl.uint32)
    last = tl.full((), LAST_KEY, tl.int64)
    target = tl.full((), 0.0, tl.float64)
    if top_k < vocab:
        reach = reach_of_columns(bits, least, tl.zeros_like(distance), top_k, temperature32, DIGIT)
    elif (top_p < 1.0) & (min_p <= 0.0):
        least = weights(distance, temperature32)
        mass = tl.where(column < columns, mass * least, 0.0)
        target = top_p * tl.sum(mass.to(tl.float64), axis=0)
        reach = reach_of_columns(bits, least, mass, target * (1.0 + _ROOM), temperature32, DIGIT)
    if min_p > 0.0:
        floor = tl.abs(temperature * tl.log(min_p)).to(tl.float32).to(tl.uint32, bitcast=True)
        reach = tl.minimum(reach, floor)
        last = (floor.to(tl.int64) << 32) | 0xFFFFFFFF
    count = list_columns(list_ptr, column, columns, bits, reach, tl.minimum(top_k, columns).to(tl.int32))
    listed = (row_ptr, vocab, top, list_ptr, count)
    if top_k < vocab:
        end = end_of_prefix(listed, last, top_k, temperature32, False, DIGIT, TILE)
        last = tl.minimum(last, end)
    if top_p < 1.0:
        if target == 0.0:
            for tile in range(tl.cdiv(count * COLUMN, TILE)):
                _token, away, keys = listed_tokens(listed, tile, TILE)
                weight = tl.where(keys <= last, weights(away, temperature32), 0.0)
                target += tl.sum(weight.to(tl.float64), axis=0)
            target = target * top_p
        end = end_of_prefix(listed, last, target, temperature32, True, DIGIT, TILE)
        last = tl.minimum(last, end)
    return count, last


@triton.jit
def _survivors_bounds(
    row_ptr, vocab, top, temperature, key_ptr, list_ptr, count, last, second_ptr, column, columns, TILE: tl.constexpr
):
    """A bound on the race for each column, over its survivors alone; infinite where there are none."""
    tl.store(second_ptr + column, tl.full(column.shape, float("inf"), tl.float32), column < columns)
    tl.debug_barrier()
    for tile in range(tl.cdiv(count * COLUMN, TILE)):
        token, distance, keys = listed_tokens((row_ptr, vocab, top, list_ptr, count), tile, TILE)
        bound = tl.where(keys <= last, _bounds(distance, token, temperature, key_ptr), float("inf"))
        bound = tl.min(tl.reshape(bound, (TILE // COLUMN, COLUMN)), axis=1)
        place = tile * (TILE // COLUMN) + tl.arange(0, TILE // COLUMN)
        listed = tl.load(list_ptr + place, place < count, other=0)
        tl.store(second_ptr + listed, bound, place < count)
    tl.debug_barrier()
    return tl.load(second_ptr + column, column < columns, other=float("inf"))


@triton.jit
def _random_bits(token, key_ptr):
    """The hash of ``octavo/kernels/noise.py``: uniform 32-bit numbers."""
    x = token.to(tl.uint32) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16) ^ tl.load(key_ptr).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ tl.load(key_ptr + 1).to(tl.uint32)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _slope(temperature):
    """What a distance costs in the race, in powers of two; finite, so that a distance of 0 costs nothing."""
    return tl.minimum(_LOG2_E / temperature, 1e38).to(tl.float32)


@triton.jit
def _bounds(distance, token, temperature, key_ptr):
    """Lower bounds of the finishing times, as logarithms to base 2.

    An exponential number is at least its uniform. Exponent plus fraction of a number is a piecewise linear logarithm,
    never above the true one (and 0.09 below at most); both are put together from a float32's bits.
    """
    uniform = (_random_bits(token, key_ptr).to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    # As the low bits of 2^23, the exponent is a number without being converted; its bias is 127, and that of the
    # fraction, from 1 to 2, is 1; the uniform number is 2^32 times what it should be.
    exponent = ((uniform >> 23) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 127.0 + 1.0 + 32.0)
    fraction = ((uniform & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return exponent + fraction + distance * _slope(temperature)


@triton.jit
def _winner(row_ptr, vocab, top, temperature, key_ptr, last, column, bound):
    """The token that finishes the race first, of those up to ``last``; of equals the better by rank."""
    best = tl.full((), float("inf"), tl.float64)
    winner = tl.full((), LAST_KEY, tl.int64)
    limit = tl.full((), float("inf"), tl.float32)
    lowest, first = tl.min(bound, axis=0, return_indices=True)
    while lowest <= limit:
        token = first * COLUMN + tl.arange(0, COLUMN)
        inside = token < vocab
        distance = top - tl.load(row_ptr + token, inside, other=float("-inf"))
        key = key_of(distance, token)
        uniform = (_random_bits(token, key_ptr).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        time = tl.log(-tl.log(1.0 - uniform)) + distance.to(tl.float64) / temperature
        time = tl.where(inside & (key <= last), time, float("inf"))
        least = tl.min(time, axis=0)
        place = tl.min(tl.where(time == least, key, LAST_KEY), axis=0)
        winner = tl.where((least < best) | ((least == best) & (place < winner)), place, winner)
        best = tl.minimum(best, least)
        limit = (best * _LOG2_E + _MARGIN).to(tl.float32)
        bound = tl.where(column == first, float("inf"), bound)
        lowest, first = tl.min(bound, axis=0, return_indices=True)
    return winner & 0xFFFFFFFF
