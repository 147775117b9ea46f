"""``octavo bench simulation``: the same workloads on the real engine, by the clock, and simulated with a profile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.engine.llm import LLM
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.calibrate import StepWatch
from octavo.lab.bench.capacity import capacity_of, full_load
from octavo.lab.bench.timed_run import run_timed
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import Completions
from octavo.lab.simulate.run import Recorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import parse_arrivals
from octavo.lab.workloads.lengths import parse_inputs, parse_outputs
from octavo.lab.workloads.workload import Workload

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
class ValidatedWorkload:
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
    #: Measured seconds of the steps relative to the profile's: how much slower the machine was than when it was
    #: calibrated. And the errors of a simulation in which it is as slow as in that run. Medians of the rounds.
    pace: float
    paced_errors: list[float]


def summary(workloads: list[ValidatedWorkload]) -> str:
    """Lines on the errors of all figures, and of each; and the same at the pace of each run."""
    lines = [f"{'':12} {'with the profile':34}  at the pace of each run"]
    for i, name in [(None, "all"), *enumerate(ValidatedWorkload.FIGURES)]:
        both = (
            _spread([e for of_one in errors for e in (of_one if i is None else [of_one[i]])])
            for errors in ([c.errors for c in workloads], [c.paced_errors for c in workloads])
        )
        lines.append(f"{name:12} " + "  ".join(both))
    return "\n".join(lines)


def _spread(errors: list[float]) -> str:
    sizes = np.abs(errors)
    return f"median error {np.median(sizes):6.1%}, worst {sizes.max():6.1%}"


def compare(
    llm: LLM, profile: StepProfile, seconds: float, *, rounds: int = 1, seed: int = 0
) -> Iterator[ValidatedWorkload]:
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
    runs: list[list[_Run]] = [[] for _ in loads]
    for number in range(1, rounds + 1):
        _log.info("round %d of %d: %d workloads of %g seconds", number, rounds, len(loads), seconds)
        for (kind, load, rate, workload), of_one in zip(loads, runs, strict=True):
            of_one.append(_measured(engine, profile, options, workload))
            if number == rounds:
                medians = np.median([run.figures for run in of_one], axis=0).tolist()
                simulated = _figures(_simulated(profile, options, workload))
                pairs = list(zip(medians, simulated, strict=True))
                errors = [ours / real - 1 for real, ours in pairs]
                pace = float(np.median([run.pace for run in of_one]))
                paced = np.median([run.paced_errors for run in of_one], axis=0).tolist()
                yield ValidatedWorkload(kind, load, rate, len(workload), pairs, errors, pace, paced)


class _Run(NamedTuple):
    """See ``ValidatedWorkload``."""

    figures: list[float]
    pace: float
    paced_errors: list[float]


def _measured(engine: LLMEngine, profile: StepProfile, options: EngineConfig, workload: Workload) -> _Run:
    engine.reset_prefix_cache()
    watch = StepWatch(engine)
    try:
        figures = _figures(run_timed(engine, workload, step=watch.step))
    finally:
        watch.stop()
    pace = sum(step.seconds for step in watch.steps) / sum(profile.seconds(step.work) for step in watch.steps)
    paced = _figures(_simulated(profile.scaled(pace), options, workload))
    return _Run(figures, pace, [ours / real - 1 for real, ours in zip(figures, paced, strict=True)])


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


def _figures(done: Completions) -> list[float]:
    """In the order of ``ValidatedWorkload.FIGURES``."""
    if done.failed:
        raise ConfigError(f"requests of the workload failed: {dict(done.failed)}")
    rate = len(done.sent) / (max(done.last) - min(done.sent))
    latencies = [f(x) for x in (done.ttft, done.e2e) for f in (np.mean, lambda x: np.percentile(x, 99))]
    return [rate, *map(float, latencies)]
