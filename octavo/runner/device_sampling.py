"""Sampling on the device: what it is asked for goes there in one small copy, what it chose comes back in another."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import PositionLogprobs
from octavo.runner.logprobs import as_position_logprobs
from octavo.runner.sample_output import SampleOutput, output_of


class HostCopy:
    """A device tensor on its way to the host; nothing waits for it but ``wait``."""

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
        """The tensor, on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


class DeviceLogprobs:
    """Logprobs under way (see ``PendingLogprobs``)."""

    __slots__ = ("_counts", "_found", "_tokens", "_vocab_size")

    def __init__(self, found: Tensor, tokens: Tensor, counts: NDArray[np.int64], vocab_size: int) -> None:
        self._found, self._tokens = HostCopy(found), HostCopy(tokens)
        self._counts, self._vocab_size = counts, vocab_size

    def wait(self) -> list[PositionLogprobs]:
        """One for each token; with a token that is none, one without meaning."""
        from octavo.kernels.triton.logprobs import unpack

        found = unpack(self._found.wait(), len(self._counts))
        logprobs, ranks, ids, named = (values.numpy() for values in found)
        tokens = self._tokens.wait().numpy()
        return as_position_logprobs(tokens, logprobs, ranks, self._counts, ids, named, self._vocab_size)


class DeviceSample:
    """A choice under way (see ``PendingSample``); holds all that was asked for when it was started."""

    __slots__ = ("_copy", "_failed", "_scored", "tokens")

    def __init__(
        self, tokens: Tensor, failed: dict[int, str], scored: list[tuple[NDArray[np.int64], DeviceLogprobs]]
    ) -> None:
        self.tokens = tokens
        self._copy = HostCopy(tokens)
        self._failed = failed
        self._scored = scored

    def wait(self) -> SampleOutput:
        """See ``PendingSample``."""
        output = output_of(self._copy.wait().numpy().copy(), self._failed)
        for which, logprobs in self._scored:
            found = zip(which.tolist(), logprobs.wait(), strict=True)
            output.logprobs.update((i, position) for i, position in found if i not in output.errors)
        return output


class DeviceSampling:
    """The sampler's arithmetic on a device. Owns nothing but the answer to rows that ask for nothing."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        # Triton takes a second to import.
        from octavo.kernels.triton import logprobs, sampling

        self._sampling, self._logprobs = sampling, logprobs
        self._vocab_size = vocab_size
        self._device = device
        self._pinned = device.type == "cuda"
        self._nothing = torch.zeros(5 * max_rows, dtype=torch.int64, device=device)

    def choose_most_likely(self, logits: Tensor) -> Tensor:
        """The most likely token of each row, or a key of ``REASONS``: int64 [n], on the device."""
        return self._choose(logits, self._nothing[: 5 * len(logits)].view(5, len(logits)))

    def choose(self, logits: Tensor, filters: NDArray[np.void], keys: NDArray[np.uint32]) -> Tensor:
        """A token for each row, or a key of ``REASONS``: int64 [n], on the device; see ``Arithmetic.choose``."""
        asked = torch.empty(5, len(filters), dtype=torch.int64, pin_memory=self._pinned)
        host = asked.numpy()
        for line, name in enumerate(("temperature", "top_k", "top_p", "min_p")):
            host[line] = filters[name].view(np.int64)
        host[4] = np.ascontiguousarray(keys).view(np.int64)[:, 0]
        return self._choose(logits, asked.to(self._device, non_blocking=True))

    def _choose(self, logits: Tensor, asked: Tensor) -> Tensor:
        """``asked``: a line each of temperature, top_k, top_p, min_p and key, as 64 bits."""
        temperature, top_k, top_p, min_p, key = asked
        as_float = torch.float64
        return self._sampling.choose_tokens(
            logits,
            temperature.view(as_float),
            top_k,
            top_p.view(as_float),
            min_p.view(as_float),
            key.view(torch.int32).view(-1, 2),
        )

    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> DeviceLogprobs:
        """Logprobs of ``tokens[i]`` (on the device) in row ``rows[i]``, and of the ``counts[i]`` most likely tokens."""
        counts = np.minimum(counts, self._vocab_size)
        width = int(counts.max(initial=0))
        found = self._logprobs.token_logprobs(logits, self.to_device(rows), tokens, width)
        return DeviceLogprobs(found, tokens, counts, self._vocab_size)

    def to_device(self, values: NDArray[np.int64]) -> Tensor:
        """A copy on the device, without waiting for it."""
        staged = torch.from_numpy(values)
        return (staged.pin_memory() if self._pinned else staged.clone()).to(self._device, non_blocking=True)
