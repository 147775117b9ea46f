"""The comparison of Kwon et al. 2023, section 6.2: one scheduler over paged and over contiguous KV caches.

Its figures 2 (what memory holds), 12 (normalized latency against the rate) and 13 (requests in a batch).
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig, make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.allocators.census import Census, Slots
from octavo.lab.simulate.allocators.contiguous import RESERVATIONS, ContiguousBlocks, reserving
from octavo.lab.simulate.allocators.static_batches import STATIC, StaticBatching
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import RunFigures
from octavo.lab.simulate.run import Recorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import Gamma
from octavo.lab.workloads.lengths import Lengths
from octavo.lab.workloads.traces import Trace
from octavo.lab.workloads.workload import Workload

ALLOCATORS = ("paged", *RESERVATIONS)
#: The allocators under iteration-level scheduling, and static batches.
BASELINES = (*ALLOCATORS, *STATIC)
#: Most draws for a request that fits the model's context.
_MOST_DRAWS = 1000
#: Rates of a curve, as shares of the throughput when all requests are there at the start; more while all of them are
#: under the limit; and bisections between the last rate under it and the next.
_SHARES = (0.5, 0.7, 0.85, 0.95, 1.05, 1.2)
_FURTHER, _MOST_FURTHER = 1.25, 10
#: Static batches have short answers wait for long ones, unless requests are so rare that batches are small.
_RARER = 0.5
_BISECTIONS = 3
#: Runs of an allocator, where none of ``_MOST_FURTHER`` is needed: also with all requests at the start, and the census.
RUNS = len(_SHARES) + _BISECTIONS + 2


class Point(msgspec.Struct, frozen=True):
    """A run at a rate in requests/s: mean over requests of seconds from arrival to end, for each output token."""

    rate: float
    normalized_latency: float


class AllocatorFigures(msgspec.Struct, frozen=True):
    """The figures of one allocator."""

    allocator: str
    #: The highest rate measured under the latency limit, up to which all are; and every rate measured, ascending.
    rate: float
    curve: list[Point]
    #: Requests/s with all of them there at the start, until nine tenths have ended.
    throughput: float
    #: At the rate of ``AllocatorComparison.at``: mean sequences in a step, and shares of the KV cache.
    batch: float
    shares: Slots


class AllocatorComparison(msgspec.Struct, frozen=True):
    """The allocators side by side."""

    requests: int
    mean_input: float
    mean_output: float
    latency_limit: float
    #: Rate at which batches and shares were counted, in the last nine tenths of the time of arrivals.
    at: float
    allocators: list[AllocatorFigures]


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    profile: StepProfile
    options: EngineConfig
    lengths: Trace
    seed: int

    def load(self, rate: float) -> Workload:
        """The requests as a Poisson process; at every rate the same ones, in the same order and proportions of time."""
        return Workload(requests=len(self.lengths), trace=self.lengths, arrivals=Gamma(rate), seed=self.seed)


def make_setting(profile: StepProfile, inputs: Lengths, outputs: Lengths, requests: int, seed: int) -> Setting:
    """Requests with these lengths, under iteration-level scheduling first come first served (Yu et al. 2022, Orca).

    Steps mix decodes and whole prompts. Nothing but memory bounds a batch: there may be as many sequences as blocks,
    and the budget takes them and the longest prompt. A request longer than the context is drawn again.

    Raises:
        ConfigError: next to no request fits the context.
    """
    context = profile.max_model_len
    blocks = profile.kv_cache_tokens // 16
    options = make_config(
        model="none",
        block_size=16,
        max_num_seqs=blocks,
        max_num_batched_tokens=context + blocks,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        async_scheduling=False,
        preemption_mode="recompute",
    )
    # Streams of their own, as ``Workload`` has: without requests drawn again these are its lengths.
    drawn = iter(Workload(requests=requests * _MOST_DRAWS, inputs=inputs, outputs=outputs, seed=seed))
    fitting = (item for item in drawn if item.input_len + item.output_len <= context)
    lengths = [(item.input_len, item.output_len) for item, _ in zip(fitting, range(requests), strict=False)]
    if len(lengths) < requests:
        raise ConfigError(f"these lengths hardly ever fit the context of {context} tokens")
    ins, outs = zip(*lengths, strict=True)
    return Setting(
        profile, options, Trace("lengths", array("d", [0.0]) * requests, array("q", ins), array("q", outs)), seed
    )


@dataclass(frozen=True)
class Measured:
    """A run: its normalized latency (see ``Point``), the time by which nine tenths had ended, and its other figures."""

    normalized_latency: float
    most_ended: float
    figures: RunFigures


def measure(setting: Setting, allocator: str, load: Workload, census: Census | None = None) -> Measured:
    """Runs the load with the allocator; ``census`` counts its steps."""
    recorder = Recorder()
    engine = make_engine(setting, allocator, on_gap=recorder.gaps.add)
    batching = StaticBatching(engine, allocator) if allocator in STATIC else None
    if census is not None:
        engine.on_plan = functools.partial(census.observe, engine)
        census.count = census.count if batching is None else batching.slots
    if batching is None:
        run(engine, load, recorder.ended, recorder.sample)
    else:
        batching.run(load, recorder.ended, recorder.sample)
    done = recorder.done
    each = [e2e / tokens for e2e, tokens in zip(done.e2e.tolist(), done.outputs, strict=True)]
    ends = sorted(done.last)
    return Measured(math.fsum(each) / len(each), ends[len(ends) * 9 // 10], recorder.figures(engine))


def make_engine(setting: Setting, allocator: str, **options: Any) -> SimulatedEngine:
    """An engine with the allocator; ``options``: see ``SimulatedEngine``. Of static batches, one with paged memory."""
    if allocator in STATIC:  # all prompts of a batch are computed in one step
        tokens = setting.profile.kv_cache_tokens
        whole = setting.options.model_copy(update={"max_num_batched_tokens": tokens})
        return SimulatedEngine(setting.profile, whole, **options)
    if allocator != "paged":
        reserve = reserving(allocator, setting.profile.max_model_len, lambda: engine.scheduler.queues)
        options["make_blocks"] = functools.partial(ContiguousBlocks, reserve=reserve)
    engine = SimulatedEngine(setting.profile, setting.options, **options)
    return engine


def find_curve(
    setting: Setting, allocator: str, limit: float, ended: Callable[[], object] = lambda: None
) -> tuple[float, list[Point], float]:
    """The highest rate found whose normalized latency is under the limit in seconds, all rates, and the throughput.

    ``ended`` is called after each run.

    Raises:
        ConfigError: the lowest rate is not under the limit, or every rate is.
    """

    def at(rate: float) -> Point:
        point = Point(rate, measure(setting, allocator, setting.load(rate)).normalized_latency)
        ended()
        return point

    count = len(setting.lengths)
    at_once = measure(setting, allocator, Workload(requests=count, trace=setting.lengths))
    ended()
    throughput = 0.9 * count / at_once.most_ended
    points = [at(share * throughput) for share in _SHARES]
    for _ in range(_MOST_FURTHER):
        if points[0].normalized_latency <= limit or allocator not in STATIC:
            break
        points.insert(0, at(points[0].rate * _RARER))
    for _ in range(_MOST_FURTHER):
        if points[-1].normalized_latency > limit:
            break
        points.append(at(points[-1].rate * _FURTHER))
    over = next((i for i, point in enumerate(points) if point.normalized_latency > limit), None)
    if not over:
        problem = "always under" if over is None else "never under"
        raise ConfigError(
            f"the normalized latency of {allocator} is {problem} {limit:g} s a token: from "
            f"{points[0].normalized_latency:.3g} s at {points[0].rate:.3g} requests/s to "
            f"{points[-1].normalized_latency:.3g} s at {points[-1].rate:.3g}"
        )
    low, high = points[over - 1].rate, points[over].rate
    for _ in range(_BISECTIONS):
        points.append(at((low + high) / 2))
        low, high = (low, points[-1].rate) if points[-1].normalized_latency > limit else (points[-1].rate, high)
    return low, sorted(points, key=lambda point: point.rate), throughput


def compare(
    setting: Setting,
    limit: float,
    rate: float | None = None,
    begins: Callable[[str], object] = lambda allocator: None,
    ended: Callable[[], object] = lambda: None,
) -> AllocatorComparison:
    """All allocators; batches and memory are counted at ``rate``, or the one that the paged cache has at the limit.

    ``begins`` is called with each allocator before its runs, ``ended`` after each run, of which there are about
    ``RUNS`` for each allocator.

    Raises:
        ConfigError: see ``find_curve``.
    """
    curves = {}
    for allocator in BASELINES:
        begins(allocator)
        curves[allocator] = find_curve(setting, allocator, limit, ended)
    rate = rate or curves["paged"][0]
    load = setting.load(rate)
    last = max(item.at for item in load)
    found = []
    for allocator, (highest, curve, throughput) in curves.items():
        census = Census(last / 10, last)
        measure(setting, allocator, load, census)
        ended()
        found.append(AllocatorFigures(allocator, highest, curve, throughput, census.batch, census.shares))
    count = len(setting.lengths)
    means = sum(setting.lengths.inputs) / count, sum(setting.lengths.outputs) / count
    return AllocatorComparison(count, *means, limit, rate, found)
