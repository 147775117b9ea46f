"""Buffers of a recorded step: at fixed addresses, and reused once the recording drops them."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.cpu.array import CpuArray


@dataclass(eq=False)
class Lease:
    """The owner of a buffer's arrays: while one of them lives, the buffer is not reused."""

    buffer: np.ndarray
    #: What the rows of the array are, a ``cpu.Rows``.
    rows: Any
    #: Whether it holds what adapters add to a product, and nothing in steps without adapters.
    is_delta: bool = False


class Arena:
    """Allocates arrays with memory that lives as long as the arena.

    A recorded operation holds addresses, so its buffers must never move. When the last array of a buffer is gone, no
    later operation of the recording can use it, and the buffer is reused: operations are replayed in the order in which
    they are recorded, so the reuse is correct in replays too.
    """

    def __init__(self) -> None:
        self._owned: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: DType, rows: Any) -> CpuArray:
        """An uninitialised array; it and its views have a ``Lease`` as their owner."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = np.empty(size + 64, np.uint8)
            self._owned.append(buffer)
        lease = Lease(buffer, rows)
        weakref.finalize(lease, free.append, buffer)
        address = buffer.ctypes.data
        return CpuArray(lease, address + -address % 64, shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._owned)
