"""Groups of ranks that are threads of this process."""

from __future__ import annotations

import mmap

from octavo.kernels.cpu.backend import SharedMemoryCommunicator


def thread_group(size: int, timeout: float = 60.0) -> list[SharedMemoryCommunicator]:
    """The communicators of a group, which wait ``timeout`` seconds for each other."""
    memory = mmap.mmap(-1, SharedMemoryCommunicator.bytes_for(size))
    return [SharedMemoryCommunicator(memory, rank, size, timeout=timeout) for rank in range(size)]
