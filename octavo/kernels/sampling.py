"""The interface of sampling backends: tokens and logprobs from rows of logits.

All backends sample the same tokens, except where rounding in the last bit decides what top-p keeps or which of two
tokens wins; their logprobs agree to about 1e-6. In each, a row's result depends bit for bit on the row alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.failures import NO_TOKEN_LEFT, SequenceFailure
from octavo.core.plan import PositionLogprobs
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.kernels.interface import Array

#: Results of ``SamplingBackend.choose`` that are no tokens, and their reasons.
NO_TOKEN = {
    -1: SequenceFailure("the logits are NaN"),
    -2: SequenceFailure("the logits are infinite"),
    -3: SequenceFailure("no token is left to choose: every one of the vocabulary is masked", NO_TOKEN_LEFT),
}

#: ``Filters`` as a record type of numpy.
FILTERS = np.dtype([("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8")])

#: At higher temperatures the distribution is uniform in float32; here 1 / temperature is still a normal number.
MAX_TEMPERATURE = 1e30

#: Logprob of an impossible token, as JSON has no infinity.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters of a row; a disabled filter has the value that keeps all tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Filters:
        """The filters of a request that is not greedy."""
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        return cls(min(params.temperature, MAX_TEMPERATURE), top_k, params.top_p, params.min_p)

    def keep_all(self, vocab_size: int) -> bool:
        return self.top_k >= vocab_size and self.top_p >= 1.0 and self.min_p <= 0.0


def mask_words(vocab_size: int) -> int:
    """Words of a row's packed mask: token t is bit t % 32 of word t // 32, set if it is allowed."""
    return -(-vocab_size // 32)


def pack_mask(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The packed mask, uint32 [``mask_words(vocab_size)``], of ``allowed``, bool [vocab_size]."""
    padded = np.zeros(32 * mask_words(len(allowed)), bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class PendingLogprobs(Protocol):
    """Logprobs that the device may still be computing."""

    def wait(self) -> list[PositionLogprobs]:
        """An entry for each requested token; may be called repeatedly."""
        ...


#: Rows of logits that the compiled kernels have beside a step's: copies of edited ones, or those of a scored prompt.
ROWS_AT_ONCE = 32
#: Scratch memory of a thread of the compiled kernels, in rows of float32 numbers.
SCRATCH_ROWS = 6


class SamplingBackend(ABC):
    """Samples from rows of logits [n, vocab], as ``prepare`` makes them.

    A backend of a GPU queues its work on the current stream and returns. The defaults here are for tokens on the host.
    """

    #: Rows of logits to have beside a step's; None: any number.
    rows_at_once: int | None = None

    @abstractmethod
    def prepare(self, logits: Array) -> Any:
        """Logits of any type as the other methods expect them, in the same memory if possible."""

    def to_device(self, values: NDArray[np.int64]) -> Any:
        """Token ids on the logits' device, without waiting for the copy."""
        return values

    def fetch(self, tokens: Any) -> Callable[[], NDArray[np.int64]]:
        """Begins to copy tokens to the host; the returned function waits for them."""
        return lambda: tokens

    def select(self, tokens: Any, indices: NDArray[np.int64]) -> Any:
        """The tokens at these indices, on their device."""
        return tokens[indices]

    @abstractmethod
    def copy_rows(self, logits: Any, rows: NDArray[np.int64]) -> Any:
        """A copy of these rows of the logits, on their device."""

    @abstractmethod
    def edit_rows(self, logits: Any, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        """These rows on the host, float32 [vocab] each, to be changed; ``put_rows`` writes them back."""

    def put_rows(self, logits: Any, edited: dict[int, NDArray[np.float32]]) -> None:
        """Writes edited rows back, unless they are the logits' own memory, as here."""
        return None

    @abstractmethod
    def choose_most_likely(self, logits: Any) -> Any:
        """``choose`` with all rows greedy and without masks."""

    @abstractmethod
    def choose(
        self, logits: Any, filters: NDArray[np.void], keys: NDArray[np.uint32], mask: NDArray[np.uint32] | None = None
    ) -> Any:
        """A token for each row, or a key of ``NO_TOKEN``: int64 [n], on the logits' device.

        The arrays may be changed after the call returns.

        Args:
            logits: [n, vocab]; masked tokens become -inf in place.
            filters: [n] records (``FILTERS``); temperature 0 takes the most likely token, the lowest id among equals.
            keys: [n, 2], hash keys (``keys``) of the rows that are not greedy.
            mask: [n, ``mask_words(vocab)``], the allowed tokens of each row; None allows all.
        """

    @abstractmethod
    def logprobs(
        self, logits: Any, indices: NDArray[np.int64], tokens: Any, counts: NDArray[np.int64]
    ) -> PendingLogprobs:
        """Logprobs of ``tokens[i]`` in row ``indices[i]`` of the logits, and of its ``counts[i]`` most likely tokens.

        ``tokens``: int64 [n], on the logits' device; the result for a negative one is undefined.
        """


class HostLogprobs(NamedTuple):
    """``PendingLogprobs`` that are on the host already."""

    logprobs: list[PositionLogprobs]

    def wait(self) -> list[PositionLogprobs]:
        return self.logprobs


def as_position_logprobs(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    ranks: NDArray[np.int64],
    counts: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_logprobs: NDArray[np.float64],
    vocab_size: int,
) -> list[PositionLogprobs]:
    """A kernel's logprobs of n tokens as ``PositionLogprobs``, none below ``FLOOR``.

    The logprob is NaN in a row without probabilities. Row i has ``counts[i]`` valid columns in ``top_ids`` and
    ``top_logprobs`` [n, max(counts)].
    """
    broken = np.isnan(logprobs)
    # fmax turns NaN into the floor.
    ranks, counts = np.where(broken, vocab_size, ranks), np.where(broken, 0, counts)
    columns = (tokens, np.fmax(logprobs, FLOOR), ranks, counts, top_ids, np.fmax(top_logprobs, FLOOR))
    return [
        PositionLogprobs(token, logprob, rank, ids[:k], best[:k])
        for token, logprob, rank, k, ids, best in zip(*(column.tolist() for column in columns), strict=True)
    ]


# Min-p, top-k and top-p keep prefixes of one ranking of a row's tokens.


def distances(
    logits: NDArray[np.float32], top: np.float32, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Distance of each token of a row from the row's finite maximum ``top``."""
    return np.subtract(top + np.float32(0.0), logits, out=out)  # the sum makes 0.0 of -0.0, which would rank last


def survivors(distance: NDArray[np.float32], filters: Filters) -> NDArray[np.int64]:
    """Token ids that pass the filters, in order of rank; never empty.

    If the filters keep more tokens than are allowed, the last ones are masked tokens, which are never sampled.

    Min-p keeps tokens with a tempered probability of at least ``min_p`` times the best one's: distance at most
    ``-temperature * log(min_p)``. Top-k keeps the first k. Top-p keeps the shortest prefix with at least the share
    ``top_p`` of the tempered probability that the other two filters keep (Holtzman et al. 2019, section 3.1).
    """
    size = distance.size
    kept = filters.top_k
    if filters.min_p > 0.0:
        reach = np.float32(-filters.temperature * math.log(filters.min_p))
        kept = min(kept, int(np.count_nonzero(distance <= reach)))
    if filters.top_p >= 1.0:
        return best(distance, kept)
    if kept == size:
        return _nucleus_of_all(distance, filters)
    ids = best(distance, kept)
    mass = _cumulative(distance[ids], filters.temperature)
    return ids[: np.searchsorted(mass, filters.top_p * mass[-1]) + 1]


def _nucleus_of_all(distance: NDArray[np.float32], filters: Filters) -> NDArray[np.int64]:
    """Top-p of the whole vocabulary, without ranking all of it.

    Tokens with weights below ``(1 - top_p) * total / size`` have together less than ``(1 - top_p) * total``, so the
    other tokens include the nucleus. Half of that bound is used, to allow for rounding.
    """
    total = float(_weights(distance, filters.temperature).sum(dtype=np.float64))
    reach = filters.temperature * math.log(2.0 * distance.size / ((1.0 - filters.top_p) * total))
    ids = _ranked(distance, np.flatnonzero(distance <= np.float32(reach)))
    mass = _cumulative(distance[ids], filters.temperature)
    return ids[: np.searchsorted(mass, filters.top_p * total) + 1]


def _weights(distance: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    result = distance / np.float32(-temperature)
    return np.exp(result, out=result)


def _cumulative(distance: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    return np.cumsum(_weights(distance, temperature), dtype=np.float64)


def best(distance: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The k best token ids in order of rank (all of them if there are fewer)."""
    if k >= distance.size:
        return _ranked(distance, np.arange(distance.size))
    return _ranked(distance, np.flatnonzero(distance <= np.partition(distance, k - 1)[k - 1]))[:k]


def _ranked(distance: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    # The bits of non-negative floats sort as the floats; the id in the low bits makes every key different.
    order = distance[ids].view(np.uint32).astype(np.uint64) << np.uint64(32)
    order |= ids.astype(np.uint64)
    order.sort()
    return (order & np.uint64(0xFFFFFFFF)).astype(np.int64)


# Random numbers for sampling: a hash of (seed, position, token id), without generator state.

_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN32 = np.uint32(0x9E3779B9)
_M1 = np.uint32(0x85EBCA6B)
_M2 = np.uint32(0xC2B2AE35)
_S13 = np.uint32(13)
_S16 = np.uint32(16)


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Hash keys uint32 [n, 2] of seeds [n] and of the positions [n] of the tokens to be drawn."""
    steps = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN64
    key = _mix64(_mix64(seeds + _GOLDEN64) + steps)
    return np.stack([(key & np.uint64(0xFFFFFFFF)), key >> np.uint64(32)], axis=-1).astype(np.uint32)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def mixed_ids(vocab_size: int) -> NDArray[np.uint32]:
    """The part of the hash that depends on the token id alone: uint32 [vocab_size], read-only."""
    x = np.arange(vocab_size, dtype=np.uint32) + _GOLDEN32
    x = (x ^ (x >> _S16)) * _M1
    x = (x ^ (x >> _S13)) * _M2
    x ^= x >> _S16
    x.setflags(write=False)
    return x


def random_bits(
    key: NDArray[np.uint32],
    mixed: NDArray[np.uint32],
    out: NDArray[np.uint32] | None = None,
    scratch: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint32]:
    """Uniform 32-bit numbers, one for each of ``mixed`` (entries of ``mixed_ids``), of one row's key [2].

    ``out`` and ``scratch`` (both of the shape of ``mixed``) save the allocations.
    """
    x = np.bitwise_xor(mixed, key[0], out=out)
    y = np.right_shift(x, _S16, out=scratch)
    x ^= y
    x *= _M1
    np.right_shift(x, _S13, out=y)
    x ^= y
    x ^= key[1]
    x *= _M2
    np.right_shift(x, _S16, out=y)
    x ^= y
    return x


def exponential(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Standard exponential numbers, finite and positive, from uniform bits."""
    return -np.log1p(-(bits + 0.5) * 2.0**-32)


# Sampling in numpy, row by row: the reference for faster backends.

#: One unit in the exponent of a float32, seen as an integer.
_EXPONENT = 2.0**23
#: Margin of the float32 bound (in powers of two): far above its rounding errors, and small enough to keep few tokens.
_MARGIN = 0.01
#: Up to this many tokens, all exact scores are computed.
_FEW = 512


class NumpySampling(SamplingBackend):
    """The numpy backend, for logits of numpy; owns scratch memory for one row."""

    def __init__(self, vocab_size: int) -> None:
        self._drawer = Drawer(vocab_size)

    def prepare(self, logits: Array) -> NDArray[np.float32]:
        values: NDArray[np.float32] = logits
        return values

    def copy_rows(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return logits[rows]

    def edit_rows(self, logits: NDArray[np.float32], rows: list[int]) -> dict[int, NDArray[np.float32]]:
        return {row: logits[row] for row in rows}

    def choose_most_likely(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        rows = len(logits)
        return self.choose(logits, np.zeros(rows, FILTERS), np.zeros((rows, 2), np.uint32))

    def choose(
        self,
        logits: NDArray[np.float32],
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.int64]:
        if mask is not None:
            logits[~allowed_tokens(mask, logits.shape[1])] = -np.inf
        tokens = logits.argmax(axis=-1)
        tops = logits[np.arange(len(logits)), tokens]
        with np.errstate(over="ignore"):  # scores may overflow to infinity: such a token cannot win
            for i in np.flatnonzero((filters["temperature"] > 0.0) & np.isfinite(tops)).tolist():
                tokens[i] = self._drawer.draw(logits[i], tops[i], Filters(*filters[i].item()), keys[i])
        tokens[np.isnan(tops)] = -1  # argmax returns the index of a NaN
        tokens[np.isposinf(tops)] = -2
        tokens[np.isneginf(tops)] = -3
        return tokens

    def logprobs(
        self,
        logits: NDArray[np.float32],
        indices: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> HostLogprobs:
        requests = zip(indices.tolist(), tokens.tolist(), counts.tolist(), strict=True)
        return HostLogprobs([position_logprobs(logits[i], token, k) for i, token, k in requests])


def allowed_tokens(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Packed masks uint32 [n, ``mask_words(vocab_size)``] as bool [n, vocab_size]."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(bool)


class Drawer:
    """Samples tokens of single rows; owns scratch memory for one row."""

    def __init__(self, vocab_size: int) -> None:
        self._mixed = mixed_ids(vocab_size)
        self._distance = np.empty(vocab_size, np.float32)
        self._score = np.empty(vocab_size, np.float32)
        self._log2_uniform = np.empty(vocab_size, np.float32)
        self._bits = np.empty(vocab_size, np.uint32)
        self._scratch = np.empty(vocab_size, np.uint32)

    def draw(self, logits: NDArray[np.float32], top: np.float32, filters: Filters, key: NDArray[np.uint32]) -> int:
        """Samples a token: logits [vocab_size] with the finite maximum ``top``, hash key uint32 [2]."""
        distance = distances(logits, top, out=self._distance)
        mixed = self._mixed
        ids = None
        if not filters.keep_all(distance.size):
            ids = survivors(distance, filters)
            distance, mixed = distance[ids], mixed[ids]
        bits = random_bits(key, mixed, self._bits[: mixed.size], self._scratch[: mixed.size])
        if mixed.size > _FEW:
            candidates = self._candidates(bits, distance, filters.temperature)
            winner = candidates[_scores(bits[candidates], distance[candidates], filters.temperature).argmin()]
        else:
            winner = _scores(bits, distance, filters.temperature).argmin()
        return int(winner if ids is None else ids[winner])

    def _candidates(
        self, bits: NDArray[np.uint32], distance: NDArray[np.float32], temperature: float
    ) -> NDArray[np.int64]:
        """A few indices that include the token with the least score.

        As ``E >= v``, the score of a token is at least ``log(v) + distance / temperature``, and the bits of a float32
        read as an integer are a piecewise linear approximation of log2 from below (by at most 0.09). So a lower bound
        of each score needs no logarithm, and tokens with a bound above the exact score of one token cannot win.
        """
        size = distance.size
        slope = np.float32(_EXPONENT / math.log(2.0) / temperature)
        score = np.multiply(distance, slope, out=self._score[:size])
        uniform = self._scratch[:size].view(np.float32)
        np.copyto(uniform, bits, casting="unsafe")
        uniform += np.float32(0.5)
        log2_uniform = self._log2_uniform[:size]
        np.copyto(log2_uniform, uniform.view(np.int32), casting="unsafe")
        score += log2_uniform
        leader = np.array([score.argmin()])
        true_score = _scores(bits[leader], distance[leader], temperature)[0] / math.log(2.0)
        # 127 is the exponent's bias; 32, as uniform is v * 2**32.
        return np.flatnonzero(score <= np.float32((true_score + 127 + 32 + _MARGIN) * _EXPONENT))


def _scores(bits: NDArray[np.uint32], distance: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """``log(E) + distance / temperature`` of each token; the least wins."""
    return np.log(exponential(bits)) + distance.astype(np.float64) / temperature


def position_logprobs(logits: NDArray[np.float32], token: int, k: int) -> PositionLogprobs:
    """Logprobs of one position: log-softmax with the maximum subtracted, summed by numpy's pairwise sum.

    A row is computed alone, so its bits do not depend on the batch or on the number of threads. The rank is 1 + the
    number of tokens with a greater logit. All numbers are finite: none is below ``FLOOR``, and if the logits have no
    finite maximum (NaN, say) the token gets ``FLOOR`` and the last rank, without top tokens.
    """
    top = logits.max()
    if not math.isfinite(top):
        return PositionLogprobs(token, FLOOR, logits.size)
    with np.errstate(over="ignore"):
        distance = distances(logits, top)
    weights = np.negative(distance)
    log_sum = math.log(np.exp(weights, out=weights).sum())
    chosen = distance[token]
    top_ids = best(distance, k) if k else np.empty(0, np.int64)
    return PositionLogprobs(
        token_id=token,
        logprob=max(-float(chosen) - log_sum, FLOOR),
        rank=1 + int(np.count_nonzero(logits > logits[token])),
        top_ids=top_ids.tolist(),
        top_logprobs=np.maximum(-distance[top_ids].astype(np.float64) - log_sum, FLOOR).tolist(),
    )
