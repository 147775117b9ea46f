"""Sampling in numpy, row by row: the reference for faster backends.

A token is chosen by the Gumbel-max trick (Maddison, Tarlow & Minka 2014, section 2) among those that pass the filters:
the token with the least ``log(E_i) - z_i``, of tempered logits ``z_i`` and exponential noise ``E_i``, has probability
``softmax(z)_i``. Scores are float64; among equal scores the better rank wins, or the lower id without filters.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import PositionLogprobs
from octavo.kernels import noise
from octavo.kernels.arrays import Array
from octavo.kernels.filters import best, distances, survivors
from octavo.kernels.sampling import FILTERS, FLOOR, Filters, HostLogprobs, SamplingBackend

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
        """See ``SamplingBackend``."""
        values: NDArray[np.float32] = logits
        return values

    def copy_rows(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """See ``SamplingBackend``."""
        return logits[rows]

    def edit_rows(self, logits: NDArray[np.float32], rows: list[int]) -> dict[int, NDArray[np.float32]]:
        """Views of the logits."""
        return {row: logits[row] for row in rows}

    def choose_most_likely(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """See ``SamplingBackend``."""
        rows = len(logits)
        return self.choose(logits, np.zeros(rows, FILTERS), np.zeros((rows, 2), np.uint32))

    def choose(
        self,
        logits: NDArray[np.float32],
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.int64]:
        """See ``SamplingBackend``."""
        values = logits
        if mask is not None:
            values[~allowed_tokens(mask, values.shape[1])] = -np.inf
        tokens = values.argmax(axis=-1)
        tops = values[np.arange(len(values)), tokens]
        with np.errstate(over="ignore"):  # scores may overflow to infinity: such a token cannot win
            for i in np.flatnonzero((filters["temperature"] > 0.0) & np.isfinite(tops)).tolist():
                tokens[i] = self._drawer.draw(values[i], tops[i], Filters(*filters[i].item()), keys[i])
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
        """See ``SamplingBackend``."""
        wanted = zip(indices.tolist(), tokens.tolist(), counts.tolist(), strict=True)
        return HostLogprobs([position_logprobs(logits[i], token, k) for i, token, k in wanted])


def allowed_tokens(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Packed masks uint32 [n, ``mask_words(vocab_size)``] as bool [n, vocab_size]."""
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(bool)


class Drawer:
    """Samples tokens of single rows; owns scratch memory for one row."""

    def __init__(self, vocab_size: int) -> None:
        self._mixed = noise.mixed_ids(vocab_size)
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
        bits = noise.random_bits(key, mixed, self._bits[: mixed.size], self._scratch[: mixed.size])
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
    return np.log(noise.exponential(bits)) + distance.astype(np.float64) / temperature


def position_logprobs(logits: NDArray[np.float32], token: int, k: int) -> PositionLogprobs:
    """Logprobs of one position: log-softmax with the maximum subtracted, summed by numpy's pairwise sum.

    A row is computed alone, so its bits do not depend on the batch or on the number of threads.

    The rank is 1 + the number of tokens with a greater logit. All numbers are finite: none is below ``FLOOR``, and if
    the logits have no finite maximum (NaN, say) the token gets ``FLOOR`` and the last rank, without top tokens.
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
