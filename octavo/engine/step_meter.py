"""Statistics of each step of an engine core."""

from __future__ import annotations

import operator
import time

from octavo.core.engine_outputs import EngineCoreOutputs
from octavo.core.stats import SchedulerState, StepStats
from octavo.engine.step_loop import StepLoop

#: The state of the scheduler after a step: the first fields of ``StepStats``, in their order.
_state_of = operator.attrgetter(*SchedulerState.__struct_fields__)


class StepMeter:
    """Runs the steps of a core and measures them."""

    def __init__(self, core: StepLoop, replica: int = 0) -> None:
        """``replica``: number of the core, for its statistics."""
        self._core, self._replica = core, replica
        self._step_ended: float | None = None
        #: Totals at the last step: tokens of prompts and decodes, seconds in the worker and in kernels.
        self._computed: tuple[float, float, float, float] = (0, 0, 0.0, 0.0)

    def step(self) -> tuple[EngineCoreOutputs, StepStats]:
        """``StepLoop.step``, with its statistics."""
        start = time.perf_counter()
        outputs = self._core.step()
        end = time.perf_counter()
        between = start - self._step_ended if self._step_ended is not None else 0.0
        self._step_ended = end if self._core.scheduler.has_work else None
        return outputs, self._measure(end - start, between)

    def emptied(self) -> StepStats:
        """Statistics without a step: aborts have ended all requests, so that none follows."""
        self._step_ended = None
        return self._measure(0.0, 0.0)

    def _measure(self, seconds: float, between_seconds: float) -> StepStats:
        """Queues, blocks and totals as they are now, and what was computed since the last time."""
        counts, times = self._core.scheduler.counts(), self._core.times
        computed = (counts.prefill_tokens, counts.decode_tokens, times.worker, times.kernels)
        prefill, decode, worker, kernels = (now - before for now, before in zip(computed, self._computed, strict=True))
        self._computed = computed
        computed_now = seconds, worker, kernels, between_seconds, int(prefill), int(decode)
        fields = *_state_of(counts), *computed_now, self._replica
        return StepStats(*fields)
