"""Backends as tests call them: with tensors of torch for weights, and in the place of the CPU backend's own arrays.

Those are over the same memory, so that what an operation changes in place is seen.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels import forward_batch
from octavo.kernels.cpu.array import CpuArray
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch
from octavo.kernels.interface import (
    Adapters,
    Kernels,
    LayerCache,
    LowRank,
    LowRankEmbedding,
    PackedExperts,
    PackedHeads,
    PackedWeight,
)
from octavo.kernels.torch_backend import from_torch, to_torch
from tests.torch_types import engine_dtype

#: By where the memory of a tensor begins: the array that the tensor was made of, and what keeps the memory.
_ARRAYS: weakref.WeakValueDictionary[int, CpuArray] = weakref.WeakValueDictionary()
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
#: Makes a batch of tensors.
_TENSORS: Any = SimpleNamespace(wrap=to_torch)


def make_kernels(threads: int | None = None) -> Any:
    """A CPU backend that takes and gives tensors, as do the weights and adapters that it makes."""
    from octavo.kernels.cpu.backend import CpuKernels  # compiled, which not all who import this have

    kernels = CpuKernels()
    if threads is not None:
        kernels.set_threads(threads)
    return KernelsFacade(kernels)


def of_torch(kernels: Kernels) -> Any:
    """A backend of torch that takes its weights as tensors, and types as torch's."""
    return KernelsFacade(kernels, on_cpu=False)


def make_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, block_size: int, **options: Any
) -> ForwardBatch:
    """See ``octavo.kernels.forward_batch``: a batch of tensors."""
    arrays: dict[str, Any] = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    return forward_batch.make_batch(query_lens, seq_lens, block_tables.numpy(), block_size, _TENSORS, **arrays)


def to_array(x: Tensor) -> CpuArray:
    """The array over a tensor's memory; for a tensor that was made of one, that one."""
    start = x.untyped_storage().data_ptr()
    known, owner = (_ARRAYS.get(start), _OWNERS.get(start)) if start else (None, None)
    array = CpuArray(x if owner is None else owner, x.data_ptr(), tuple(x.shape), engine_dtype(x.dtype), x.stride())
    return array if known is None or _place(known) != _place(array) else known


def _place(x: CpuArray) -> Any:
    return x.address, x.shape, x.dtype, x.strides


def to_tensor(x: CpuArray) -> Tensor:
    """The tensor over an array's memory."""
    tensor = to_torch(x.numpy())
    start = tensor.untyped_storage().data_ptr()
    _ARRAYS[start], _OWNERS[start] = x, x.owner
    return tensor


def inward(value: Any, on_cpu: bool = True) -> Any:
    """An argument as the backend takes it."""
    if isinstance(value, Tensor):
        return to_array(value) if on_cpu else value
    if isinstance(value, torch.dtype):
        return engine_dtype(value)
    return value._inner if isinstance(value, Facade) else _inside(value, lambda item: inward(item, on_cpu))


def outward(value: Any, on_cpu: bool = True) -> Any:
    """A result as tests take it."""
    if isinstance(value, CpuArray):
        return to_tensor(value)
    if isinstance(value, (PackedWeight, PackedHeads, PackedExperts, Adapters, LowRank, LowRankEmbedding)):
        return Facade(value, on_cpu)
    return _inside(value, lambda item: outward(item, on_cpu))


def values(value: Any) -> Any:
    """Arguments of packing: arrays of numpy in the place of tensors."""
    if isinstance(value, Tensor):
        return from_torch(value)
    return [values(item) for item in value] if isinstance(value, (list, tuple)) else value


def _inside(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, (ForwardBatch, LayerCache)):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        made = {id(field): convert(field) for field in fields.values()}  # an array may be two fields
        return dataclasses.replace(value, **{name: made[id(field)] for name, field in fields.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(convert, value))
    return type(value)(map(convert, value)) if type(value) in (tuple, list) else value


class Facade:
    """A thing of a backend, such as a packed weight; its methods take and give tensors, and take types of torch."""

    def __init__(self, inner: Any, on_cpu: bool = True) -> None:
        """``on_cpu``: whether its arrays are those of the CPU backend."""
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_on_cpu", on_cpu)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return functools.partial(self._call, value) if inspect.isroutine(value) else outward(value, self._on_cpu)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, inward(value, self._on_cpu))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        taken = {name: inward(value, self._on_cpu) for name, value in kwargs.items()}
        return outward(function(*[inward(value, self._on_cpu) for value in args], **taken), self._on_cpu)


class KernelsFacade(Facade):
    """A backend, whose methods that take values take tensors for them."""

    def pack(
        self, parts: Any, bias: Any = None, quantization: str | None = None, *, dtype: Any = None, **options: Any
    ) -> Any:
        """By default of the first matrix' type."""
        dtype = inward(dtype or (parts[0].dtype if isinstance(parts[0], Tensor) else torch.float32))
        packed = self._inner.pack(values(parts), values(bias), quantization, dtype=dtype, **options)
        return outward(packed, self._on_cpu)

    def pack_heads(self, weight: Any, dtype: Any = None) -> Any:
        """By default of the matrix' type."""
        return outward(self._inner.pack_heads(values(weight), inward(dtype or weight.dtype)), self._on_cpu)

    def array(self, x: Any, dtype: DType | None = None) -> Tensor:
        """See ``ArrayMaker``."""
        return self._call(self._inner.array, values(x), dtype)

    def wrap(self, x: Any) -> Tensor:
        """See ``ArrayMaker``."""
        return self._call(self._inner.wrap, values(x))

    def write(self, target: Tensor, x: Any) -> None:
        """See ``ArrayMaker``."""
        self._call(self._inner.write, target, values(x))

    def take_rows(self, x: Tensor, rows: Any) -> Tensor:
        """See ``ArrayMaker``."""
        return self._call(self._inner.take_rows, x, values(rows))

    def capture(self, forward: Forward, largest: BatchSize) -> Forward:
        """``forward`` takes and gives tensors, in the recording and in its replays."""
        replay = self._inner.capture(lambda batch: inward(forward(outward(batch))), largest)
        return lambda batch: outward(replay(inward(batch)))

    def host_call(self, function: Callable[[Tensor], None], x: Tensor) -> Tensor:
        """The function gets a tensor."""
        return to_tensor(self._inner.host_call(lambda rows: function(to_torch(rows)), inward(x)))
