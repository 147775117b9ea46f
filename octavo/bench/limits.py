"""What this machine can do at best, to measure kernels against: none is faster than memory or than the registers."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Measured limits of some threads together; on a shared machine, of the moment too."""

    threads: int
    instruction_set: str
    #: Read from memory, in 10^9 bytes a second.
    read_gb_s: float
    #: float32 multiply-adds in registers, in 10^9 operations a second, two for each.
    fma_gflops: float


def measure_limits(threads: int | None = None) -> Limits:
    """Measures for about a second, with as many threads as the kernels use unless told otherwise.

    Raises:
        ImportError: ``octavo._cpu`` is not built.
        ValueError: ``threads`` is not positive.
    """
    cpu: Any = importlib.import_module("octavo._cpu")
    count = cpu.num_threads() if threads is None else threads
    return Limits(
        threads=count,
        instruction_set=cpu.isa(),
        read_gb_s=cpu.measure_read_bandwidth(count) / 1e9,
        fma_gflops=cpu.measure_fma_peak(count) / 1e9,
    )
