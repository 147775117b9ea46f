"""Arrays of the CPU kernels: an address, a shape and strides; and the measured limits of a CPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import UnrecordableError


class CpuArray:
    """An argument of compiled operations; keeps its memory alive.

    Views are cheap, and share the memory's ``owner``. There is no arithmetic but that of ``Kernels``: an operation of
    numpy would run once, while a step is recorded, and be left out of every later step.
    """

    __slots__ = ("__weakref__", "address", "dtype", "owner", "shape", "strides")

    def __init__(
        self, owner: Any, address: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None
    ) -> None:
        """``strides``: in elements; by default the array is contiguous."""
        self.owner = owner
        #: Of the first element.
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.strides = _contiguous_strides(shape) if strides is None else strides

    @classmethod
    def over(cls, values: np.ndarray) -> CpuArray:
        """An array over the memory of ``values``; ValueError if the engine has no such type."""
        dtype = DType.of(values)
        strides = tuple(stride // dtype.itemsize for stride in values.strides)
        return cls(values, values.__array_interface__["data"][0], values.shape, dtype, strides)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: DType) -> CpuArray:
        """Uninitialised memory, aligned to a cache line."""
        memory = np.empty(math.prod(shape) * dtype.itemsize + 64, np.uint8)
        address = memory.ctypes.data
        return cls(memory, address + -address % 64, shape, dtype)

    def numpy(self) -> np.ndarray:
        """The values, over the same memory."""
        size = self.dtype.itemsize
        strides = tuple(stride * size for stride in self.strides)
        interface = {"data": (self.address, False), "shape": self.shape, "strides": strides, "typestr": f"|V{size}"}
        return np.asarray(_Memory(self.owner, {**interface, "version": 3})).view(self.dtype.numpy)

    @property
    def is_contiguous(self) -> bool:
        """Whether there are no gaps; strides of dimensions of one are ignored."""
        expected = _contiguous_strides(self.shape)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, expected, strict=True))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> CpuArray:
        """A view of integers, slices with step 1, and None."""
        items = index if isinstance(index, tuple) else (index,)
        for item in items:
            if isinstance(item, slice):
                if item.step not in (None, 1):
                    raise UnrecordableError(f"a view of an array cannot have the step {item.step}")
            elif item is not None and not isinstance(item, int):
                raise UnrecordableError(f"{type(item).__name__} is no index of a view; rows are taken by Kernels")
        return self._like(self.numpy()[(*items, ...)])

    def reshape(self, *shape: int) -> CpuArray:
        """A view in another shape; -1 stands for one size.

        Raises:
            UnrecordableError: it would need a copy.
        """
        values = self.numpy()
        view = values.reshape(shape)
        if view.size and not np.may_share_memory(view, values):
            raise UnrecordableError(f"an array of strides {list(self.strides)} has no view of shape {list(shape)}")
        return self._like(view)

    def _like(self, view: np.ndarray) -> CpuArray:
        """The array of a view of this one's values."""
        strides = tuple(stride // self.dtype.itemsize for stride in view.strides)
        return CpuArray(self.owner, view.__array_interface__["data"][0], view.shape, self.dtype, strides)

    def __repr__(self) -> str:
        return f"CpuArray({list(self.shape)}, {self.dtype.value})"


class _Memory:
    """Memory with the interface from which numpy makes an array; the array keeps it, and so the owner, alive."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner, self.__array_interface__ = owner, interface


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


# ``octavo._cpu``, whose operations take arrays by address: callers keep them alive.

cpu: Any = importlib.import_module("octavo._cpu")  # compiled: nothing for a type checker to read

DTYPES = {DType.FLOAT32: cpu.Dtype.f32, DType.BFLOAT16: cpu.Dtype.bf16, DType.INT8: cpu.Dtype.i8}


def address(x: CpuArray | np.ndarray | None) -> int:
    """Address of an array; 0 without one."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    return 0 if x is None else x.address


def strided(x: CpuArray | None) -> tuple[int, int]:
    """Address of a matrix, and elements from row to row; 0 without one."""
    return (0, 0) if x is None else (x.address, x.strides[0])


def typed(x: CpuArray) -> tuple[int, int, Any]:
    """Address of a matrix, elements from row to row, and type."""
    return x.address, x.strides[0], DTYPES[x.dtype]


def cpu_read_gb_s(*, in_pieces: bool) -> float:
    """Read bandwidth of memory now, of the kernels' threads, in 10^9 bytes a second; ``in_pieces`` of 2 KiB."""
    measure = cpu.measure_chunk_bandwidth if in_pieces else cpu.measure_read_bandwidth
    return float(measure(cpu.num_threads())) / 1e9


class CpuLimits(msgspec.Struct, frozen=True):
    """Measured limits of all threads together."""

    threads: int
    #: Of floats and of integers, such as "avx512+avx512_vnni".
    instruction_sets: str
    #: Read bandwidth of memory in 10^9 bytes a second: in order, and in pieces of 2 KiB in random order, as in decode
    #: attention.
    read_gb_s: float
    chunk_gb_s: float
    #: In registers, in 10^9 operations a second, two for each multiply-add: float32 multiply-adds, dot products of
    #: bfloat16 pairs and of 8-bit quads; 0 if the instruction set has no such dot products.
    fma_gflops: float
    bf16_dot_gflops: float
    int8_dot_gops: float


def measure_cpu(threads: int | None = None) -> CpuLimits:
    """Measures for about a second; ``threads`` defaults to those of the kernels."""
    count = cpu.num_threads() if threads is None else threads
    return CpuLimits(
        threads=count,
        instruction_sets=cpu.isa(),
        read_gb_s=cpu.measure_read_bandwidth(count) / 1e9,
        chunk_gb_s=cpu.measure_chunk_bandwidth(count) / 1e9,
        fma_gflops=cpu.measure_fma_peak(count) / 1e9,
        bf16_dot_gflops=cpu.measure_bf16_dot_peak(count) / 1e9,
        int8_dot_gops=cpu.measure_int8_dot_peak(count) / 1e9,
    )
