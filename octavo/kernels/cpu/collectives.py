"""Collectives of ranks on one machine through shared memory, as operations that a tape can hold."""

from __future__ import annotations

import importlib
import mmap
from typing import Any

import numpy as np
from torch import Tensor

_cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read

#: Floats that a rank publishes at once, by default (1 MiB).
SLOT_FLOATS = 1 << 18


class SharedMemoryCommunicator:
    """One rank's side of a group (see ``kernels.communicator.Communicator``). Sums are in the order of the ranks."""

    def __init__(self, memory: Any, rank: int, size: int, *, timeout: float = 60.0) -> None:
        """``memory`` is a writable buffer that all ranks map, all zero and aligned to 64 bytes (a page, say).

        Args:
            memory: of at least ``bytes_for(size)`` bytes.
            rank: this rank.
            size: ranks in the group.
            timeout: seconds that a rank waits for the others before a collective fails with a RuntimeError.
        """
        self.rank, self.size = rank, size
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._group = _cpu.Communicator(self._memory.ctypes.data, len(self._memory), rank, size, timeout)

    @staticmethod
    def bytes_for(size: int, slot_floats: int = SLOT_FLOATS) -> int:
        """Bytes of shared memory for ``size`` ranks; a row of an ``all_gather`` may have ``slot_floats`` numbers."""
        return int(_cpu.Communicator.bytes_for(size, slot_floats))

    @classmethod
    def of_threads(cls, size: int, *, timeout: float = 60.0) -> list[SharedMemoryCommunicator]:
        """A group of threads of this process: the sides of all ranks."""
        memory = mmap.mmap(-1, cls.bytes_for(size))
        return [cls(memory, rank, size, timeout=timeout) for rank in range(size)]

    def all_reduce_op(self, x: Tensor) -> Any:
        """The operation that sums x [T, width], float32 and contiguous, in place."""
        return _cpu.all_reduce(self._group, x.data_ptr(), x.stride(0))

    def all_gather_op(self, x: Tensor, out: Tensor) -> Any:
        """The operation that joins x [T, width] to out [T, size * width], float32 and contiguous."""
        return _cpu.all_gather(self._group, x.data_ptr(), out.data_ptr(), x.shape[1])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        self.all_reduce_op(x).run(_cpu.Step(x.shape[0]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        out = x.new_empty(x.shape[0], self.size * x.shape[1])
        self.all_gather_op(x, out).run(_cpu.Step(x.shape[0]))
        return out
