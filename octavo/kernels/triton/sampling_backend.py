"""Sampling on a GPU, as a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.kernels.sampling import SamplingBackend, as_position_logprobs
from octavo.kernels.torch_pinned import host_copy, host_empty
from octavo.kernels.torch_sampling import HostCopy, as_rows
from octavo.kernels.triton.logprobs import token_logprobs, unpack
from octavo.kernels.triton.sampling import choose_tokens


class DeviceLogprobs:
    """Logprobs that the device may still be computing (see ``PendingLogprobs``)."""

    __slots__ = ("_counts", "_found", "_tokens", "_vocab_size")

    def __init__(self, found: Tensor, tokens: Tensor, counts: NDArray[np.int64], vocab_size: int) -> None:
        self._found, self._tokens = HostCopy(found), HostCopy(tokens)
        self._counts, self._vocab_size = counts, vocab_size

    def wait(self) -> list[PositionLogprobs]:
        """One for each token; with a token that is none, one without meaning."""
        found = unpack(self._found.wait(), len(self._counts))
        logprobs, ranks, ids, named = (values.numpy() for values in found)
        tokens = self._tokens.wait().numpy()
        return as_position_logprobs(tokens, logprobs, ranks, self._counts, ids, named, self._vocab_size)


class TritonSampling(SamplingBackend):
    """Sampling on a device. Owns the filters of greedy rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._pinned = device.type == "cuda"
        self._plain = torch.zeros(5, dtype=torch.int64, device=device)

    def prepare(self, logits: Tensor) -> Tensor:
        """See ``SamplingBackend``."""
        return as_rows(logits)

    def to_device(self, values: NDArray[Any]) -> Tensor:
        """See ``SamplingBackend``; a copy, so the array may change."""
        staged = torch.from_numpy(values)
        return (host_copy(staged) if self._pinned else staged.clone()).to(self._device, non_blocking=True)

    def fetch(self, tokens: Tensor) -> Callable[[], NDArray[np.int64]]:
        """Beside the device's work."""
        copy = HostCopy(tokens)
        return lambda: copy.wait().numpy()

    def select(self, tokens: Tensor, indices: NDArray[np.int64]) -> Tensor:
        """See ``SamplingBackend``."""
        return tokens[self.to_device(indices)]

    def copy_rows(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """See ``SamplingBackend``."""
        return logits[self.to_device(rows)]

    def edit_rows(self, logits: Tensor, rows: list[int]) -> dict[int, NDArray[np.float32]]:
        """Copies."""
        copies = self.copy_rows(logits, np.array(rows, np.int64)).cpu().numpy()
        return dict(zip(rows, copies, strict=True))

    def put_rows(self, logits: Tensor, edited: dict[int, NDArray[np.float32]]) -> None:
        """So that all rows are sampled by the same kernels."""
        values = torch.from_numpy(np.stack(list(edited.values())))
        logits[self.to_device(np.array(list(edited), np.int64))] = values.to(logits.device)

    def choose_most_likely(self, logits: Tensor) -> Tensor:
        """See ``SamplingBackend``."""
        rows = len(logits)
        if 5 * rows > len(self._plain):
            self._plain = torch.zeros(10 * rows, dtype=torch.int64, device=self._device)
        return _choose(logits, self._plain[: 5 * rows].view(5, rows), None)

    def choose(
        self,
        logits: Tensor,
        filters: NDArray[np.void],
        keys: NDArray[np.uint32],
        mask: NDArray[np.uint32] | None = None,
    ) -> Tensor:
        """See ``SamplingBackend``; filters and keys are copied to the device at once, and the mask in another copy."""
        shape = (5, len(filters))
        asked = host_empty(shape, torch.int64) if self._pinned else torch.empty(shape, dtype=torch.int64)
        host = asked.numpy()
        for line, name in enumerate(("temperature", "top_k", "top_p", "min_p")):
            host[line] = filters[name].view(np.int64)
        host[4] = np.ascontiguousarray(keys).view(np.int64)[:, 0]
        allowed = None if mask is None else self.to_device(np.ascontiguousarray(mask).view(np.int32))
        return _choose(logits, asked.to(self._device, non_blocking=True), allowed)

    def logprobs(
        self, logits: Tensor, indices: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> DeviceLogprobs:
        """See ``SamplingBackend``."""
        counts = np.minimum(counts, self._vocab_size)
        width = int(counts.max(initial=0))
        found = token_logprobs(logits, self.to_device(indices), tokens, width)
        return DeviceLogprobs(found, tokens, counts, self._vocab_size)


def _choose(logits: Tensor, asked: Tensor, mask: Tensor | None) -> Tensor:
    """``asked``: a line each of temperature, top_k, top_p, min_p and key, as 64 bits."""
    temperature, top_k, top_p, min_p, key = asked
    as_float = torch.float64
    return choose_tokens(
        logits,
        temperature.view(as_float),
        top_k,
        top_p.view(as_float),
        min_p.view(as_float),
        key.view(torch.int32).view(-1, 2),
        mask,
    )
