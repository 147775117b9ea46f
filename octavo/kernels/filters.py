"""Which tokens a row may choose from: min-p, top-k and top-p as lengths of one ranking.

The ranking of a row's tokens is by logit, highest first, and by token id, lowest first, among equals. Each filter keeps
a prefix of it, so ties at a threshold are settled by the ranking and never by a sort's whim. Everything works on one
row's *distance*, ``max(logits) - logits`` (float32, so zero or positive, infinite for a masked token): a row is
computed alone, in arrays whose size does not depend on the batch, and so its bits cannot depend on its company.
A row at a time is also the quick way on a CPU: a row fits the second-level cache, a batch does not.
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
    return np.subtract(top + np.float32(0.0), logits, out=out)  # the sum turns a -0.0, whose bits rank last, into 0.0


def survivors(distance: NDArray[np.float32], filters: Filters) -> NDArray[np.int64]:
    """Token ids that pass the filters, in order of rank; never empty.

    Masked tokens may stand at the end where the filters would keep more than there are; they never win the draw.

    Min-p keeps tokens whose tempered probability is at least ``min_p`` times the best one's: distance at most
    ``-temperature * log(min_p)``. Top-k keeps the first k. Top-p keeps the shortest prefix that holds at least the
    share ``top_p`` of the tempered probability of what the other two left (Holtzman et al. 2019, section 3.1).
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

    Tokens lighter than ``(1 - top_p) * total / size`` weigh less than ``(1 - top_p) * total`` together, so the others
    hold the nucleus. Half of that bound leaves room for rounding.
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
    # Bits of floats that are not negative order as the floats do; with the id below them every key is different.
    order = distance[ids].view(np.uint32).astype(np.uint64) << np.uint64(32)
    order |= ids.astype(np.uint64)
    order.sort()
    return (order & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _reach(distance: NDArray[np.float32], k: int) -> np.float32:
    """A distance that at least k tokens, and not many more, lie within."""
    columns = distance.size // _BLOCK
    if 4 * k > columns:
        return np.partition(distance, k - 1)[k - 1]
    # Each of the k columns with the smallest minima has a token within the k-th smallest minimum.
    minima = distance[: columns * _BLOCK].reshape(_BLOCK, columns).min(axis=0)
    return np.partition(minima, k - 1)[k - 1]


def filtered_logits(logits: NDArray[np.float32], filters: Filters) -> NDArray[np.float64]:
    """What a row is drawn from: tempered logits with maximum 0, -inf for tokens that do not survive."""
    distance = distances(logits, logits.max())
    ids = np.arange(distance.size) if filters.keep_all(distance.size) else survivors(distance, filters)
    result = np.full(logits.shape, -np.inf)
    result[ids] = -(distance[ids].astype(np.float64) / filters.temperature)
    return result
