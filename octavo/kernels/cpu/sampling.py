"""The sampling backend of ``octavo._cpu``.

Each row is computed by one thread: its result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.dtypes import DType
from octavo.kernels.cpu.array import CpuArray, cpu
from octavo.kernels.sampling import (
    FILTERS,
    ROWS_AT_ONCE,
    HostLogprobs,
    SamplingBackend,
    as_position_logprobs,
    mask_words,
)


class CompiledSampling(SamplingBackend):
    """All rows in one call of ``octavo._cpu``, on the kernels' threads.

    Owns the arguments for greedy rows and their addresses: numpy takes longer to return addresses than the kernel does
    for one row.
    """

    rows_at_once = ROWS_AT_ONCE

    def __init__(self) -> None:
        self._make_plain(1)

    def _make_plain(self, rows: int) -> None:
        self._rows = rows
        self._plain = np.zeros(rows, FILTERS), np.zeros((rows, 2), np.uint32)
        self._out = np.empty(rows, np.int64)
        filters, keys = self._plain
        self._addresses = filters.ctypes.data, keys.ctypes.data, 0, self._out.ctypes.data

    def prepare(self, logits: CpuArray) -> CpuArray:
        if logits.dtype is not DType.FLOAT32 or (len(logits) and logits.strides[1] != 1):
            raise ValueError(f"logits must be float32 and contiguous in the last dimension, not {logits}")
        return logits

    def copy_rows(self, logits: CpuArray, rows: NDArray[np.int64]) -> CpuArray:
        return CpuArray.over(logits.numpy()[rows])

    def edit_rows(self, logits: CpuArray, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        values = logits.numpy()
        return {row: values[row] for row in rows}

    def choose_most_likely(self, logits: CpuArray) -> NDArray[np.int64]:
        rows, vocab = logits.shape
        if rows > self._rows:
            self._make_plain(2 * rows)
        cpu.choose_tokens(logits.address, logits.strides[0], rows, vocab, *self._addresses)
        return self._out[:rows].copy()

    def choose(
        self,
        logits: CpuArray,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.int64]:
        return choose_tokens(logits.numpy(), filters, keys, mask)

    def logprobs(
        self, logits: CpuArray, indices: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> HostLogprobs:
        vocab = logits.shape[1]
        counts, tokens = np.minimum(counts, vocab), np.maximum(tokens, 0)
        logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits.numpy(), indices, tokens, counts)
        return HostLogprobs(as_position_logprobs(tokens, logprobs, ranks, counts, top_ids, top_logprobs, vocab))


def choose_tokens(
    logits: NDArray[np.float32],
    filters: NDArray[np.void],
    keys: NDArray[np.uint32],
    mask: NDArray[np.uint32] | None = None,
) -> NDArray[np.int64]:
    """See ``SamplingBackend.choose``; the logits are contiguous in the last dimension."""
    rows, vocab = logits.shape
    filters, keys = np.ascontiguousarray(filters), np.ascontiguousarray(keys)
    if mask is not None:
        mask = np.ascontiguousarray(mask, np.uint32)
        if mask.shape != (rows, mask_words(vocab)):
            raise ValueError(f"a mask must have shape [{rows}, {mask_words(vocab)}], not {list(mask.shape)}")
    out = np.empty(rows, np.int64)
    arrays = (0 if a is None else a.ctypes.data for a in (filters, keys, mask, out))
    cpu.choose_tokens(logits.ctypes.data, _stride(logits), rows, vocab, *arrays)
    return out


def token_logprobs(
    logits: NDArray[np.float32], indices: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Log-softmax of ``tokens[i]`` in row ``indices[i]``, its rank, and the ``counts[i]`` most likely tokens.

    Returns:
        Logprobs [n]; ranks [n], 1 + the number of greater logits; ids [n, max(counts)] and logprobs [n, max(counts)] of
        the most likely tokens in order of rank, ``counts[i]`` of them in row i. If a row's greatest logit is not
        finite, or there is a NaN, the logprob is NaN and the rest is undefined.
    """
    indices, tokens, counts = (np.ascontiguousarray(x, np.int64) for x in (indices, tokens, counts))
    n, width = len(indices), int(counts.max(initial=0))
    logprobs, ranks = np.empty(n), np.empty(n, np.int64)
    top_ids, top_logprobs = np.empty((n, width), np.int64), np.empty((n, width))
    arrays = (a.ctypes.data for a in (indices, tokens, counts, logprobs, ranks))
    cpu.token_logprobs(
        logits.ctypes.data, _stride(logits), n, logits.shape[1], *arrays, width, top_ids.ctypes.data,
        top_logprobs.ctypes.data,
    )  # fmt: skip
    return logprobs, ranks, top_ids, top_logprobs


def _stride(logits: NDArray[np.float32]) -> int:
    if logits.dtype != np.float32 or logits.strides[1] != 4 * (logits.shape[1] > 0):
        raise ValueError(f"logits must be float32 and contiguous in the last dimension, not {logits.dtype}")
    return logits.strides[0] // 4
