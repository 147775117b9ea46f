"""The interface of sampling backends: tokens and logprobs from rows of logits.

All backends sample the same tokens, except where rounding in the last bit decides what top-p keeps or which of two
tokens wins; their logprobs agree to about 1e-6. In each, a row's result depends bit for bit on the row alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import PositionLogprobs
from octavo.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from octavo.kernels.arrays import Array

#: Results of ``SamplingBackend.choose`` that are no tokens, and the reasons.
NO_TOKEN = {
    -1: "the logits are NaN",
    -2: "the logits are infinite",
    -3: f"{NO_TOKEN_LEFT}: every one of the vocabulary is masked",
}

#: The fields of ``Filters`` as a record type, for arrays of many rows.
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
        """Whether all filters are disabled."""
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


class SamplingBackend(ABC):
    """Samples from rows of logits [n, vocab], as ``prepare`` makes them.

    A backend of a GPU queues its work on the current stream and returns. The defaults here are for tokens on the host.
    """

    @abstractmethod
    def prepare(self, logits: Array) -> Any:
        """Logits of any type as the other methods expect them, in the same memory if possible."""

    def to_device(self, values: NDArray[np.int64]) -> Any:
        """Token ids where the logits are, without waiting for it."""
        return values

    def fetch(self, tokens: Any) -> Callable[[], NDArray[np.int64]]:
        """Begins to copy tokens to the host; the returned function waits for them."""
        return lambda: tokens

    def select(self, tokens: Any, indices: NDArray[np.int64]) -> Any:
        """The tokens at these indices, where they are."""
        return tokens[indices]

    @abstractmethod
    def copy_rows(self, logits: Any, rows: NDArray[np.int64]) -> Any:
        """A copy of these rows of the logits, where they are."""

    @abstractmethod
    def edit_rows(self, logits: Any, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        """These rows on the host, to be changed: float32 [vocab] of each."""

    def put_rows(self, logits: Any, edited: dict[int, NDArray[np.float32]]) -> None:
        """Puts edited rows back, where they are not the logits' own memory."""
        return None

    @abstractmethod
    def choose_most_likely(self, logits: Any) -> Any:
        """As ``choose``, with all rows greedy and without masks."""

    @abstractmethod
    def choose(
        self,
        logits: Any,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> Any:
        """A token for each row, or a key of ``NO_TOKEN``: int64 [n], where the logits are.

        The arrays may be changed after the call returns.

        Args:
            logits: [n, vocab]; masked tokens become -inf in place.
            filters: [n] records (``FILTERS``); temperature 0 takes the most likely token, the lowest id among equals.
            keys: [n, 2], hash keys of the rows that are not greedy (``noise.keys``).
            mask: [n, ``mask_words(vocab)``], the allowed tokens of each row; None allows all.
        """

    @abstractmethod
    def logprobs(
        self, logits: Any, indices: NDArray[np.int64], tokens: Any, counts: NDArray[np.int64]
    ) -> PendingLogprobs:
        """Logprobs of ``tokens[i]`` in row ``indices[i]`` of the logits, and of its ``counts[i]`` most likely tokens.

        ``tokens``: int64 [n], on the logits' device; the result for a negative one is undefined.
        """


class HostLogprobs:
    """Logprobs that are on the host already."""

    __slots__ = ("_found",)

    def __init__(self, found: list[PositionLogprobs]) -> None:
        self._found = found

    def wait(self) -> list[PositionLogprobs]:
        """See ``PendingLogprobs``."""
        return self._found


def as_position_logprobs(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    ranks: NDArray[np.int64],
    counts: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_logprobs: NDArray[np.float64],
    vocab_size: int,
) -> list[PositionLogprobs]:
    """A kernel's logprobs of n tokens in the form, and with the floor, of ``numpy_sampling.position_logprobs``.

    NaN is the logprob in a row without probabilities. Row i has ``counts[i]`` valid columns in ``top_ids`` and
    ``top_logprobs`` [n, max(counts)].
    """
    broken = np.isnan(logprobs)
    # fmax: a NaN, too, becomes the floor.
    ranks, counts = np.where(broken, vocab_size, ranks), np.where(broken, 0, counts)
    columns = (tokens, np.fmax(logprobs, FLOOR), ranks, counts, top_ids, np.fmax(top_logprobs, FLOOR))
    return [
        PositionLogprobs(token, logprob, rank, ids[:k], best[:k])
        for token, logprob, rank, k, ids, best in zip(*(column.tolist() for column in columns), strict=True)
    ]
