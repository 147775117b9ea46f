"""Weights of a GPU in host memory, so the device's memory is free.

Every tensor object stays; only its storage is emptied and filled again, so references to tensors remain valid.
Captured graphs hold addresses: they must be dropped before, and captured again after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.interface import Kernels
from octavo.kernels.timing import KernelClock
from octavo.kernels.torch_pinned import host_empty
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer

#: Objects that layers refer to but do not own.
_SHARED = (Kernels, KernelClock, LayerContext)
_PLAIN = (str, bytes, int, float, complex, type(None), slice, torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True)
class _EmptiedStorage:
    """One storage that was emptied."""

    tensors: list[Tensor]
    #: Size in bytes, and the content.
    size: int
    kept: Tensor
    #: Offset, shape and stride of each of ``tensors``, where they were detached from their storage.
    views: list[tuple[int, torch.Size, tuple[int, ...]]]


@dataclass(frozen=True)
class SleepState:
    """What ``wake_up`` needs to bring everything back."""

    emptied: list[_EmptiedStorage]

    @property
    def bytes_freed(self) -> int:
        """Device memory that was freed."""
        return sum(p.size for p in self.emptied)

    def wake_up(self) -> None:
        """See ``wake_up``."""
        wake_up(self)


@torch.inference_mode()
def put_to_sleep(networks: Layer | Sequence[Layer]) -> SleepState:
    """Moves the weights to host memory.

    No step may run, and no captured graph be replayed, before ``wake_up``.
    """
    emptied: list[_EmptiedStorage] = []
    try:
        for tensors in _by_storage(_tensors(networks)):
            emptied.append(_empty(tensors))
    except BaseException:  # such as no host memory: undo
        wake_up(SleepState(emptied))
        raise
    return SleepState(emptied)


@torch.inference_mode()
def wake_up(state: SleepState) -> None:
    """Brings the weights back; the tensors are those of before.

    If another program has taken the memory, torch's error is passed on, and the call can be repeated.
    """
    for p in state.emptied:
        storage = p.tensors[0].untyped_storage()
        if p.views:
            storage = torch.from_numpy(np.empty(p.size, dtype=np.uint8)).untyped_storage()
            for tensor, (offset, shape, stride) in zip(p.tensors, p.views, strict=True):
                tensor.set_(storage, offset, shape, stride)
        elif storage.nbytes() == 0:
            storage.resize_(p.size)
        _bytes_of(storage).copy_(p.kept, non_blocking=True)
    if any(p.tensors[0].is_cuda for p in state.emptied):
        torch.cuda.synchronize()  # the host memory of the copies is freed next


def _empty(tensors: list[Tensor]) -> _EmptiedStorage:
    storage = tensors[0].untyped_storage()
    size = storage.nbytes()
    kept = _host_memory(size, tensors[0].is_cuda)
    kept.copy_(_bytes_of(storage))
    if storage.resizable():
        storage.resize_(0)
        return _EmptiedStorage(tensors, size, kept, [])
    # Memory that torch did not allocate is freed when no tensor refers to it.
    views = [(int(tensor.storage_offset()), tensor.shape, tensor.stride()) for tensor in tensors]
    for tensor in tensors:
        tensor.set_(torch.UntypedStorage(0), 0, (0,), (1,))
    return _EmptiedStorage(tensors, size, kept, views)


def _host_memory(size: int, pinned: bool) -> Tensor:
    return host_empty(size, torch.uint8) if pinned else torch.empty(size, dtype=torch.uint8)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors of each storage that is not empty."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), []).append(tensor)
    return list(found.values())


def _tensors(root: object) -> Iterator[Tensor]:
    """Every tensor that can be reached from a network, or several, once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, (*_PLAIN, *_SHARED)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            stack += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []
