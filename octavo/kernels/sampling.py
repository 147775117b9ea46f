"""The interface of sampling backends: tokens and logprobs from rows of logits.

All backends sample the same tokens, except where rounding in the last bit decides what top-p keeps or which of two
tokens wins; their logprobs agree to about 1e-6. In each, a row's result depends bit for bit on the row alone.
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
from octavo.kernels.pinned import host_empty

#: Results of ``SamplingBackend.choose`` that are no tokens, and the reasons.
NO_TOKEN = {
    -1: "the logits are NaN",
    -2: "the logits are infinite",
    -3: "no token is left to choose: every one of the vocabulary is masked",
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
    """Samples from rows of logits [n, vocab], float32 and contiguous in the last dimension, on their device.

    A backend of a GPU queues its work on the current stream and returns. The defaults here are for logits on the host.
    """

    def prepare(self, logits: Tensor) -> Tensor:
        """Logits of any type as the other methods expect them, in the same memory if possible."""
        if logits.is_cpu and logits.dtype is torch.float32 and logits.is_contiguous():
            return logits  # the usual case; torch calls without effect are not free
        return as_rows(logits.cpu())

    def to_device(self, values: NDArray[np.int64]) -> Tensor:
        """The values on the logits' device, without waiting for it."""
        return torch.from_numpy(values)

    @abstractmethod
    def choose_most_likely(self, logits: Tensor) -> Tensor:
        """As ``choose``, with all rows greedy and without masks."""

    @abstractmethod
    def choose(
        self,
        logits: Tensor,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> Tensor:
        """A token for each row, or a key of ``NO_TOKEN``: int64 [n], on the logits' device.

        The arrays may be changed after the call returns.

        Args:
            logits: [n, vocab]; masked tokens become -inf in place.
            filters: [n] records (``FILTERS``); temperature 0 takes the most likely token, the lowest id among equals.
            keys: [n, 2], hash keys of the rows that are not greedy (``noise.keys``).
            mask: [n, ``mask_words(vocab)``], the allowed tokens of each row; None allows all.
        """

    @abstractmethod
    def logprobs(
        self, logits: Tensor, indices: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
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


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    __slots__ = ("_copy", "_done")

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = values
        if values.is_cuda:
            # Torch's pool reuses pinned memory only after copies into it are done.
            self._copy = host_empty(values.shape, values.dtype)
            self._copy.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """The tensor on the host; the same tensor if it was there already."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def as_rows(logits: Tensor) -> Tensor:
    """The logits as float32, contiguous in the last dimension, in the same memory if possible."""
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
