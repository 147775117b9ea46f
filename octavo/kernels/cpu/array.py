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
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        count = extent * size if 0 not in self.shape else 0
        interface = {"data": (self.address, False), "shape": (count,), "typestr": "|u1", "version": 3}
        flat = np.asarray(_Memory(self.owner, interface)).view(self.dtype.numpy)
        return np.lib.stride_tricks.as_strided(flat, self.shape, [stride * size for stride in self.strides])

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
        offset, shape, strides, dim = 0, [], [], 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            size, stride = self.shape[dim], self.strides[dim]
            if isinstance(item, slice):
                start, stop, step = item.indices(size)
                if step != 1:
                    raise UnrecordableError(f"a view of an array cannot have the step {step}")
                shape.append(max(0, stop - start))
                strides.append(stride)
            elif isinstance(item, int):
                start = item + size if item < 0 else item
                if not 0 <= start < size:
                    raise IndexError(f"index {item} is out of range: the dimension has {size}")
            else:
                raise UnrecordableError(f"{type(item).__name__} is no index of a view; rows are taken by Kernels")
            offset += start * stride
            dim += 1
        shape += self.shape[dim:]
        strides += self.strides[dim:]
        address = self.address + offset * self.dtype.itemsize
        return CpuArray(self.owner, address, tuple(shape), self.dtype, tuple(strides))

    def reshape(self, *shape: int) -> CpuArray:
        """A view in another shape; -1 stands for one size.

        Raises:
            UnrecordableError: it would need a copy.
        """
        total, rest = math.prod(self.shape), math.prod(n for n in shape if n != -1)
        new = tuple(total // max(1, rest) if n == -1 else n for n in shape)
        if math.prod(new) != total:
            raise ValueError(f"an array of shape {list(self.shape)} cannot have the shape {list(shape)}")
        strides = _contiguous_strides(new) if self.is_contiguous else _strides_of_view(self.shape, self.strides, new)
        if strides is None:
            raise UnrecordableError(f"an array of strides {list(self.strides)} has no view of shape {list(new)}")
        return CpuArray(self.owner, self.address, new, self.dtype, strides)

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


def _strides_of_view(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a view in another shape; None if it needs a copy."""
    # Runs of dimensions without a gap between them: (numbers, stride of the last).
    runs: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = runs[-1][0] * n, stride
        else:
            runs.append((n, stride))
    out: list[int] = []
    for n in reversed(new):
        if n == 1:
            out.append(0)
            continue
        if not runs or runs[-1][0] % n:
            return None
        count, stride = runs.pop()
        out.append(stride)
        if count > n:
            runs.append((count // n, stride * n))
    return tuple(reversed(out))


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
