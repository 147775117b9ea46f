"""Min-p, top-k and top-p of a row of logits, as prefixes of one ranking.

The tokens of a row are ranked by logit, highest first, and by token id, lowest first, among equals. Each filter keeps a
prefix of the ranking, so ties at a threshold do not depend on a sorting algorithm. All functions take a row's
*distance*, ``max(logits) - logits`` (float32, zero or positive, infinite for a masked token). Each row is computed
alone, in arrays of sizes that do not depend on the batch, so its bits do not depend on other rows. This is also fast on
a CPU: a row fits into the L2 cache, a batch does not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.sampling import Filters

_BLOCK = 64


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
    """Tempered probabilities divided by the best token's."""
    result = distance / np.float32(-temperature)
    return np.exp(result, out=result)


def _cumulative(distance: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    return np.cumsum(_weights(distance, temperature), dtype=np.float64)


def best(distance: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The k best token ids in order of rank (all of them if there are fewer)."""
    if k >= distance.size:
        return _ranked(distance, np.arange(distance.size))
    return _ranked(distance, np.flatnonzero(distance <= _reach(distance, k)))[:k]


def _ranked(distance: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids in order of rank."""
    # The bits of non-negative floats sort as the floats; the id in the low bits makes every key different.
    order = distance[ids].view(np.uint32).astype(np.uint64) << np.uint64(32)
    order |= ids.astype(np.uint64)
    order.sort()
    return (order & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _reach(distance: NDArray[np.float32], k: int) -> np.float32:
    """A distance within which there are at least k tokens, and not many more."""
    columns = distance.size // _BLOCK
    if 4 * k > columns:
        return np.partition(distance, k - 1)[k - 1]
    # The k columns with the smallest minima have a token each within the k-th smallest minimum.
    minima = distance[: columns * _BLOCK].reshape(_BLOCK, columns).min(axis=0)
    return np.partition(minima, k - 1)[k - 1]
