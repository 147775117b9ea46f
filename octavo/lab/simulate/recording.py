"""Records a simulated engine: a view after each step, thinned so that the recording covers the whole run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.core.plan import StepPlan
from octavo.core.stats import (
    MAX_LIFE_EVENTS,
    EngineEvent,
    ReplicaRow,
    SchedulerState,
    SchedulerStats,
    StepStats,
    write_recording,
)
from octavo.engine.core import ViewRecorder
from octavo.lab.simulate.engine import SimulatedEngine

#: Views of a recording: twice as many are collected before every second one is left out.
NUM_VIEWS = 1000
#: Of the steps between two views, and of what has changed in them, the last ones are kept.
_MOST_BETWEEN = 64


class RunRecorder:
    """Owns the views of a run so far. Equal runs give equal recordings: times are those of the simulated clock."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._recorder = ViewRecorder(engine.scheduler, clock=lambda: engine.now)
        self._events: list[EngineEvent] = []
        self._stride, self._skipped = 1, 0
        self._before = msgspec.structs.replace(engine.scheduler.counts())
        self._seconds = 0.0
        engine.on_plan = self._planned(engine.on_plan)
        self._recorder.view()

    def _planned(self, other: Callable[[StepPlan, float], None] | None) -> Callable[[StepPlan, float], None]:
        def planned(plan: StepPlan, seconds: float) -> None:
            self._seconds = seconds
            self._recorder.planned(plan)
            if other is not None:
                other(plan, seconds)

        return planned

    def sample(self, engine: SimulatedEngine) -> None:
        """To be called after each step."""
        counts = engine.scheduler.counts()
        self._recorder.note(_step_stats(counts, self._before, self._seconds, engine.overhead.step))
        self._before = msgspec.structs.replace(counts)
        self._skipped += 1
        if self._skipped >= self._stride:
            self._skipped = 0
            self._add_view()

    def _add_view(self) -> None:
        view = self._recorder.view()
        view.cost = 0.0
        view.state = msgspec.structs.replace(view.state)
        row = ReplicaRow(0, "ready", self._engine.num_open, 0)
        self._events.append(EngineEvent(round(self._engine.now, 6), [row], [view]))
        if len(self._events) >= 2 * NUM_VIEWS:
            self._thin()

    def _thin(self) -> None:
        """Leaves out every second view; the next one has its steps and changes."""
        for event, next_one in zip(self._events[::2], self._events[1::2], strict=True):
            [view], [later] = event.views, next_one.views
            later.steps = [*view.steps, *later.steps][-_MOST_BETWEEN:]
            later.changes = [*view.changes, *later.changes][-_MOST_BETWEEN:]
            later.num_changes += view.num_changes
            later.lives = [*view.lives, *later.lives][-MAX_LIFE_EVENTS:]
        self._events = self._events[1::2]
        self._stride *= 2

    def write(self, path: Path, title: str) -> None:
        """Writes the recording.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_recording(path, title, self._events)


def _step_stats(now: SchedulerStats, before: SchedulerStats, seconds: float, overhead: float) -> StepStats:
    """One step between two counts. All of its time but the loop's overhead is the profile's, in kernels."""
    state = [getattr(now, name) for name in SchedulerState.__struct_fields__]
    prefill, decode = now.prefill_tokens - before.prefill_tokens, now.decode_tokens - before.decode_tokens
    fields = *state, seconds + overhead, seconds, seconds, 0.0, prefill, decode, 0
    return StepStats(*fields)
