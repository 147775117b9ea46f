"""The choice of tokens from rows of logits, and logprobs, as one interface with a backend for each way to compute.

Every backend draws the same tokens, unless a rounding of the last bit decides what top-p keeps or which of two tokens
wins; their logprobs agree to about 1e-6. In each a row's result depends on nothing but the row, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.core.sampling_params import SamplingParams

#: What ``SamplingBackend.choose`` gives in place of a token, and why there is none.
NO_TOKEN = {
    -1: "the logits are NaN",
    -2: "the logits are infinite",
    -3: "no token is left to choose: every one of the vocabulary is masked",
}

#: The fields of ``Filters`` as a record, for an array that holds those of many rows.
FILTERS = np.dtype([("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8")])

#: Beyond it the distribution is uniform in float32 anyway, and 1 / temperature stays a normal number.
MAX_TEMPERATURE = 1e30

#: Stands for the logprob of an impossible token, as JSON has no infinity.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters of a row; a filter that is off has the value that keeps everything."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Filters:
        """Those of a request that does not sample greedily."""
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        return cls(min(params.temperature, MAX_TEMPERATURE), top_k, params.top_p, params.min_p)

    def keep_all(self, vocab_size: int) -> bool:
        """Whether every token with a finite logit survives."""
        return self.top_k >= vocab_size and self.top_p >= 1.0 and self.min_p <= 0.0


def mask_words(vocab_size: int) -> int:
    """Length of a row's packed mask: 32 tokens a word, token t at bit t % 32 of word t // 32; set means allowed."""
    return -(-vocab_size // 32)


def pack_mask(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """A packed mask uint32 [``mask_words(vocab_size)``] of the allowed tokens, bool [vocab_size]."""
    padded = np.zeros(32 * mask_words(len(allowed)), bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class PendingLogprobs(Protocol):
    """Logprobs that the device may still be busy with."""

    def wait(self) -> list[PositionLogprobs]:
        """One for each token asked for; may be called again."""
        ...


class SamplingBackend(ABC):
    """What is done to rows of logits [n, vocab], float32 and contiguous in the last dimension, where they are.

    A backend of a device queues its work on the current stream and returns. This class computes on the host as far as
    it goes.
    """

    def prepare(self, logits: Tensor) -> Tensor:
        """Logits of any type as the other methods take them: the same memory where it can be."""
        if logits.is_cpu and logits.dtype is torch.float32 and logits.is_contiguous():
            return logits  # most often; calls of torch that change nothing are not free
        return as_rows(logits.cpu())

    def to_device(self, values: NDArray[np.int64]) -> Tensor:
        """The values where the logits are, without waiting for the device."""
        return torch.from_numpy(values)

    @abstractmethod
    def choose_most_likely(self, logits: Tensor) -> Tensor:
        """As ``choose`` where no row draws and none is masked."""

    @abstractmethod
    def choose(
        self,
        logits: Tensor,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> Tensor:
        """A token for each row, or a key of ``NO_TOKEN``: int64 [n], where the logits are.

        The arrays may change as soon as it returns.

        Args:
            logits: [n, vocab]; masked tokens become -inf in place.
            filters: [n] records (``FILTERS``); a temperature of 0 takes the most likely token, the lowest id among
                equals.
            keys: [n, 2], hash keys of the rows that draw (``noise.keys``).
            mask: [n, ``mask_words(vocab)``], the tokens that each row may choose; None allows all to all rows.
        """

    @abstractmethod
    def logprobs(
        self, logits: Tensor, indices: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> PendingLogprobs:
        """Logprobs of ``tokens[i]`` in row ``indices[i]`` of the logits, and of its ``counts[i]`` most likely tokens.

        ``tokens``: int64 [n], where the logits are; with a negative one, the result has no meaning.
        """


class HostLogprobs:
    """Logprobs computed on the host, where there is nothing to wait for."""

    __slots__ = ("_found",)

    def __init__(self, found: list[PositionLogprobs]) -> None:
        self._found = found

    def wait(self) -> list[PositionLogprobs]:
        """See ``PendingLogprobs``."""
        return self._found


class HostCopy:
    """A tensor on its way to the host; nothing waits for it but ``wait``."""

    __slots__ = ("_copy", "_done")

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = values
        if values.is_cuda:
            # Pinned memory comes from torch's own pool, which hands it out again only after the copies in it are done.
            self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._copy.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """The tensor, on the host; its own memory if it was there already."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def as_rows(logits: Tensor) -> Tensor:
    """The same memory where it can be: float32, contiguous in the last dimension."""
    values = logits.detach().float()
    return values if values.stride(-1) == 1 else values.contiguous()


def as_position_logprobs(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    ranks: NDArray[np.int64],
    counts: NDArray[np.int64],
    top_ids: NDArray[np.int64],
    top_logprobs: NDArray[np.float64],
    vocab_size: int,
) -> list[PositionLogprobs]:
    """What a kernel found for n tokens, in the form and with the floor that ``numpy_sampling.position_logprobs`` gives.

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
