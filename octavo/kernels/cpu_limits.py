"""Peak rates of a CPU, measured by the compiled kernels."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec


def cpu_read_gb_s(*, in_pieces: bool) -> float:
    """Read bandwidth of memory now, of the kernels' threads, in 10^9 bytes a second; ``in_pieces`` of 2 KiB."""
    cpu: Any = importlib.import_module("octavo._cpu")
    measure = cpu.measure_chunk_bandwidth if in_pieces else cpu.measure_read_bandwidth
    return float(measure(cpu.num_threads())) / 1e9


class CpuLimits(msgspec.Struct, frozen=True):
    """Measured limits of a number of threads together."""

    threads: int
    #: Of floats and of integers, as "avx512+avx512_vnni".
    instruction_sets: str
    #: Read bandwidth of memory, in 10^9 bytes a second.
    read_gb_s: float
    #: The same in pieces of 2 KiB in random order, as decode attention reads blocks.
    chunk_gb_s: float
    #: In registers, in 10^9 operations a second, two for each multiply-add: float32 multiply-adds, dot products of
    #: bfloat16 pairs and of 8-bit quads; 0 where the instruction set has no such dot products.
    fma_gflops: float
    bf16_dot_gflops: float
    int8_dot_gops: float


def measure_cpu(threads: int | None = None) -> CpuLimits:
    """Measures for about a second; ``threads`` defaults to those of the kernels.

    Raises:
        ImportError: ``octavo._cpu`` is not built.
        ValueError: ``threads`` is not positive.
    """
    cpu: Any = importlib.import_module("octavo._cpu")
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
