"""Random draws that Python's ``random`` lacks: from weights, from Zipf's law, from a Poisson distribution."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Iterable


class Weighted:
    """Draws indices in proportion to weights, by bisection of their sums."""

    def __init__(self, weights: Iterable[float]) -> None:
        """``weights``: at least one, none negative, not all 0."""
        self._sums = list(itertools.accumulate(weights))

    def draw(self, rng: random.Random) -> int:
        """An index, from one random number."""
        return bisect.bisect_right(self._sums, rng.random() * self._sums[-1], 0, len(self._sums) - 1)


def zipf(count: int, exponent: float) -> list[float]:
    """Weights by rank: ``rank ** -exponent``; exponent 0 makes all equal."""
    return [rank**-exponent for rank in range(1, count + 1)]


class PoissonDraws:
    """Draws from a Poisson distribution by bisection of its distribution function, within 12 deviations."""

    def __init__(self, mean: float) -> None:
        reach = 12 * math.sqrt(mean) + 12
        self._least = max(0, math.floor(mean - reach))
        counts = range(self._least, math.ceil(mean + reach) + 1)
        self._table = Weighted(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in counts)

    def draw(self, rng: random.Random) -> int:
        """A count from 0, from one random number."""
        return self._least + self._table.draw(rng)


@functools.cache
def poisson(mean: float) -> PoissonDraws:
    """The distribution of this mean, above 0; its table is made once."""
    return PoissonDraws(mean)
