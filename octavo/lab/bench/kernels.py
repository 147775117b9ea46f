"""Each kernel at the shapes of a model: time, bandwidth, operations a second, share of the machine's peak rates."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from octavo.core.model_config import ModelConfig
from octavo.kernels.cpu.array import CpuLimits, cpu_read_gb_s, measure_cpu
from octavo.kernels.forward_batch import BatchSize
from octavo.kernels.interface import Kernels
from octavo.lab.bench.kernel_cases import (
    BLOCK,
    KernelCase,
    Shapes,
    Types,
    attention_cases,
    expert_cases,
    linear_cases,
    low_rank_cases,
    state_cases,
)


@dataclass(frozen=True)
class KernelFigures:
    """Measured rates of one kernel at one shape."""

    kernel: str
    shape: str
    rows: int
    microseconds: float
    #: Bytes that must be read (weights or KV cache), and operations; a multiply-add is two.
    gb_per_s: float
    gflop_per_s: float
    #: What the machine could read, measured before and after the case (the mean), and compute in these types.
    limit_gb_per_s: float
    limit_gflop_per_s: float
    #: Of the limit that applies: the larger of the shares of both.
    share_of_limit: float
    #: The same of the fastest run. Limits of operations are a fastest run's, too, so where processors are shared with
    #: others this is what the kernel reaches, and ``share_of_limit`` what was left of it.
    share_at_best: float
    #: Load of the machine in the last minute: processes that ran or wanted to.
    load: float


#: A case is repeated for at least so long.
LEAST_SECONDS = 0.4
#: 10^9 bytes read and operations done a second that a case could reach now.
Limits = Callable[[KernelCase], tuple[float, float]]


def cpu_limits() -> tuple[CpuLimits, Limits]:
    """Peaks of the processor, measured once, and the limits with them and the bandwidth at the moment."""
    peaks = measure_cpu()
    rates = {
        "float32": peaks.fma_gflops,
        "bfloat16": peaks.bf16_dot_gflops or peaks.fma_gflops,
        "int8": peaks.int8_dot_gops or peaks.fma_gflops,
    }
    return peaks, lambda case: (cpu_read_gb_s(in_pieces=case.in_pieces), rates[case.arithmetic])


#: Rows at which instruction sets are compared, and from how many times as fast on another one is worth a warning.
COMPARED_ROWS, FASTER = 64, 1.2


def compare_instruction_sets(kernels: Kernels, config: ModelConfig, types: Types) -> dict[str, float]:
    """Least microseconds of one of the model's products, for each instruction set that may be chosen here.

    The sets are those of integers if the weights are quantised, else those of floats; generic is left out. They are
    measured in turn, and the choice is as before afterwards.
    """
    cpu: Any = importlib.import_module("octavo._cpu")
    before, available = cpu.isa(), cpu.available_isas()
    sets = available.floats if types.quantization is None else available.integers
    other = f"+{cpu.integer_isa()}" if types.quantization is None else f"{cpu.float_isa()}+"
    case = next(iter(linear_cases(kernels, config, types, Shapes([COMPARED_ROWS], [], []))))
    least: dict[str, float] = {}
    try:
        for _ in range(2):
            for name in sets:
                if name != "generic":
                    cpu.choose_isa(name + other if other.startswith("+") else other + name)
                    seconds = _seconds(kernels, case, "cpu")[1] / case.calls
                    least[name] = min(seconds * 1e6, least.get(name, float("inf")))
    finally:
        cpu.choose_isa(before)
    return least


def measure(
    kernels: Kernels,
    config: ModelConfig,
    types: Types,
    shapes: Shapes,
    *,
    limits: Limits,
    device: str = "cpu",
) -> Iterator[KernelFigures]:
    """Measures linear layers, adapters, experts, attention and recurrent states, against the limits of each.

    Raises:
        ConfigError: the backend does not support such weights.
    """
    for cases in (linear_cases, low_rank_cases, expert_cases, attention_cases, state_cases):
        for case in cases(kernels, config, types, shapes):
            yield measure_case(kernels, case, device, limits)


def measure_case(kernels: Kernels, case: KernelCase, device: str, limits: Limits) -> KernelFigures:
    """Measures one kernel at one shape, and its limits right before and after it."""
    before, limit_gflops = limits(case)
    median, best = (seconds / case.calls for seconds in _seconds(kernels, case, device))
    limit_gb = (before + limits(case)[0]) / 2
    bandwidth, rate = case.bytes / median / 1e9, case.flops / median / 1e9
    share = max(bandwidth / limit_gb, rate / limit_gflops)
    return KernelFigures(
        kernel=case.kernel,
        shape=case.shape,
        rows=case.rows,
        microseconds=median * 1e6,
        gb_per_s=bandwidth,
        gflop_per_s=rate,
        limit_gb_per_s=limit_gb,
        limit_gflop_per_s=limit_gflops,
        share_of_limit=share,
        share_at_best=share * median / best,
        load=os.getloadavg()[0],
    )


def _seconds(kernels: Kernels, case: KernelCase, device: str) -> tuple[float, float]:
    """Median and least seconds of a run of all calls; the minimum favours short cases on a busy machine."""
    if device == "cuda":
        from octavo.kernels.torch_backend import graphed, seconds_per_call

        seconds = seconds_per_call(graphed(lambda: case.forward(case.batch), device), device)
        return seconds, seconds
    replay = kernels.capture(case.forward, BatchSize(case.rows, 1, 1, 1, BLOCK))
    replay(case.batch)
    times: list[float] = []
    deadline = time.perf_counter() + LEAST_SECONDS
    while len(times) < 5 or time.perf_counter() < deadline:
        start = time.perf_counter()
        replay(case.batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)
