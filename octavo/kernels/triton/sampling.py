"""Sampling from rows of logits: greedy, or by the scores of ``octavo/kernels/sampling.py``.

There are two launches. The survey reads the logits, with many programs per row, and writes the greatest logit of each
column, of 32 tokens, and, for a row without filters, a lower bound on the scores of the column. Then one program per
row chooses. With filters it first finds the last token that passes, among the columns that can include it. Then it
computes exact scores, in float64, in the columns with bounds low enough to win: usually one or two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.kernels.sampling import SamplingBackend, as_position_logprobs
from octavo.kernels.torch_backend import HostCopy, as_rows, host_copy, host_empty
from octavo.kernels.triton import interpreted


class TritonSampling(SamplingBackend):
    """Sampling on a device. Owns the filters of greedy rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._pinned = device.type == "cuda"
        self._plain = torch.zeros(5, dtype=torch.int64, device=device)

    def prepare(self, logits: Tensor) -> Tensor:
        return as_rows(logits)

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See ``SamplingBackend``; a copy, so the array may change."""
        staged = torch.from_numpy(values)
        return (host_copy(staged) if self._pinned else staged.clone()).to(self._device, non_blocking=True)

    def fetch(self, tokens: Tensor) -> Callable[[], NDArray[np.int64]]:
        copy = HostCopy(tokens)
        return lambda: copy.wait().numpy()

    def select(self, tokens: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return tokens[self.to_device(indices)]

    def copy_rows(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        return logits[self.to_device(rows)]

    def edit_rows(self, logits: Tensor, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        copies = self.copy_rows(logits, np.array(rows, np.int64)).cpu().numpy()
        return dict(zip(rows, copies, strict=True))

    def put_rows(self, logits: Tensor, edited: dict[int, NDArray[np.float32]]) -> None:
        values = torch.from_numpy(np.stack(list(edited.values())))
        logits[self.to_device(np.array(list(edited), np.int64))] = values.to(logits.device)

    def choose_most_likely(self, logits: Tensor) -> Tensor:
        rows = len(logits)
        if 5 * rows > len(self._plain):
            self._plain = torch.zeros(10 * rows, dtype=torch.int64, device=self._device)
        return _choose(logits, self._plain[: 5 * rows].view(5, rows), None)

    def choose(
        self,
        logits: Tensor,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> Tensor:
        shape = (5, len(filters))
        settings = host_empty(shape, torch.int64) if self._pinned else torch.empty(shape, dtype=torch.int64)
        host = settings.numpy()
        for line, name in enumerate(("temperature", "top_k", "top_p", "min_p")):
            host[line] = filters[name].view(np.int64)
        host[4] = np.ascontiguousarray(keys).view(np.int64)[:, 0]
        allowed = None if mask is None else self.to_device(np.ascontiguousarray(mask).view(np.int32))
        return _choose(logits, settings.to(self._device, non_blocking=True), allowed)

    def logprobs(
        self, logits: Tensor, indices: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> DeviceLogprobs:
        counts = np.minimum(counts, self._vocab_size)
        width = int(counts.max(initial=0))
        results = token_logprobs(logits, self.to_device(indices), tokens, width)
        return DeviceLogprobs(results, tokens, counts, self._vocab_size)


def _choose(logits: Tensor, settings: Tensor, mask: Tensor | None) -> Tensor:
    """``settings``: rows of temperature, top_k, top_p, min_p and key, as 64 bits."""
    temperature, top_k, top_p, min_p, key = settings
    return choose_tokens(
        logits,
        temperature.view(torch.float64),
        top_k,
        top_p.view(torch.float64),
        min_p.view(torch.float64),
        key.view(torch.int32).view(-1, 2),
        mask,
    )


class DeviceLogprobs:
    """``PendingLogprobs`` that the device may still be computing."""

    __slots__ = ("_counts", "_results", "_tokens", "_vocab_size")

    def __init__(self, results: Tensor, tokens: Tensor, counts: NDArray[np.int64], vocab_size: int) -> None:
        self._results, self._tokens = HostCopy(results), HostCopy(tokens)
        self._counts, self._vocab_size = counts, vocab_size

    def wait(self) -> list[PositionLogprobs]:
        """An entry for each token; meaningless for a negative one."""
        results = unpack(self._results.wait(), len(self._counts))
        logprobs, ranks, ids, top_logprobs = (values.numpy() for values in results)
        tokens = self._tokens.wait().numpy()
        return as_position_logprobs(tokens, logprobs, ranks, self._counts, ids, top_logprobs, self._vocab_size)


# Shared by sampling and logprobs: rows of logits as short columns, and prefixes of a row's ranking.

#: Tokens of a column: 128 bytes, a line of the cache.
COLUMN = tl.constexpr(32)
#: Columns of a program of the survey kernels.
SURVEYED = tl.constexpr(64)
#: Largest number of tokens of listed columns in a tile.
LARGEST_TILE = 2048
#: Above every key.
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
    """Tempered probabilities divided by the best token's, float32."""
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
    tl.debug_barrier()  # other threads read the list
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
    listed, last, target, temperature, key,
    SHIFT: tl.constexpr, STEPS: tl.constexpr, WEIGHTED: tl.constexpr, DIGIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    """See ``SamplingBackend.choose``.

    Args:
        logits: [n, vocab] float32, contiguous in the last dimension.
        temperature, top_k, top_p, min_p: [n], int64 top_k and float64.
        keys: [n, 2] int32 or int64, contiguous: hash keys of the rows in the low 32 bits.
        mask: [n, columns] int32, contiguous, a word for each column.
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
        logits, logits.stride(0), vocab, *filters, best if mask is None else mask, best, second, columns,
        MASKED=mask is not None, num_warps=4,
    )  # fmt: skip
    choose_kernel[(rows,)](
        logits, logits.stride(0), vocab, *filters, best, second, listed, chosen, columns,
        COLUMNS=triton.next_power_of_2(columns), DIGIT=digit_bits(columns),
        TILE=min(LARGEST_TILE, triton.next_power_of_2(columns) * COLUMN.value), num_warps=16,
    )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def survey_kernel(
    logits_ptr, row_stride, vocab, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, mask_ptr, best_ptr,
    second_ptr, columns,
    MASKED: tl.constexpr,
):  # fmt: skip
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
    logits_ptr, row_stride, vocab, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, best_ptr, second_ptr,
    list_ptr, chosen_ptr, columns,
    COLUMNS: tl.constexpr, DIGIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    row_place, temperature, top_k, top_p, min_p, column, columns, distance, bits, mass,
    DIGIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    """The hash of ``octavo/kernels/sampling.py``: uniform 32-bit numbers."""
    x = token.to(tl.uint32) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16) ^ tl.load(key_ptr).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ tl.load(key_ptr + 1).to(tl.uint32)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _slope(temperature):
    """The score of a unit of distance, in powers of two; finite, so that a distance of 0 costs nothing."""
    return tl.minimum(_LOG2_E / temperature, 1e38).to(tl.float32)


@triton.jit
def _bounds(distance, token, temperature, key_ptr):
    """Lower bounds of the finishing times, as logarithms to base 2.

    An exponential number is at least its uniform. Exponent plus fraction of a number is a piecewise linear logarithm,
    never above the true one (and 0.09 below at most); both are put together from a float32's bits.
    """
    uniform = (_random_bits(token, key_ptr).to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    # As the low bits of 2^23, the exponent needs no conversion. Its bias is 127, that of the fraction, from 1 to 2, is
    # 1, and the uniform number has a factor of 2^32.
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


# Logprobs of tokens on the device: log-softmax, rank, and the most likely tokens.

#: Largest number of most likely tokens that ``token_logprobs`` returns.
MAX_LOGPROBS = 128

#: Read and written element by element: their alignment is irrelevant and must not cause another compilation.
_SMALL_LOGPROBS = ["rows_ptr", "tokens_ptr", "logprobs_ptr", "ranks_ptr", "ids_ptr", "top_logprobs_ptr"]


def token_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Log-softmax of ``tokens[i]`` in row ``rows[i]`` of the logits, its rank, and the row's k most likely tokens.

    The logits are float32 [rows, vocab], contiguous in the last dimension; k is at most vocab and ``MAX_LOGPROBS``. The
    result is one tensor, to be copied to the host at once; ``unpack`` separates its parts.
    """
    n, vocab = len(tokens), logits.shape[1]
    if k > min(MAX_LOGPROBS, vocab):
        raise ValueError(f"k must be at most {MAX_LOGPROBS} and the size of the vocabulary, {vocab}, not {k}")
    results = torch.empty(n * (2 + 2 * k), dtype=torch.int64, device=logits.device)
    if not n:
        return results
    columns = triton.cdiv(vocab, COLUMN.value)
    pieces = triton.cdiv(columns, SURVEYED.value)
    best = torch.empty(n, columns, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(best)
    greater = torch.empty(n, pieces, dtype=torch.int32, device=logits.device)
    listed = torch.empty(n, max(k, 1), dtype=torch.int32, device=logits.device)
    logprobs_survey_kernel[(pieces, n)](
        logits, logits.stride(0), vocab, rows, tokens, best, mass, greater, columns, pieces, num_warps=4
    )
    logprobs_kernel[(n,)](
        logits, logits.stride(0), vocab, rows, tokens, best, mass, greater, listed, *unpack(results, n), columns,
        pieces, k,
        COLUMNS=triton.next_power_of_2(columns), PIECES=triton.next_power_of_2(pieces),
        TILE=triton.next_power_of_2(max(k, 1)) * COLUMN.value, DIGIT=digit_bits(columns), num_warps=16,
    )  # fmt: skip
    return results


def unpack(results: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of a result of ``token_logprobs`` for n tokens.

    Returns:
        Logprobs float64 [n]; ranks int64 [n], 1 + the number of greater logits; ids int64 [n, k] and logprobs float64
        [n, k] of the most likely tokens in order of rank. If a row's greatest logit is not finite, or there is a NaN,
        the logprob is NaN and the rest is undefined.
    """
    logprobs, ranks, top = results.split([n, n, len(results) - 2 * n])
    ids, top_logprobs = top.view(2, n, -1) if n else top.view(2, 0, 0)
    return logprobs.view(torch.float64), ranks, ids, top_logprobs.view(torch.float64)


@triton.jit
def _chosen_logit(row_ptr, vocab, token_ptr):
    """The logit of the requested token; infinite outside the vocabulary."""
    token = tl.load(token_ptr)
    return tl.load(row_ptr + token, (token >= 0) & (token < vocab), other=float("inf"))


@triton.jit(do_not_specialize_on_alignment=_SMALL_LOGPROBS[:2])
def logprobs_survey_kernel(
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


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=_SMALL_LOGPROBS)
def logprobs_kernel(
    logits_ptr, row_stride, vocab, rows_ptr, tokens_ptr, best_ptr, mass_ptr, greater_ptr, list_ptr, logprobs_ptr,
    ranks_ptr, ids_ptr, top_logprobs_ptr, columns, pieces, k,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
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
                tl.store(top_logprobs_ptr + index * k + i, -away.to(tl.float64) - log_sum)
                keys = tl.where(keys == first, LAST_KEY, keys)
