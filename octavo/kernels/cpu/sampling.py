"""Tokens and logprobs of whole rows of logits at once, by ``octavo._cpu``.

Each row is computed alone, by one thread: its result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_cpu: Any = importlib.import_module("octavo._cpu")


def choose_tokens(
    logits: NDArray[np.float32], filters: NDArray[np.void], keys: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """A token for each row.

    Args:
        logits: [n, vocab], contiguous in the last dimension.
        filters: [n], records of float64 temperature (0 takes the most likely token), int64 top_k, float64 top_p and
            float64 min_p, in this order; a filter that is off has the value that keeps everything.
        keys: [n, 2], hash keys of the rows.

    Returns:
        [n] token ids; -1 where there is a NaN, -2 where the greatest logit is infinite, -3 where all are masked.
    """
    rows, vocab = logits.shape
    filters, keys = np.ascontiguousarray(filters), np.ascontiguousarray(keys)
    out = np.empty(rows, np.int64)
    _cpu.choose_tokens(
        logits.ctypes.data, _stride(logits), rows, vocab, filters.ctypes.data, keys.ctypes.data, out.ctypes.data
    )
    return out


class SameFilters:
    """``choose_tokens`` with filters that are the same in every step, and keys of zeros: for rows that do not draw.

    Keeps the arguments and their addresses: to ask numpy for those takes longer than the kernel does for one row.
    """

    def __init__(self, filters: NDArray[np.void]) -> None:
        """Filters: of as many rows as there will be at most."""
        self.rows = len(filters)
        self._filters, self._keys = filters, np.zeros((self.rows, 2), np.uint32)
        self._out = np.empty(self.rows, np.int64)
        self._addresses = self._filters.ctypes.data, self._keys.ctypes.data, self._out.ctypes.data

    def choose_tokens(self, logits: int, stride: int, rows: int, vocab: int) -> NDArray[np.int64]:
        """A token for each of at most ``self.rows`` rows [rows, vocab] at that address, ``stride`` elements apart."""
        _cpu.choose_tokens(logits, stride, rows, vocab, *self._addresses)
        return self._out[:rows].copy()


def token_logprobs(
    logits: NDArray[np.float32], indices: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Log-softmax of one token for each of some rows, its rank, and the most likely tokens.

    Args:
        logits: [rows, vocab], contiguous in the last dimension.
        indices: [n] rows of ``logits``.
        tokens: [n] token ids.
        counts: [n] numbers of most likely tokens to name, each at most vocab.

    Returns:
        Logprobs [n]; ranks [n], 1 + the number of greater logits; ids [n, max(counts)] and logprobs
        [n, max(counts)] of the most likely tokens in order of rank, of which row i has the first ``counts[i]``. Where a
        row's greatest logit is not finite, or there is a NaN, the logprob is NaN and the rest has no meaning.

    Raises:
        ValueError: a token or a count is not within the vocabulary.
    """
    indices, tokens, counts = (np.ascontiguousarray(x, np.int64) for x in (indices, tokens, counts))
    n, width = len(indices), int(counts.max(initial=0))
    logprobs, ranks = np.empty(n), np.empty(n, np.int64)
    top_ids, top_logprobs = np.empty((n, width), np.int64), np.empty((n, width))
    arrays = (a.ctypes.data for a in (indices, tokens, counts, logprobs, ranks))
    _cpu.token_logprobs(
        logits.ctypes.data,
        _stride(logits),
        n,
        logits.shape[1],
        *arrays,
        width,
        top_ids.ctypes.data,
        top_logprobs.ctypes.data,
    )
    return logprobs, ranks, top_ids, top_logprobs


def _stride(logits: NDArray[np.float32]) -> int:
    """Elements from a row to the next."""
    if logits.dtype != np.float32 or logits.strides[1] != 4 * (logits.shape[1] > 0):
        raise ValueError(f"logits must be float32 and contiguous in the last dimension, not {logits.dtype}")
    return logits.strides[0] // 4
