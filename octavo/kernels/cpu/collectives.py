"""Collectives of ranks on one machine through shared memory, as operations of a tape."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.kernels.communicator import Communicator
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.cpu.compiled import address, cpu, strided

#: Default number of floats that a rank exchanges at once (1 MiB).
SLOT_FLOATS = 1 << 18


class SharedMemoryCommunicator:
    """One rank of a group (see ``kernels.communicator.Communicator``)."""

    def __init__(self, memory: Any, rank: int, size: int, *, timeout: float = 60.0) -> None:
        """Joins the group of the ranks that map ``memory``.

        Args:
            memory: writable, zero at first, aligned to 64 bytes, of at least ``bytes_for(size)`` bytes.
            rank: this rank.
            size: ranks in the group.
            timeout: seconds that a rank waits for the others before a collective fails with a RuntimeError.
        """
        self.rank, self.size = rank, size
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._group = cpu.Communicator(self._memory.ctypes.data, len(self._memory), rank, size, timeout)

    @staticmethod
    def bytes_for(size: int, slot_floats: int = SLOT_FLOATS) -> int:
        """Bytes of shared memory for ``size`` ranks and ``all_gather`` of rows of at most ``slot_floats`` floats."""
        return int(cpu.Communicator.bytes_for(size, slot_floats))

    def all_reduce_op(self, x: CpuArray, bias: CpuArray | None = None, add: CpuArray | None = None) -> Any:
        """The operation that sums x [T, width] over the ranks in place, then adds bias [width] and add [T, width].

        All are float32 and contiguous. The caller keeps them alive.
        """
        return cpu.all_reduce(self._group, x.address, x.shape[1], address(bias), *strided(add))

    def all_gather_op(self, x: CpuArray, out: CpuArray) -> Any:
        """The operation that gathers x [T, width] into out [T, size * width], float32 and contiguous."""
        return cpu.all_gather(self._group, x.address, out.address, x.shape[1])

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        """See ``Communicator``."""
        self.all_reduce_op(CpuArray.over(np.asarray(x))).run(cpu.Step(len(x)))
        return x

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """See ``Communicator``."""
        out = np.empty((len(x), self.size * x.shape[1]), np.float32)
        self.all_gather_op(CpuArray.over(np.asarray(x)), CpuArray.over(out)).run(cpu.Step(len(x)))
        return out


class HostCommunicator:
    """A group of any kind, called on the host at its place in the tape."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def all_reduce_op(self, x: CpuArray, bias: CpuArray | None = None, add: CpuArray | None = None) -> Any:
        """See ``SharedMemoryCommunicator``."""

        def run(rows: int) -> None:
            part = x[:rows].numpy()
            total = np.asarray(self._group.all_reduce(part))
            if bias is not None:
                total += bias.numpy()
            if add is not None:
                total += add[:rows].numpy()
            if total is not part:
                part[:] = total

        return cpu.host_call(run)

    def all_gather_op(self, x: CpuArray, out: CpuArray) -> Any:
        """See ``SharedMemoryCommunicator``."""

        def run(rows: int) -> None:
            out[:rows].numpy()[:] = np.asarray(self._group.all_gather(x[:rows].numpy()))

        return cpu.host_call(run)

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        """See ``Communicator``."""
        return self._group.all_reduce(x)

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """See ``Communicator``."""
        return self._group.all_gather(x)
