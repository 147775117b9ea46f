"""Common parts of sampling and logprobs: rows of logits as short columns, and prefixes of a row's ranking.

The ranking of a row is that of ``octavo/kernels/filters.py``: by *distance* (the greatest logit minus the token's, zero
or positive), and by token id among equals. A *key* is the distance's bits followed by the id: keys are distinct and
sort as the ranking. A prefix of the ranking is given by its last key, so nothing is sorted.

A row is read once, by many programs, which write one or two numbers for each *column* of 32 tokens. Then one program
works on the columns (4,000 for 128,000 tokens), and reads the logits of a few columns again. Its result depends on the
row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.interpreter import interpreted

#: Tokens of a column: 128 bytes, a line of the cache.
COLUMN = tl.constexpr(32)
#: Columns of a program of the survey kernels.
SURVEYED = tl.constexpr(64)
#: Largest number of tokens of listed columns in a tile.
LARGEST_TILE = 2048
#: After every key.
LAST_KEY = tl.constexpr((1 << 63) - 1)

#: Bits of the largest token id.
_ID_BITS = tl.constexpr(20)
_INFINITE_BITS = tl.constexpr(0x7F800000)
_LOW_BITS = tl.constexpr(0xFFFFFFFF)


def digit_bits(columns: int) -> int:
    """Bits of a threshold that are determined at once, by testing all their values."""
    if not interpreted():
        return 2
    # The interpreter takes as long for one element as for a thousand; tensors are limited to a million.
    return 8 if columns <= 4096 else 4


@triton.jit
def greatest(logits):
    """The maximum of each row of a matrix, NaN if it contains one."""
    nan = logits != logits
    best = tl.max(tl.where(nan, float("-inf"), logits), axis=1)
    return tl.where(tl.max(nan.to(tl.int32), axis=1) > 0, float("nan"), best)


@triton.jit
def behind(best, logits):
    """Distance of the logits, a matrix, from their row's maximum; infinite for a masked token."""
    return tl.where(best == float("-inf"), 0.0, best)[:, None] - logits


@triton.jit
def top_of(best):
    """(maximum of all columns, or NaN; the first column that has it)."""
    nan = best != best
    top, column = tl.max(tl.where(nan, float("-inf"), best), axis=0, return_indices=True)
    top = tl.where(top == 0.0, 0.0, top)  # a distance from -0.0 could be -0.0, which would rank last
    return tl.where(tl.max(nan.to(tl.int32), axis=0) > 0, float("nan"), top), column


@triton.jit
def weights(distance, temperature):
    """Tempered probabilities divided by the best token's, float32 (as numpy has them in ``filters``)."""
    return tl.exp(-(distance / tl.maximum(temperature, 1e-37)))


@triton.jit
def column_distances(best, top, column, columns):
    """(distance of each column's best token, its bits); past the last column infinite and all ones."""
    distance = top - best
    bits = distance.to(tl.uint32, bitcast=True)
    return distance, tl.where(column < columns, bits, 0xFFFFFFFF)


