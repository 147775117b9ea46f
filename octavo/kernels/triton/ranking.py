"""What sampling and logprobs share: rows of logits seen as short columns, and prefixes of a row's ranking.

The ranking of a row is that of ``octavo/kernels/filters.py``: by *distance* (the greatest logit minus a token's own, so
zero or positive), and by token id among equals. A *key* holds both, the distance's bits above the id: keys are all
different and order as the ranking does. A prefix of the ranking is told by its last key: nothing is sorted.

A row is read once, by many programs, which leave one or two numbers for each *column* of 32 tokens. One program goes on
from there: it sees 4,000 columns where there were 128,000 tokens, and reads the logits of a few columns again. What it
makes of them depends on the row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels import interpreted

#: Tokens of a column: 128 bytes, a line of the cache.
COLUMN = tl.constexpr(32)
#: Columns that a program surveys.
SURVEYED = tl.constexpr(64)
#: Tokens of listed columns that are looked at together, at most.
LARGEST_TILE = 2048
#: After every key.
LAST_KEY = tl.constexpr((1 << 63) - 1)

#: Bits of the largest token id.
_ID_BITS = tl.constexpr(20)
_INFINITE_BITS = tl.constexpr(0x7F800000)
_LOW_BITS = tl.constexpr(0xFFFFFFFF)


def digit_bits(columns: int) -> int:
    """Bits of a threshold that are settled at once, by trying all their values."""
    if not interpreted():
        return 2
    # The interpreter takes as long for a number as for a thousand, but not more than a million.
    return 8 if columns <= 4096 else 4


@triton.jit
def greatest(logits):
    """The greatest of each row of a matrix, NaN where there is one."""
    nan = logits != logits
    best = tl.max(tl.where(nan, float("-inf"), logits), axis=1)
    return tl.where(tl.max(nan.to(tl.int32), axis=1) > 0, float("nan"), best)


@triton.jit
def behind(best, logits):
    """Distance of each of the logits, a matrix, from its row's greatest; infinite for a masked token."""
    return tl.where(best == float("-inf"), 0.0, best)[:, None] - logits


@triton.jit
def top_of(best):
    """(greatest of all columns, or NaN; a column that has it, the first)."""
    nan = best != best
    top, column = tl.max(tl.where(nan, float("-inf"), best), axis=0, return_indices=True)
    top = tl.where(top == 0.0, 0.0, top)  # the distance from a -0.0 could be a -0.0, whose bits rank last
    return tl.where(tl.max(nan.to(tl.int32), axis=0) > 0, float("nan"), top), column


@triton.jit
def weights(distance, temperature):
    """Tempered probabilities divided by the best token's, float32 (as numpy has them in ``filters``)."""
    return tl.exp(-(distance / tl.maximum(temperature, 1e-37)))


@triton.jit
def column_distances(best, top, column, columns):
    """(distance of each column's best token, its bits); beyond the last column infinite, and after everything."""
    distance = top - best
    bits = distance.to(tl.uint32, bitcast=True)
    return distance, tl.where(column < columns, bits, 0xFFFFFFFF)


@triton.jit
def reach_of_columns(bits, least, mass, target, temperature, DIGIT: tl.constexpr):
    """Bits of a distance within which tokens of the columns weigh the target; all ones if they never do.

    A column whose best token lies within a distance holds, within it, that token, which weighs ``least``, and all of
    its ``mass`` but what its other tokens weigh, which beyond the distance weigh little each. To count columns, a mass
    of 0 and a least weight of 1 do, and the distance is then that of the last column counted.
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
    """Writes the columns within reach, at most ``most``, the best by rank; returns how many there are."""
    here = column < columns
    nearer = here & (bits < reach)
    tied = here & (bits == reach)
    num_nearer = tl.sum(nearer.to(tl.int32), axis=0)
    count = tl.minimum(num_nearer + tl.sum(tied.to(tl.int32), axis=0), most)
    place = tl.where(nearer, tl.cumsum(nearer.to(tl.int32), axis=0), num_nearer + tl.cumsum(tied.to(tl.int32), axis=0))
    tl.store(list_ptr + place - 1, column, (nearer | tied) & (place <= count))
    tl.debug_barrier()  # what some threads wrote others will read
    return count


@triton.jit
def listed_tokens(row_ptr, vocab, top, list_ptr, count, tile, TILE: tl.constexpr):
    """(ids, distances, keys) of a tile of the listed columns' tokens; past the end the key is ``LAST_KEY``."""
    element = tile * TILE + tl.arange(0, TILE)
    place = element // COLUMN
    column = tl.load(list_ptr + place, place < count, other=0)
    token = column * COLUMN + element % COLUMN
    inside = (place < count) & (token < vocab)
    distance = top - tl.load(row_ptr + token, inside, other=float("-inf"))
    return token, distance, tl.where(inside, key_of(distance, token), LAST_KEY)


@triton.jit
def key_of(distance, token):
    """Place in the ranking: distance, then id."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def end_of_prefix(
    row_ptr,
    vocab,
    top,
    list_ptr,
    count,
    last,
    target,
    temperature,
    WEIGHTED: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Key of the last token of the shortest prefix that weighs the target; after every key if none does.

    Each token weighs 1, or, WEIGHTED, its tempered probability; those after ``last`` weigh nothing. The columns listed
    must hold the prefix.
    """
    key = tl.full((), 0, tl.int64)
    key = _refine(
        row_ptr, vocab, top, list_ptr, count, last, target, temperature, key, 63, 32 // DIGIT, WEIGHTED, DIGIT, TILE
    )
    ties = 0
    for tile in range(tl.cdiv(count * COLUMN, TILE)):
        _token, _distance, keys = listed_tokens(row_ptr, vocab, top, list_ptr, count, tile, TILE)
        ties += tl.sum(((keys >> 32) == (key >> 32)).to(tl.int32), axis=0)
    if ties > 1:
        steps: tl.constexpr = (_ID_BITS + DIGIT - 1) // DIGIT
        key = _refine(
            row_ptr,
            vocab,
            top,
            list_ptr,
            count,
            last,
            target,
            temperature,
            key,
            steps * DIGIT,
            steps,
            WEIGHTED,
            DIGIT,
            TILE,
        )
    else:
        key = key | _LOW_BITS
    return key


@triton.jit
def _refine(
    row_ptr,
    vocab,
    top,
    list_ptr,
    count,
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
    """Settles the key's bits below SHIFT, a digit a step: the greatest key before which the target is not met."""
    digits = tl.arange(0, 1 << DIGIT).to(tl.int64)
    for step in range(STEPS):
        shift = SHIFT - DIGIT * (step + 1)
        trial = key + (digits << shift)
        held = tl.zeros((1 << DIGIT, TILE), tl.float64)
        for tile in tl.range(0, tl.cdiv(count * COLUMN, TILE), loop_unroll_factor=2):  # loads of two at once
            _token, distance, keys = listed_tokens(row_ptr, vocab, top, list_ptr, count, tile, TILE)
            if WEIGHTED:
                weight = tl.where(keys <= last, weights(distance, temperature), 0.0).to(tl.float64)
            else:
                weight = (keys <= last).to(tl.float64)
            held += tl.where(keys[None, :] < trial[:, None], weight[None, :], 0.0)
        key += (tl.sum((tl.sum(held, axis=1) < target).to(tl.int64), axis=0) - 1) << shift
    return key
