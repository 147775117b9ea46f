"""What a started engine reports: model, memory and kernels in log lines, and where the time went."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.config.kv_spec import GroupBlocks

GIB = 1 << 30
#: Prefix of the log lines about loading progress; a starting server shows them to anybody.
LOADING = "loading weights"


@dataclass(frozen=True)
class WorkerFacts:
    """A started worker. Memory in bytes."""

    #: With the instruction set and threads, or the GPU.
    kernels: str
    #: As in ``LayerContext.quantization``; None: not quantised.
    quantization: str | None
    weight_bytes: int
    #: KV cache on the device, and host blocks for preempted requests.
    cache_bytes: int
    host_cache_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    #: Log lines about resources such as adapters.
    preparations: list[str] = field(default_factory=list)
    #: The draft model and its memory; empty: none.
    drafter: str = ""


@dataclass(frozen=True)
class StartupFacts:
    model: str
    architecture: str
    #: Number of weights; tied ones count once.
    parameters: int
    dtype: str
    #: None: not quantised.
    checkpoint_quantization: str | None
    kv_cache_dtype: str
    #: One for each kind of KV cache.
    groups: list[GroupBlocks]
    block_size: int
    max_model_len: int
    #: Maximum concurrent requests of ``max_model_len`` tokens.
    full_length_requests: int
    max_num_seqs: int
    token_budget: int
    #: From the first worker until all are ready, without the search for model and tokenizer.
    seconds: float
    workers: list[WorkerFacts]

    def lines(self) -> list[str]:
        weights, cache, host = (
            sum(sizes) / GIB
            for sizes in zip(
                *((worker.weight_bytes, worker.cache_bytes, worker.host_cache_bytes) for worker in self.workers),
                strict=True,
            )
        )
        quantization = self.workers[0].quantization
        stored = self.checkpoint_quantization
        quantized = f", quantised to {quantization}" if quantization else ""
        if stored not in (None, quantization):
            quantized += f", dequantised from {stored}"
        ranks = [f" of rank {rank}" for rank in range(len(self.workers))] if len(self.workers) > 1 else [""]
        # The slowest worker decides.
        parts = {part: max(worker.seconds[part] for worker in self.workers) for part in self.workers[0].seconds}
        return [
            f"model: {self.model} ({self.architecture}), {_count(self.parameters)} parameters in "
            f"{self.dtype}{quantized}, {weights:.2f} GiB",
            *(f"kernels{rank}: {w.kernels}" for rank, w in zip(ranks, self.workers, strict=True)),
            f"KV cache: {self._cache(cache)}, at most "
            f"{self.full_length_requests} requests of {self.max_model_len} tokens at once; "
            f"{sum(group.num_host_blocks for group in self.groups)} host blocks ({host:.2f} GiB)"
            if self.groups
            else f"no KV cache: texts of up to {self.max_model_len} tokens are computed whole, each in one step",
            *self.workers[0].preparations,
            *([f"drafts: {self.workers[0].drafter}"] if self.workers[0].drafter else []),
            f"steps: at most {self.max_num_seqs} sequences run at once, {self.token_budget} tokens a step",
            f"ready in {self.seconds:.2f} s: " + ", ".join(f"{part} {taken:.2f} s" for part, taken in parts.items()),
        ]

    def _cache(self, gib: float) -> str:
        """Blocks by kind of layers; for windows, tokens would mislead."""
        size, memory = self.block_size, f"{gib:.2f} GiB in {self.kv_cache_dtype}"
        if len(self.groups) == 1 and self.groups[0].window is None:
            (group,) = self.groups
            return f"{group.num_blocks} blocks of {size} tokens ({group.num_blocks * size} tokens, {memory})"
        kinds = (
            f"{group.num_blocks} for all tokens ({group.num_blocks * size} tokens)"
            if group.window is None
            else f"{group.num_blocks} for windows of {group.window} tokens"
            if group.state_tokens is None
            else f"{group.num_blocks} recurrent states"
            for group in self.groups
        )
        return f"{memory} in blocks of {size} tokens, {' and '.join(kinds)}"


def _count(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} B"


# Profile of a start: phases of each process and, on demand, the time of imports.

#: "1" in the environment of a process that measures its imports.
VARIABLE = "_OCTAVO_PROFILE_IMPORTS"
#: Packages below these seconds are summed as others.
_LEAST = 0.004


class Phase(msgspec.Struct, array_like=True):
    """A part of a start; phases of different threads overlap."""

    name: str
    begin: float
    end: float


class ProcessProfile(msgspec.Struct, array_like=True):
    """The start of one process."""

    name: str
    begin: float
    #: Processor seconds of all threads.
    cpu_seconds: float
    phases: list[Phase]
    #: Seconds by package, without nested imports; threads are summed.
    imports: dict[str, float]

    def lines(self, origin: float) -> Iterator[str]:
        yield f"{self.name}: begun at {self.begin - origin:.3f} s, {self.cpu_seconds:.3f} s of processor time"
        for phase in self.phases:
            yield f"  {phase.begin - origin:7.3f} {phase.end - phase.begin:+7.3f}  {phase.name}"
        if self.imports:
            ordered = sorted(self.imports.items(), key=lambda entry: -entry[1])
            named = [f"{package} {seconds:.3f}" for package, seconds in ordered if seconds >= _LEAST]
            others = sum(seconds for _, seconds in ordered if seconds < _LEAST)
            yield f"  imports {sum(self.imports.values()):.3f}: {', '.join([*named, f'others {others:.3f}'])}"


_phases: list[Phase] = []
_imports: defaultdict[str, float] = defaultdict(float)


@contextmanager
def phase(name: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        _phases.append(Phase(name, begin, time.monotonic()))


def profile(name: str) -> ProcessProfile:
    phases = sorted(_phases, key=lambda phase: phase.begin)
    return ProcessProfile(name, process_begin(), time.process_time(), phases, dict(_imports))


def table(profiles: Sequence[ProcessProfile]) -> list[str]:
    """The lines of all processes; time 0 is the start of the first one."""
    return [line for each in profiles for line in each.lines(profiles[0].begin)]


def process_begin() -> float:
    """The time at which this process was started, within 10 ms; without /proc, when its interpreter was."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        age = time.process_time()
    return time.monotonic() - age


def measure_imports() -> None:
    """Counts the seconds of each package's imports, here and in child processes."""
    os.environ[VARIABLE] = "1"
    bootstrap: Any = sys.modules["_frozen_importlib"]  # as ``python -X importtime`` does
    find_and_load, local = bootstrap._find_and_load, threading.local()

    def timed(name: str, import_: Any) -> Any:
        inner, local.inner = getattr(local, "inner", 0.0), 0.0
        begin = time.perf_counter()
        try:
            return find_and_load(name, import_)
        finally:
            taken = time.perf_counter() - begin
            parts = name.split(".")  # of this project, each room is a package
            _imports[".".join(parts[: 2 if parts[0] == "octavo" else 1])] += taken - local.inner
            local.inner = inner + taken

    bootstrap._find_and_load = timed


if os.environ.get(VARIABLE) == "1":
    measure_imports()
