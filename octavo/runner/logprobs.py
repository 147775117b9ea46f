"""Logprobs of the model's own distribution: one token's, its rank, and the most likely tokens.

A row is computed alone (see ``filters``), so its bits do not depend on the batch or on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import PositionLogprobs
from octavo.runner.filters import best, distances

#: Stands for the logprob of an impossible token, as JSON has no infinity.
FLOOR = -9999.0


def position_logprobs(logits: NDArray[np.float32], token: int, k: int) -> PositionLogprobs:
    """Logprobs of one position: log-softmax with the maximum subtracted, summed by numpy's pairwise sum.

    The rank is 1 + the number of tokens with a greater logit. All numbers are finite: none is below ``FLOOR``, and
    where the logits have no finite maximum (NaN, say) there are no probabilities, so the token gets ``FLOOR`` and the
    last rank, and no token is named beside it.
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


def as_position_logprobs(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    ranks: NDArray[np.int64],
    counts: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_logprobs: NDArray[np.float64],
    vocab_size: int,
) -> list[PositionLogprobs]:
    """What a kernel found for n tokens, in the form and with the floor that ``position_logprobs`` gives.

    A logprob of NaN stands for a row without probabilities; of row i the first ``counts[i]`` of ``top_ids`` and
    ``top_logprobs`` [n, most of counts] are taken.
    """
    broken = np.isnan(logprobs)
    # fmax: a NaN, too, becomes the floor.
    ranks, counts = np.where(broken, vocab_size, ranks), np.where(broken, 0, counts)
    columns = (tokens, np.fmax(logprobs, FLOOR), ranks, counts, top_ids, np.fmax(top_logprobs, FLOOR))
    return [
        PositionLogprobs(token, logprob, rank, ids[:k], best[:k])
        for token, logprob, rank, k, ids, best in zip(*(column.tolist() for column in columns), strict=True)
    ]
