"""What an engine and its workers got at their start, and the lines that say so."""

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
#: Begins the lines of the log that say how far the weights are read, which a server that starts shows to anybody.
LOADING = "loading weights"


@dataclass(frozen=True)
class WorkerFacts:
    """One worker. Memory in bytes."""

    #: The kernels with their instruction set and threads, or with their GPU.
    kernels: str
    #: Format of its matrices, as in ``LayerContext.quantization``; None: in the engine's dtype.
    quantization: str | None
    weight_bytes: int
    #: The KV cache on the device, and the host blocks of preempted requests.
    cache_bytes: int
    host_cache_bytes: int
    #: Seconds of each part of the start.
    seconds: dict[str, float] = field(default_factory=dict)
    #: What it keeps of what requests need, as adapters: a line for a kind that has something to say.
    preparations: list[str] = field(default_factory=list)
    #: What drafts with a network of its own, and its share of the memory; empty if nothing does.
    drafter: str = ""


@dataclass(frozen=True)
class StartupFacts:
    """An engine that is ready."""

    model: str
    architecture: str
    #: Weights of the whole network, tied ones once.
    parameters: int
    dtype: str
    #: How the checkpoint is quantised; None: it is not.
    checkpoint_quantization: str | None
    kv_cache_dtype: str
    #: The KV cache: a group for each kind of layers.
    groups: list[GroupBlocks]
    block_size: int
    #: Longest sequence in tokens.
    max_model_len: int
    #: Most requests of ``max_model_len`` tokens that can run at once.
    full_length_requests: int
    #: Most sequences that run at once, and most tokens of a step.
    max_num_seqs: int
    token_budget: int
    #: From the first worker on until all is ready; without finding the model and its tokenizer.
    seconds: float
    #: By rank.
    workers: list[WorkerFacts]

    def lines(self) -> list[str]:
        """A line each for the model, the kernels of each worker, the KV cache, and the seconds."""
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
        several = len(self.workers) > 1
        kernels = [
            f"kernels{f' of rank {rank}' if several else ''}: {w.kernels}" for rank, w in enumerate(self.workers)
        ]
        # The slowest worker decides.
        parts = {part: max(worker.seconds[part] for worker in self.workers) for part in self.workers[0].seconds}
        return [
            f"model: {self.model} ({self.architecture}), {_count(self.parameters)} parameters in "
            f"{self.dtype}{quantized}, {weights:.2f} GiB",
            *kernels,
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
        """The blocks of each kind of layers; with a window it is not their tokens that count."""
        size, memory = self.block_size, f"{gib:.2f} GiB in {self.kv_cache_dtype}"
        if len(self.groups) == 1 and self.groups[0].window is None:
            (group,) = self.groups
            return f"{group.num_blocks} blocks of {size} tokens ({group.num_blocks * size} tokens, {memory})"
        kinds = (
            f"{group.num_blocks} for all tokens ({group.num_blocks * size} tokens)"
            if group.window is None
            else f"{group.num_blocks} for windows of {group.window} tokens"
            for group in self.groups
        )
        return f"{memory} in blocks of {size} tokens, {' and '.join(kinds)}"


def _count(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} B"


# Where the time of a start goes, by process: its phases and, if asked for, what each package's imports took.

#: "1" in the environment of a process that measures its imports.
VARIABLE = "_OCTAVO_PROFILE_IMPORTS"
#: Seconds of a package's imports below which it is counted with the others.
_LEAST = 0.004


class Phase(msgspec.Struct, array_like=True):
    """A part of a start; phases of several threads overlap."""

    name: str
    begin: float
    end: float


class ProcessProfile(msgspec.Struct, array_like=True):
    """The start of one process."""

    name: str
    begin: float
    #: Processor time of all its threads so far, in seconds.
    cpu_seconds: float
    phases: list[Phase]
    #: Seconds that a package's modules took, without what they import; of several threads together.
    imports: dict[str, float]

    def lines(self, origin: float) -> Iterator[str]:
        """A line for each phase, with its begin after ``origin`` and its length."""
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
    """What runs within is a phase of this process's start."""
    begin = time.monotonic()
    try:
        yield
    finally:
        _phases.append(Phase(name, begin, time.monotonic()))


def profile(name: str) -> ProcessProfile:
    """The start of this process so far."""
    begin = process_begin()
    phases = sorted(_phases, key=lambda phase: phase.begin)
    return ProcessProfile(name, begin, time.process_time(), phases, dict(_imports))


def table(profiles: Sequence[ProcessProfile]) -> list[str]:
    """The lines of all processes; times count from the begin of the first one."""
    origin = profiles[0].begin
    return [line for each in profiles for line in each.lines(origin)]


def process_begin() -> float:
    """When this process was started, within 10 ms; without /proc, when its interpreter was."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        age = time.process_time()
    return time.monotonic() - age


def _package(module: str) -> str:
    """The package that a module is counted with: of this project, its room."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "octavo" else 1])


def measure_imports() -> None:
    """From now on the seconds of each package's imports are counted, in this process and in those that it starts."""
    os.environ[VARIABLE] = "1"
    bootstrap: Any = sys.modules["_frozen_importlib"]  # what ``python -X importtime`` measures
    find_and_load, local = bootstrap._find_and_load, threading.local()

    def timed(name: str, import_: Any) -> Any:
        inner, local.inner = getattr(local, "inner", 0.0), 0.0
        begin = time.perf_counter()
        try:
            return find_and_load(name, import_)
        finally:
            taken = time.perf_counter() - begin
            _imports[_package(name)] += taken - local.inner
            local.inner = inner + taken

    bootstrap._find_and_load = timed


if os.environ.get(VARIABLE) == "1":
    measure_imports()