@triton.jit
def reach_of_columns(bits, least, mass, target, temperature, DIGIT: tl.constexpr):
    """Bits of a distance within which the tokens of the columns have the target weight; all ones if there is none.

    The weight of a column within a distance is bounded from below: if its best token is within it, by that token's
    weight ``least``, and by its ``mass`` minus the largest possible weight of its other tokens beyond the distance.
    With a mass of 0 and a least weight of 1, columns are counted, and the distance is that of the last column counted.
    """
    digits = tl.arange(0, 1 << DIGIT).to(tl.uint32)
    low = tl.full((), 0, tl.uint32)
    for step in range(32 // DIGIT):
        shift = 32 - DIGIT * (step + 1)
        trial = low + (digits << shift)
        beyond = tl.minimum(trial, _INFINITE_BITS).to(tl.float32, bitcast=True)
        outside = (COLUMN - 1) * weights(beyond, temperature)
        held = tl.maximum(least[None, :], mass[None, :] - outside[:, None])
        held = tl.sum(tl.where(bits[None, :] < trial[:, None], held, 0.0), axis=1)
        # The first trial is below the target, by the choice of the digits before.
        low += (tl.sum((held < target).to(tl.int32), axis=0) - 1).to(tl.uint32) << shift
    return low


@triton.jit
def list_columns(list_ptr, column, columns, bits, reach, most):
    """Writes the best columns within reach, at most ``most``; returns their number."""
    here = column < columns
    nearer = here & (bits < reach)
    tied = here & (bits == reach)
    num_nearer = tl.sum(nearer.to(tl.int32), axis=0)
    count = tl.minimum(num_nearer + tl.sum(tied.to(tl.int32), axis=0), most)
    place = tl.where(nearer, tl.cumsum(nearer.to(tl.int32), axis=0), num_nearer + tl.cumsum(tied.to(tl.int32), axis=0))
    tl.store(list_ptr + place - 1, column, (nearer | tied) & (place <= count))
    tl.debug_barrier()  # other threads read what was written
    return count


@triton.jit
def listed_tokens(listed, tile, TILE: tl.constexpr):
    """(ids, distances, keys) of a tile of the listed columns' tokens; past the end the key is ``LAST_KEY``.

    ``listed``: pointer to the row's logits, their number, the row's maximum, pointer to the list, and its length.
    """
    row_ptr, vocab, top, list_ptr, count = listed
    element = tile * TILE + tl.arange(0, TILE)
    place = element // COLUMN
    column = tl.load(list_ptr + place, place < count, other=0)
    token = column * COLUMN + element % COLUMN
    inside = (place < count) & (token < vocab)
    distance = top - tl.load(row_ptr + token, inside, other=float("-inf"))
    return token, distance, tl.where(inside, key_of(distance, token), LAST_KEY)


@triton.jit
def key_of(distance, token):
    """The key of a token in the ranking: distance, then id."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def end_of_prefix(listed, last, target, temperature, WEIGHTED: tl.constexpr, DIGIT: tl.constexpr, TILE: tl.constexpr):
    """Key of the last token of the shortest prefix with the target weight; greater than all keys if there is none.

    The weight of a token is 1, or, if WEIGHTED, its tempered probability; 0 after ``last``. The listed columns must
    include the prefix.
    """
    key = tl.full((), 0, tl.int64)
    key = _refine(listed, last, target, temperature, key, 63, 32 // DIGIT, WEIGHTED, DIGIT, TILE)
    ties = 0
    for tile in range(tl.cdiv(listed[4] * COLUMN, TILE)):
        _token, _distance, keys = listed_tokens(listed, tile, TILE)
        ties += tl.sum(((keys >> 32) == (key >> 32)).to(tl.int32), axis=0)
    if ties > 1:
        steps: tl.constexpr = (_ID_BITS + DIGIT - 1) // DIGIT
        key = _refine(listed, last, target, temperature, key, steps * DIGIT, steps, WEIGHTED, DIGIT, TILE)
    else:
        key = key | _LOW_BITS
    return key


@triton.jit
def _refine(
    listed,
    last,
    target,
    temperature,
    key,
    SHIFT: tl.constexpr,
    STEPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Determines the key's bits below SHIFT, a digit per step: the greatest key before which the target is not met."""
    digits = tl.arange(0, 1 << DIGIT).to(tl.int64)
    for step in range(STEPS):
        shift = SHIFT - DIGIT * (step + 1)
        trial = key + (digits << shift)
        held = tl.zeros((1 << DIGIT, TILE), tl.float64)
        for tile in tl.range(0, tl.cdiv(listed[4] * COLUMN, TILE), loop_unroll_factor=2):  # loads of two at once
            _token, distance, keys = listed_tokens(listed, tile, TILE)
            if WEIGHTED:
                weight = tl.where(keys <= last, weights(distance, temperature), 0.0).to(tl.float64)
            else:
                weight = (keys <= last).to(tl.float64)
            held += tl.where(keys[None, :] < trial[:, None], weight[None, :], 0.0)
        key += (tl.sum((tl.sum(held, axis=1) < target).to(tl.int64), axis=0) - 1) << shift
    return key
