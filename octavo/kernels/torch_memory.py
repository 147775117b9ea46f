"""The memory of a GPU, and what the largest step takes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from octavo.core.errors import InsufficientMemoryError


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    def reset_peak(self) -> None:
        """Frees cached memory and resets the peak."""

    def peak(self) -> int:
        """Peak of this process's tensors since ``reset_peak``, fragmentation included."""

    def outside(self) -> int:
        """In use by anything but this process's tensors: the driver's context, compiled code, other programs."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """Bytes not in use."""


class CudaMemory:
    """Memory of a CUDA device, as torch and the driver count it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def reset_peak(self) -> None:
        """Empties torch's cache of freed memory first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Segments that torch has reserved from the driver, fragmentation included."""
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
        """As the driver counts it, plus what torch has cached."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + kept)


def measure_peak(run_largest_step: Callable[[], object], memory: DeviceMemory) -> int:
    """Bytes of the device in use at the peak of the largest step, weights and other programs included.

    The step is run twice: the first time compiles kernels and makes workspaces that stay. Memory that it
    no longer holds is freed, so that the KV cache can use it.

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


def in_use(memory: DeviceMemory) -> int:
    """Bytes of the device that something holds; what torch has cached is freed first."""
    memory.reset_peak()
    return memory.peak() + memory.outside()
