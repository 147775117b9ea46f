"""A workload on one simulated engine, and its figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.lab.simulate.engine import SimulatedEngine, SimulatedRequest, run
from octavo.lab.simulate.figures import Completions, Gaps, RunFigures, Series, rates
from octavo.lab.simulate.recording import RunRecorder
from octavo.lab.simulate.service_by_user import ServiceRecorder
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.work_items import WorkItem

_SERIES = ("waiting", "running", "swapped", "blocks_used")


class Recorder:
    """Collects the figures of one simulated engine."""

    def __init__(self) -> None:
        self.done, self.gaps, self.series = Completions(), Gaps(), Series(_SERIES)
        self.service = ServiceRecorder()

    def ended(self, request: SimulatedRequest) -> None:
        """Takes a request that has ended."""
        if request.item.user is not None:
            self.service.ended(request)
        if request.finish_reason not in ("stop", "length"):
            self.done.fail(request.item, str(request.finish_reason))
            return
        self.done.add(request.number, request.item, request.sent, request.first, request.last, request.tokens)

    def sample(self, engine: SimulatedEngine) -> None:
        """Looks at queues, blocks and users, if a sample is wanted now; to be called after a step."""
        if engine.now >= self.service.series.next and (engine.open_by_user or self.service.slots):
            self.service.sample(engine)
        if engine.now < self.series.next:
            return
        queues = engine.scheduler.queues
        running, swapped = len(queues.running), len(queues.swapped)
        self.series.add(engine.now, queues.num_waiting, running, swapped, engine.blocks.state.used)

    def figures(self, engine: SimulatedEngine) -> RunFigures:
        """The figures so far."""
        stats, columns = engine.scheduler.counts(), self.series.columns()
        return RunFigures(
            **rates(self.done, self.gaps),
            steps=stats.steps,
            preemptions_by_recompute=stats.preemptions_by_recompute,
            preemptions_by_swap=stats.preemptions_by_swap,
            recomputed_tokens=stats.recomputed_tokens,
            prefix_queried_tokens=stats.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            stores=engine.store_figures({}),
            num_blocks=engine.blocks.num_blocks,
            mean_running=mean_over_time(columns["seconds"], columns["running"]),
            mean_blocks_used=mean_over_time(columns["seconds"], columns["blocks_used"]),
            series=columns,
            service=self.service.service(engine),
        )


def simulate(profile: StepProfile, options: EngineConfig, items: Iterable[WorkItem], **settings: Any) -> RunFigures:
    """Runs items, in the order of their arrival, on one engine; ``settings``: see ``SimulatedEngine``.

    Raises:
        ConfigError: see ``SimulatedEngine`` and ``run``.
    """
    return record(profile, options, items, **settings)[0]


def record(
    profile: StepProfile, options: EngineConfig, items: Iterable[WorkItem], **settings: Any
) -> tuple[RunFigures, Completions]:
    """As ``simulate``; the times of all requests too."""
    recorder = Recorder()
    engine = SimulatedEngine(profile, options, on_gap=recorder.gaps.add, **settings)
    run(engine, items, recorder.ended, recorder.sample)
    return recorder.figures(engine), recorder.done


def record_views(
    path: Path, profile: StepProfile, options: EngineConfig, items: Iterable[WorkItem], **settings: Any
) -> tuple[RunFigures, Completions]:
    """As ``record``; writes a recording of the engine, which ``octavo view`` shows.

    Raises:
        ConfigError: as ``record``, or the file cannot be written.
    """
    recorder = Recorder()
    engine = SimulatedEngine(profile, options, on_gap=recorder.gaps.add, **settings)
    views = RunRecorder(engine)

    def sample(engine: SimulatedEngine) -> None:
        recorder.sample(engine)
        views.sample(engine)

    run(engine, items, recorder.ended, sample)
    views.write(path, f"simulated: {profile.model} on {profile.device}, {options.scheduling_policy}")
    return recorder.figures(engine), recorder.done


def mean_over_time(seconds: list[float], values: list[float]) -> float:
    """Each value counts until the next sample."""
    if len(seconds) < 2 or seconds[-1] == seconds[0]:
        return values[0] if values else 0.0
    spans = [after - before for before, after in itertools.pairwise(seconds)]
    return sum(value * span for value, span in zip(values, spans, strict=False)) / (seconds[-1] - seconds[0])
