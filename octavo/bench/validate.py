"""``octavo bench simulation``: the same workloads on the real engine, by the clock, and simulated with a profile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.bench.capacity import capacity_of, full_load
from octavo.bench.timed_run import run_timed
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.engine.llm import LLM
from octavo.simulate.engine import SimulatedEngine, run
from octavo.simulate.figures import Completions
from octavo.simulate.profile import StepProfile
from octavo.simulate.run import Recorder
from octavo.workloads.arrivals import parse_arrivals
from octavo.workloads.lengths import parse_inputs, parse_outputs
from octavo.workloads.workload import Workload

_log = logging.getLogger("octavo")

#: Kinds of workloads: lengths of prompts and of outputs, and burstiness of arrivals.
KINDS: dict[str, tuple[str, str, float]] = {
    "chat": ("lognormal:120,0.7,1000", "lognormal:60,0.7,400", 1.0),
    "long prompts": ("uniform:300,900", "uniform:8,32", 1.0),
    "long answers": ("uniform:16,64", "uniform:100,250", 1.0),
    "bursts": ("lognormal:120,0.7,1000", "lognormal:60,0.7,400", 0.25),
}
#: Loads, as shares of the rate that the simulation serves when all requests are there at once.
LOADS = (0.3, 0.6, 0.9)


@dataclass(frozen=True)
class Comparison:
    """One workload: what was measured, and what the simulation says. Times in seconds."""

    FIGURES: ClassVar = ("requests/s", "mean ttft", "p99 ttft", "mean e2e", "p99 e2e")

    kind: str
    load: float
    #: Offered rate.
    requests_per_s: float
    requests: int
    #: Each figure's (measured, simulated), in the order of ``FIGURES``; and the second relative to the first, less 1.
    pairs: list[tuple[float, float]]
    errors: list[float]


def summary(found: list[Comparison]) -> str:
    """A line on the errors of all figures, and of each."""
    lines = [f"{'all':12} " + _spread([error for c in found for error in c.errors])]
    for i, name in enumerate(Comparison.FIGURES):
        lines.append(f"{name:12} " + _spread([c.errors[i] for c in found]))
    return "\n".join(lines)


def _spread(errors: list[float]) -> str:
    sizes = np.abs(errors)
    return f"median error {np.median(sizes):6.1%}, worst {sizes.max():6.1%}"


def compare(llm: LLM, profile: StepProfile, seconds: float, *, rounds: int = 1, seed: int = 0) -> Iterator[Comparison]:
    """Runs each of ``KINDS`` at each of ``LOADS``, each for about so many seconds of arrivals.

    All of them are run ``rounds`` times, one round after the other; a measured figure is the median of its rounds.
    Comparisons come in the last one.

    Raises:
        ConfigError: the profile is not of this engine's block count or model length, or a request failed.
    """
    engine = llm.llm_engine
    core = engine.core
    # The same blocks: the engine's follow from the memory that was free at its start.
    options = core.options.model_copy(
        update={"num_gpu_blocks_override": core.blocks.num_blocks, "max_model_len": core.max_model_len}
    )
    loads = list(_workloads(profile, options, seconds, seed))
    measured: list[list[list[float]]] = [[] for _ in loads]
    for number in range(1, rounds + 1):
        _log.info("round %d of %d: %d workloads of %g seconds", number, rounds, len(loads), seconds)
        for (kind, load, rate, workload), figures in zip(loads, measured, strict=True):
            engine.reset_prefix_cache()
            figures.append(_figures(run_timed(engine, workload), kind))
            if number == rounds:
                medians = map(float, np.median(figures, axis=0))
                simulated = _figures(_simulated(profile, options, workload), kind)
                pairs = list(zip(medians, simulated, strict=True))
                errors = [ours / real - 1 for real, ours in pairs]
                yield Comparison(kind, load, rate, len(workload), pairs, errors)


def _workloads(
    profile: StepProfile, options: EngineConfig, seconds: float, seed: int
) -> Iterator[tuple[str, float, float, Workload]]:
    """Kind, load, rate in requests a second, and the workload."""
    for kind, (inputs, outputs, burstiness) in KINDS.items():
        lengths = parse_inputs(inputs), parse_outputs(outputs)
        capacity = capacity_of(_simulated(profile, options, full_load(*lengths, seed)))
        for load in LOADS:
            rate = load * capacity
            workload = Workload(
                requests=max(10, round(rate * seconds)),
                arrivals=parse_arrivals("gamma", rate, burstiness),
                inputs=lengths[0],
                outputs=lengths[1],
                seed=seed,
                name=f"{kind} {load}",
            )
            yield kind, load, rate, workload


def _simulated(profile: StepProfile, options: EngineConfig, workload: Workload) -> Completions:
    recorder = Recorder()
    engine = SimulatedEngine(profile, options, on_gap=recorder.gaps.add)
    run(engine, workload, recorder.ended, recorder.sample)
    return recorder.done


def _figures(done: Completions, kind: str) -> list[float]:
    """In the order of ``Comparison.FIGURES``."""
    if done.failed:
        raise ConfigError(f"requests of the workload {kind!r} failed: {dict(done.failed)}")
    rate = len(done.sent) / (max(done.last) - min(done.sent))
    latencies = [f(x) for x in (done.ttft, done.e2e) for f in (np.mean, lambda x: np.percentile(x, 99))]
    return [rate, *map(float, latencies)]
