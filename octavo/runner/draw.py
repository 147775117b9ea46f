"""The choice of a row's token by an exponential race among the tokens that survive the filters.

Token ``i`` with tempered logit ``z_i`` and exponential noise ``E_i`` wins with ``argmin(log(E_i) - z_i)``, which is the
Gumbel-max trick (Maddison, Tarlow & Minka 2014, section 2): token ``i`` is drawn with probability ``softmax(z)_i``. The
race is decided in float64; equal scores go to the better rank, or the lower id where nothing is ranked.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.runner import noise
from octavo.runner.filters import Filters, distances, survivors

#: One unit in the exponent of a float32, seen as an integer.
_EXPONENT = 2.0**23
#: Far above the rounding errors of the float32 scores (in powers of two), far below what would let many tokens through.
_MARGIN = 0.01
#: So many scores are computed outright.
_FEW = 512


class Drawer:
    """Draws tokens of rows; owns nothing but scratch memory for one row."""

    def __init__(self, vocab_size: int) -> None:
        self._mixed = noise.mixed_ids(vocab_size)
        self._distance = np.empty(vocab_size, np.float32)
        self._score = np.empty(vocab_size, np.float32)
        self._log2_uniform = np.empty(vocab_size, np.float32)
        self._bits = np.empty(vocab_size, np.uint32)
        self._scratch = np.empty(vocab_size, np.uint32)

    def draw(self, logits: NDArray[np.float32], top: np.float32, filters: Filters, key: NDArray[np.uint32]) -> int:
        """A token of the row: logits [vocab_size] with the finite maximum ``top``, hash key uint32 [2]."""
        distance = distances(logits, top, out=self._distance)
        mixed = self._mixed
        ids = None
        if not filters.keep_all(distance.size):
            ids = survivors(distance, filters)
            distance, mixed = distance[ids], mixed[ids]
        bits = noise.random_bits(key, mixed, self._bits[: mixed.size], self._scratch[: mixed.size])
        if mixed.size > _FEW:
            near = self._contenders(bits, distance, filters.temperature)
            winner = near[_scores(bits[near], distance[near], filters.temperature).argmin()]
        else:
            winner = _scores(bits, distance, filters.temperature).argmin()
        return int(winner if ids is None else ids[winner])

    def _contenders(
        self, bits: NDArray[np.uint32], distance: NDArray[np.float32], temperature: float
    ) -> NDArray[np.int64]:
        """A few indices, the winner of the race among them.

        As ``E >= v``, the score of a token is at least ``log(v) + distance / temperature``, and the bits of a float32
        read as an integer are a piecewise linear log2 that is never above it (and 0.09 below at most). So a bound from
        below costs no logarithm, and the tokens whose bound is above the true score of one token are out.
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
    """Finishing times of the race, as logarithms; the smallest wins."""
    return np.log(noise.exponential(bits)) + distance.astype(np.float64) / temperature
