"""How much of a GPU's memory the largest step takes, by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from octavo.core.errors import InsufficientMemoryError
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, make_batch


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    def reset_peak(self) -> None:
        """Gives back what is kept for later, and begins to watch for the peak."""

    def peak(self) -> int:
        """Most that this process's tensors have taken since ``reset_peak``, with what is lost between them."""

    def outside(self) -> int:
        """In use now by all that is no tensor of this process: the driver's context, compiled code, other programs."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """In use by nobody."""


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def reset_peak(self) -> None:
        """Empties torch's own store of freed memory first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Segments that torch had taken from the driver: what does not fit between two tensors is in use as well."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def outside(self) -> int:
        """What the driver counts and torch does not."""
        free, total = torch.cuda.mem_get_info(self._device)
        return max(0, int(total - free - torch.cuda.memory_reserved(self._device)))

    def total(self) -> int:
        """As the driver counts it."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """As the driver counts it, and what torch keeps for later."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + kept)


def measure_peak(run_largest_step: Callable[[], object], memory: DeviceMemory) -> int:
    """Bytes of the device in use at the peak of the largest step, weights and other programs included.

    The step is run twice: the first time compiles kernels and makes workspaces that stay. What it needed and nobody
    holds is given back, so that the KV cache can have it until the next such step.

    Raises:
        InsufficientMemoryError: the step does not fit.
    """
    try:
        run_largest_step()
        memory.reset_peak()
        run_largest_step()
    except torch.OutOfMemoryError as e:
        raise InsufficientMemoryError(
            "a step of max_num_batched_tokens tokens and max_num_seqs sequences does not fit beside the weights in the "
            f"GPU's {memory.total() / (1 << 30):.2f} GiB; lower these: {e}"
        ) from None
    peak = memory.peak() + memory.outside()
    memory.reset_peak()
    return peak


def largest_step(size: BatchSize, device: torch.device | str) -> ForwardBatch:
    """A step with as many tokens and as many sequences as there may be, which all sample.

    The last sequences have prompts as long as they may be until the tokens are used up, the others decode. Everything
    lies in block 0 and overwrites itself there, so a cache of one block serves; ``max_seq_len`` is that of the longest
    context, which decides what attention sets aside for its partial results.
    """
    lens = [1] * size.sequences
    left = size.tokens - len(lens)
    for i in reversed(range(len(lens))):
        lens[i] += min(left, size.max_seq_len - 1)
        left -= lens[i] - 1
    tables = torch.zeros(size.shape("GSB"), dtype=torch.int32)
    batch = make_batch(lens, lens, tables, size.block_size, device=device)
    return replace(batch, max_seq_len=size.max_seq_len)
