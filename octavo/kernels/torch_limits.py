"""Peak rates of a device of torch, and timing of calls: events on a GPU, a clock on a CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

#: A call to be timed; its result is ignored.
Work = Callable[[], object]


class DeviceLimits(msgspec.Struct, frozen=True):
    """Measured limits of one device."""

    device: str
    #: Bandwidth of a copy within the device's memory (read and written), and of a sum (read), in 10^9 bytes a second.
    copy_gb_s: float
    read_gb_s: float
    #: Rate of a large product of random bfloat16 matrices, in 10^12 operations a second; a multiply-add is two.
    bf16_tflops: float

    @property
    def bandwidth_gb_s(self) -> float:
        """The larger of the two; shares of bandwidth are relative to this."""
        return max(self.copy_gb_s, self.read_gb_s)


#: Size of the tensor that is copied and summed: many times a GPU's caches.
COPIED_BYTES = 4 << 30


def measure_device(device: torch.device | str, copied_bytes: int = COPIED_BYTES, size: int = 8192) -> DeviceLimits:
    """Measures for a second or two.

    Args:
        device: a GPU (or a CPU, to try it out).
        copied_bytes: size of the tensor that is copied and summed; never more than a quarter of a GPU's free memory.
        size: rows and columns of the matrices.
    """
    device = torch.device(device)
    if device.type == "cuda":
        copied_bytes = min(copied_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    elements = copied_bytes // 4
    copy, read = _copy_and_read(torch.randn(elements, device=device))
    # Random numbers, as on zeros a GPU draws less power and runs faster.
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def product() -> Tensor:
        return torch.mm(a, b, out=out)

    return DeviceLimits(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        copy_gb_s=2 * 4 * elements / copy / 1e9,
        read_gb_s=4 * elements / read / 1e9,
        bf16_tflops=2 * size**3 / seconds_per_call(product, device) / 1e12,
    )


def _copy_and_read(source: Tensor) -> tuple[float, float]:
    """Seconds to copy a tensor, and to sum it."""
    target = torch.empty_like(source)
    copy = seconds_per_call(lambda: target.copy_(source), source.device)
    return copy, seconds_per_call(source.sum, source.device)


def seconds_per_call(work: Work, device: torch.device | str, budget: float = 0.3) -> float:
    """Median seconds of a call, over as many as fit in ``budget`` seconds (3 to 1000), after three warm-up calls.

    On a GPU the calls are queued without waiting; work that is shorter than its launch should be a graph (``graphed``).
    """
    for _ in range(3):
        work()
    once = _clocked(work, device)
    count = max(3, min(1000, int(budget / max(once, 1e-6))))
    if torch.device(device).type == "cuda":
        return statistics.median(_event_times(work, count))
    return statistics.median(_clocked(work, device) for _ in range(count))


def graphed(work: Work, device: torch.device | str) -> Work:
    """On a GPU the replay of ``work`` as a captured graph, without launch overhead; elsewhere ``work`` itself."""
    if torch.device(device).type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # first calls compile and allocate, which must not be captured
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _clocked(work: Work, device: torch.device | str) -> float:
    gpu = torch.device(device).type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _event_times(work: Work, count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def describe_gpus() -> list[dict[str, Any]]:
    """Each GPU's name, memory (bytes), compute capability and multiprocessors."""
    return [_describe(i) for i in range(torch.cuda.device_count())]


def _describe(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "memory_bytes": {"total": total, "available": free},
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def cuda_version() -> str | None:
    """The one that torch was built with."""
    return torch.version.cuda
