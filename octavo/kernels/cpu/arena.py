"""Buffers of a recorded step: at fixed addresses, and reused once the recording drops them."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor


class Arena:
    """Allocates tensors with memory that lives as long as the arena.

    A recorded operation holds addresses, so its buffers must never move. When the last tensor of a buffer is gone, no
    later operation of the recording can use it, and the buffer is reused: operations are replayed in the order in which
    they are recorded, so the reuse is correct in replays too.
    """

    def __init__(self) -> None:
        self._owned: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if free:
            buffer = free.pop()
        else:
            buffer = np.empty(size + 64, dtype=np.uint8)
            self._owned.append(buffer)
        start = -buffer.ctypes.data % 64
        # Only the storage of the tensor and of its views keeps this view of the buffer alive.
        view = buffer[start : start + size]
        weakref.finalize(view, free.append, buffer)
        return torch.from_numpy(view).view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._owned)
