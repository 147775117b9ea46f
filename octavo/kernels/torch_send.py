"""Sends the inputs of a step to a GPU as one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.torch_pinned import host_empty

#: Bytes; where an array begins in a packed copy is a multiple of it. Kernels are compiled for pointers that are.
_ALIGNMENT = 16


class PinnedSend:
    """Packs arrays into a pinned buffer and queues one copy on the current stream.

    Owns two buffers used in turn, so that one is filled while the other is read; before one is filled again its last
    copy is waited for. With no more than two steps in flight that copy is over, as its step is.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """``cuda`` has ``Event``; tests give another."""
        self._device = device
        self._cuda = cuda
        self._buffers = [_Buffer(1 << 13, self._pin) for _ in range(2)]

    @property
    def _pin(self) -> bool:
        return self._device.type == "cuda"

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """See ``Send``: views of one new tensor."""
        longs = [array for array in arrays if array.itemsize == 8]
        ints = [array for array in arrays if array.itemsize == 4]
        long_sizes, end_of_longs = _layout(longs, _ALIGNMENT // 8)
        int_sizes, end_of_ints = _layout(ints, _ALIGNMENT // 4)
        size = end_of_longs + end_of_ints // 2
        buffer = self._next(size)
        _pack(longs, long_sizes, buffer.longs)
        _pack(ints, int_sizes, buffer.longs[end_of_longs:].view(np.int32))
        packed = buffer.memory[:size].to(self._device, non_blocking=True, copy=True)
        buffer.copied = self._cuda.Event()
        buffer.copied.record()
        return _unpack(longs, long_sizes, packed[:end_of_longs]) + _unpack(
            ints, int_sizes, packed[end_of_longs:].view(torch.int32)
        )

    def _next(self, size: int) -> _Buffer:
        """The buffer whose turn it is, of at least ``size`` numbers and free to be written."""
        buffer = self._buffers.pop(0)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.longs) < size:
            buffer = _Buffer(2 * size, self._pin)
        self._buffers.append(buffer)
        return buffer


class _Buffer:
    """Host memory for so many int64, also as an array, and the event after the last copy from it."""

    def __init__(self, size: int, pin: bool) -> None:
        self.memory = host_empty(size, torch.int64) if pin else torch.empty(size, dtype=torch.int64)
        self.longs: NDArray[np.int64] = self.memory.numpy()
        self.copied: Any = None


def _layout(arrays: Sequence[NDArray[Any]], multiple: int) -> tuple[list[int], int]:
    """Numbers in each array and in the gap after it, by turns, and in all of them."""
    sizes: list[int] = []
    end = 0
    for array in arrays:
        gap = -array.size % multiple
        sizes += (array.size, gap)
        end += array.size + gap
    return sizes, end


def _pack(arrays: Sequence[NDArray[Any]], sizes: list[int], target: NDArray[Any]) -> None:
    start = 0
    for i, array in enumerate(arrays):
        size = sizes[2 * i]
        target[start : start + size] = array.reshape(-1)
        start += size + sizes[2 * i + 1]


def _unpack(arrays: Sequence[NDArray[Any]], sizes: list[int], packed: Tensor) -> list[Tensor]:
    parts = packed.split(sizes)[::2]  # every second one is a gap
    return [p if a.ndim == 1 else p.view(a.shape) for p, a in zip(parts, arrays, strict=True)]
