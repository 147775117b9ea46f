"""``octavo bench simulation``: the same workloads on the real engine, by the clock, and simulated with a profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.outputs import RequestOutput
from octavo.engine.llm import LLM
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.calibrate import StepWatch
from octavo.lab.bench.capacity import capacity_of, full_load
from octavo.lab.bench.steady import Guard, GuardedRun
from octavo.lab.bench.timed_run import run_timed
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import Completions
from octavo.lab.simulate.run import Recorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.simulate.work import StepWork
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
#: Loads, as shares of the rate that the engine serves at the pace that it had when all requests were there at once.
LOADS = (0.3, 0.6, 0.9)
#: Requests of a workload, at least: a p99 of fewer is their maximum. Of the run that shows the pace beforehand.
_LEAST, _AT_ONCE = 100, 60
#: Seconds of the windows in which the simulation follows the pace of a run.
_WINDOW = 2.0


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
    #: The same if it is as slow as in each ``_WINDOW`` of that run.
    followed_errors: list[float]
    #: What happened beside the rounds (``GuardedRun.as_json``), and whether one of them is not to be trusted.
    conditions: list[dict[str, Any]]
    disturbed: bool


def summary(workloads: list[ValidatedWorkload]) -> str:
    """Lines on the errors of all figures, and of each: with the profile, and at the pace of each run."""
    lines: list[str] = []
    for title, some in (("all", workloads), ("undisturbed", [c for c in workloads if not c.disturbed])):
        if not some or (some == workloads and lines):
            continue
        name = f"{title} ({len(some)})"
        lines.append(
            f"{name:16} {'with the profile':34}  {'at the pace of each run':34}  at that of each {_WINDOW:g} s"
        )
        for i, figure in [(None, "all"), *enumerate(ValidatedWorkload.FIGURES)]:
            kinds = ([c.errors for c in some], [c.paced_errors for c in some], [c.followed_errors for c in some])
            spreads = (_spread([e for of_one in k for e in (of_one if i is None else [of_one[i]])]) for k in kinds)
            lines.append(f"{figure:16} " + "  ".join(spreads))
    return "\n".join(lines)


def _spread(errors: list[float]) -> str:
    sizes = np.abs(errors)
    return f"median error {np.median(sizes):6.1%}, worst {sizes.max():6.1%}"


def compare(
    llm: LLM, profile: StepProfile, seconds: float, *, rounds: int = 1, seed: int = 0, guard: Guard | None = None
) -> Iterator[ValidatedWorkload]:
    """Runs each of ``KINDS`` at each of ``LOADS``, each for about so many seconds of arrivals, or ``_LEAST`` requests.

    All of them are run ``rounds`` times, every second round backwards; a measured figure is the median of its rounds.

    Args:
        guard: repeats disturbed runs; without one nothing is repeated.

    Raises:
        ConfigError: the profile is not of this engine's block count or model length, or a request failed.
    """
    engine = llm.llm_engine
    core = engine.core
    guard = guard or Guard(again=0)
    # The same blocks: the engine's follow from the memory that was free at its start.
    options = core.options.model_copy(
        update={"num_gpu_blocks_override": core.blocks.num_blocks, "max_model_len": core.max_model_len}
    )
    loads = list(_workloads(engine, profile, options, seconds, seed))
    jobs = {each.workload.name: partial(_measured, engine, profile, options, each.workload) for each in loads}
    runs: dict[str, list[GuardedRun[_Run]]] = {label: [] for label in jobs}
    for number in range(rounds):
        total = sum(each.workload.requests / each.rate for each in loads)
        _log.info("round %d of %d: %d workloads, about %.0f s", number + 1, rounds, len(loads), total)
        for guarded_run in guard.measure(jobs, backwards=number % 2 == 1):
            runs[guarded_run.label].append(guarded_run)
    for each in loads:
        guarded = runs[each.workload.name]
        of_one = [run.result for run in guarded]
        medians = np.median([run.figures for run in of_one], axis=0).tolist()
        pairs = list(zip(medians, _figures(_simulated(profile, options, each.workload)), strict=True))
        yield ValidatedWorkload(
            each.kind,
            each.load,
            each.rate,
            each.workload.requests,
            pairs,
            [ours / real - 1 for real, ours in pairs],
            float(np.median([run.pace for run in of_one])),
            np.median([run.paced_errors for run in of_one], axis=0).tolist(),
            np.median([run.followed_errors for run in of_one], axis=0).tolist(),
            [run.as_json() for run in guarded],
            any(run.is_disturbed for run in guarded),
        )


class _Load(NamedTuple):
    kind: str
    load: float
    #: In requests a second.
    rate: float
    workload: Workload


class _Run(NamedTuple):
    """See ``ValidatedWorkload``."""

    figures: list[float]
    pace: float
    paced_errors: list[float]
    followed_errors: list[float]


class _PacedProfile:
    """A profile whose steps take longer by a factor that depends on when they begin."""

    def __init__(self, engine: SimulatedEngine, paces: list[float], otherwise: float) -> None:
        """``paces``: of each ``_WINDOW`` from the start on; ``otherwise``: after them."""
        self._engine, self._profile, self._paces, self._otherwise = engine, engine.profile, paces, otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)

    def seconds(self, work: StepWork) -> float:
        window = int(self._engine.now / _WINDOW)
        return self._profile.seconds(work) * (self._paces[window] if window < len(self._paces) else self._otherwise)


def _measured(engine: LLMEngine, profile: StepProfile, options: EngineConfig, workload: Workload) -> _Run:
    engine.reset_prefix_cache()
    watch = StepWatch(engine)
    begins: list[float] = []
    start = time.monotonic()

    def step() -> list[RequestOutput]:
        now = time.monotonic() - start
        outputs = watch.step()
        begins.extend([now] * (len(watch.steps) - len(begins)))
        return outputs

    try:
        figures = _figures(run_timed(engine, workload, step=step))
    finally:
        watch.stop()
    measured = np.array([step.seconds for step in watch.steps])
    expected = np.array([profile.seconds(step.work) for step in watch.steps])
    pace = float(measured.sum() / expected.sum())
    windows = (np.array(begins) / _WINDOW).astype(int)
    sums = [np.bincount(windows, weights=some) for some in (measured, expected)]
    paces = [float(m / e) if e else pace for m, e in zip(*sums, strict=True)]
    errors = [
        [ours / real - 1 for real, ours in zip(figures, _figures(done), strict=True)]
        for done in (
            _simulated(profile.scaled(pace), options, workload),
            _simulated(profile, options, workload, paces, pace),
        )
    ]
    return _Run(figures, pace, *errors)


def _workloads(
    engine: LLMEngine, profile: StepProfile, options: EngineConfig, seconds: float, seed: int
) -> Iterator[_Load]:
    for kind, (inputs, outputs, burstiness) in KINDS.items():
        lengths = parse_inputs(inputs), parse_outputs(outputs)
        # A machine that is slower than when it was calibrated would be overloaded at 90 % of what it served then.
        at_once = full_load(*lengths, seed, requests=_AT_ONCE)
        now = profile.scaled(_measured(engine, profile, options, at_once).pace)
        capacity = capacity_of(_simulated(now, options, full_load(*lengths, seed)))
        for load in LOADS:
            rate = load * capacity
            workload = Workload(
                requests=max(_LEAST, round(rate * seconds)),
                arrivals=parse_arrivals("gamma", rate, burstiness),
                inputs=lengths[0],
                outputs=lengths[1],
                seed=seed,
                name=f"{kind} {load:.0%}",
            )
            yield _Load(kind, load, rate, workload)


def _simulated(
    profile: StepProfile,
    options: EngineConfig,
    workload: Workload,
    paces: list[float] | None = None,
    otherwise: float = 1.0,
) -> Completions:
    recorder = Recorder()
    engine = SimulatedEngine(profile, options, on_gap=recorder.gaps.add)
    if paces is not None:
        engine.profile = cast(StepProfile, _PacedProfile(engine, paces, otherwise))
    run(engine, workload, recorder.ended, recorder.sample)
    return recorder.done


def _figures(done: Completions) -> list[float]:
    """In the order of ``ValidatedWorkload.FIGURES``."""
    if done.failed:
        raise ConfigError(f"requests of the workload failed: {dict(done.failed)}")
    rate = len(done.sent) / (max(done.last) - min(done.sent))
    latencies = [f(x) for x in (done.ttft, done.e2e) for f in (np.mean, lambda x: np.percentile(x, 99))]
    return [rate, *map(float, latencies)]
