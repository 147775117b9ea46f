"""The sampler's arithmetic over whole rows of logits: numpy, the truth, and the compiled kernels, the same but fast.

Both draw the same tokens, unless a rounding of the last bit decides what top-p keeps or which of two tokens wins; their
logprobs agree to about 1e-6. In both a row's result depends on nothing but the row, bit for bit.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.runner.draw import Drawer
from octavo.runner.filters import RECORD, Filters
from octavo.runner.logprobs import as_position_logprobs, position_logprobs

#: What ``choose`` gives in place of a token, and why there is none.
REASONS = {
    -1: "the logits are NaN",
    -2: "the logits are infinite",
    -3: "no token is left to choose: every one of the vocabulary is masked",
}


class Arithmetic(Protocol):
    """What the sampler does to rows of logits [n, vocab], float32 and contiguous in the last dimension."""

    def choose_most_likely(self, logits: Tensor) -> NDArray[np.int64]:
        """As ``choose`` where no row draws; logits in the host's memory."""
        ...

    def choose(
        self, logits: NDArray[np.float32], filters: NDArray[np.void], keys: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """A token for each row, or a key of ``REASONS``.

        Args:
            logits: [n, vocab].
            filters: [n] records (``filters.RECORD``); a temperature of 0 takes the most likely token, the lowest id
                among equals.
            keys: [n, 2], hash keys of the rows that draw.
        """
        ...

    def logprobs(
        self,
        logits: NDArray[np.float32],
        indices: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> list[PositionLogprobs]:
        """Logprobs (see ``logprobs``) of ``tokens[i]`` in row ``indices[i]``, and ``counts[i]`` most likely tokens."""
        ...


def fastest_arithmetic(vocab_size: int) -> Arithmetic:
    """The compiled one if ``octavo._cpu`` was built."""
    if importlib.util.find_spec("octavo._cpu") is None:
        return NumpyArithmetic(vocab_size)
    return CompiledArithmetic()


class NumpyArithmetic:
    """Row by row in numpy; owns scratch memory for one row."""

    def __init__(self, vocab_size: int) -> None:
        self._drawer = Drawer(vocab_size)

    def choose_most_likely(self, logits: Tensor) -> NDArray[np.int64]:
        """See ``Arithmetic``."""
        rows = len(logits)
        return self.choose(logits.numpy(), np.zeros(rows, RECORD), np.zeros((rows, 2), np.uint32))

    def choose(
        self, logits: NDArray[np.float32], filters: NDArray[np.void], keys: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """See ``Arithmetic``."""
        # numpy: its argmax over CPU memory is 13 times as fast as torch's, and in both the lowest id wins a tie.
        tokens = logits.argmax(axis=-1)
        best = logits[np.arange(len(logits)), tokens]
        with np.errstate(over="ignore"):  # overflows to infinity are meant: such a token is out of the race
            for i in np.flatnonzero((filters["temperature"] > 0.0) & np.isfinite(best)).tolist():
                tokens[i] = self._drawer.draw(logits[i], best[i], Filters(*filters[i].item()), keys[i])
        tokens[np.isnan(best)] = -1  # argmax finds NaN where there is one
        tokens[np.isposinf(best)] = -2
        tokens[np.isneginf(best)] = -3
        return tokens

    def logprobs(
        self,
        logits: NDArray[np.float32],
        indices: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> list[PositionLogprobs]:
        """See ``Arithmetic``."""
        asked = zip(indices.tolist(), tokens.tolist(), counts.tolist(), strict=True)
        return [position_logprobs(logits[i], token, k) for i, token, k in asked]


class CompiledArithmetic:
    """By ``octavo._cpu``: all rows in one call, on the threads that the kernels use."""

    def __init__(self) -> None:
        from octavo.kernels.cpu import sampling

        self._kernels = sampling
        self._plain = sampling.SameFilters(np.zeros(1, RECORD))

    def choose_most_likely(self, logits: Tensor) -> NDArray[np.int64]:
        """See ``Arithmetic``."""
        if len(logits) > self._plain.rows:
            self._plain = self._kernels.SameFilters(np.zeros(2 * len(logits), RECORD))
        return self._plain.choose_tokens(logits.data_ptr(), logits.stride(0), *logits.shape)

    def choose(
        self, logits: NDArray[np.float32], filters: NDArray[np.void], keys: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """See ``Arithmetic``."""
        return self._kernels.choose_tokens(logits, filters, keys)

    def logprobs(
        self,
        logits: NDArray[np.float32],
        indices: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> list[PositionLogprobs]:
        """See ``Arithmetic``."""
        vocab = logits.shape[1]
        counts = np.minimum(counts, vocab)
        found, ranks, top_ids, top_found = self._kernels.token_logprobs(logits, indices, tokens, counts)
        return as_position_logprobs(tokens, found, ranks, counts, top_ids, top_found, vocab)
