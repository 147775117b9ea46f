"""The step loop: plans of the scheduler go to the executor, and their results back; statistics of each step."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.engine_outputs import EngineCoreOutputs
from octavo.core.errors import SequenceError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.stats import SchedulerState, StepStats
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.engine.flight_recorder import LastSteps
    from octavo.executor.executor import Executor, PendingStep

logger = logging.getLogger("octavo")

#: The state of the scheduler after a step: the first fields of ``StepStats``, in their order.
_state_of = operator.attrgetter(*SchedulerState.__struct_fields__)


@dataclass(slots=True)
class StepTimes:
    """Seconds summed over steps, by where they were spent."""

    steps: int = 0
    #: In the step loop: schedule, wait, update.
    total: float = 0.0
    #: Inside the worker, and there inside kernels (measured only with ``time_kernels``).
    worker: float = 0.0
    kernels: float = 0.0
    #: On a GPU: busy with steps, and idle between them.
    device: float = 0.0
    idle: float = 0.0


class StepObserver(Protocol):
    """What looks at the steps of a loop while it is among its ``observers``."""

    def planned(self, plan: StepPlan) -> None:
        """A step was planned, and will be computed next. The loop waits for this: microseconds."""


class StepLoop:
    """Owns the steps in flight: planned and submitted, result not yet received.

    Invariant: they are waited for in order, and between two calls there are fewer than ``max_in_flight``; none if no
    request is left.
    """

    #: Number of the engine core, of several behind one front end.
    replica = 0
    #: Notes which requests are computed, for those who see this process end.
    recorder: LastSteps | None = None

    def __init__(self, scheduler: Scheduler, executor: Executor, *, max_in_flight: int = 1) -> None:
        """``max_in_flight``: steps that may be submitted at once, the one that is computed included."""
        self.scheduler = scheduler
        self.executor = executor
        self.max_in_flight = max_in_flight
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.times = StepTimes()
        self.observers: list[StepObserver] = []
        self._step_ended: float | None = None
        #: Totals at the last measured step: tokens of prompts and decodes, seconds in the worker and in kernels.
        self._computed: tuple[float, float, float, float] = (0, 0, 0.0, 0.0)

    def measured_step(self) -> tuple[EngineCoreOutputs, StepStats]:
        """``step``, with its statistics."""
        start = time.perf_counter()
        outputs = self.step()
        end = time.perf_counter()
        between = start - self._step_ended if self._step_ended is not None else 0.0
        self._step_ended = end if self.scheduler.has_work else None
        return outputs, self._measure(end - start, between)

    def measure_emptied(self) -> StepStats:
        """Statistics without a step: aborts have ended all requests, so that none follows."""
        self._step_ended = None
        return self._measure(0.0, 0.0)

    def _measure(self, seconds: float, between_seconds: float) -> StepStats:
        """Queues, blocks and totals as they are now, and what was computed since the last time."""
        counts, times = self.scheduler.counts(), self.times
        computed = (counts.prefill_tokens, counts.decode_tokens, times.worker, times.kernels)
        prefill, decode, worker, kernels = (now - before for now, before in zip(computed, self._computed, strict=True))
        self._computed = computed
        computed_now = seconds, worker, kernels, between_seconds, int(prefill), int(decode)
        fields = *_state_of(counts), *computed_now, self.replica
        return StepStats(*fields)

    def step(self) -> EngineCoreOutputs:
        """Receives the result of one step. If it fails, its requests end with an error and the others go on.

        Raises:
            EngineDeadError: a worker is lost, so that no step can follow.
        """
        start = time.perf_counter()
        if not self._in_flight:
            self._submit()
        while self._may_run_ahead():
            self._submit()
        outputs = self._receive()
        self.drain()
        self.times.total += time.perf_counter() - start
        return outputs

    def _may_run_ahead(self) -> bool:
        failed = any(isinstance(pending, _Failed) for _, pending in self._in_flight)
        return len(self._in_flight) < self.max_in_flight and not failed and self.scheduler.can_run_ahead

    def drain(self) -> None:
        """Waits for the steps in flight if all of their requests have ended meanwhile."""
        while self._in_flight and not self.scheduler.has_work:
            self._receive()

    def _submit(self) -> None:
        plan = self.scheduler.schedule()
        if self.recorder is not None and plan.seq_ids:
            sequences = self.scheduler.queues.sequences
            self.recorder.note(plan.seq_ids, lambda seq_id: sequences[seq_id].group.group_id)
        for observer in self.observers:
            observer.planned(plan)
        try:
            pending: PendingStep = self.executor.submit(plan)
        except Exception as e:  # raised by ``wait``: the result of the step before comes first
            pending = _Failed(e)
        except BaseException:
            self._in_flight.append((plan, _interrupted()))
            raise
        self._in_flight.append((plan, pending))
        del pending  # the error refers to this frame, which must not refer to the error

    def _receive(self) -> EngineCoreOutputs:
        plan, pending = self._in_flight.popleft()
        try:
            result = pending.wait()
        except Exception as e:
            logger.exception("step %d failed", plan.step)
            del pending  # as in ``_submit``
            return self._fail(plan, e)
        except BaseException:
            self._in_flight.appendleft((plan, _interrupted()))
            raise
        times = self.times
        times.steps += 1
        times.worker += result.seconds
        times.kernels += result.kernel_seconds
        times.device += result.device_seconds
        times.idle += result.idle_seconds
        return self.scheduler.update(plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> EngineCoreOutputs:
        """Ends the requests of the plan and of the plans after it, which build on it."""
        message = f"the step failed: {type(error).__name__}: {error}"
        failed_at = self._group_of(error.seq_id) if isinstance(error, SequenceError) else None
        outputs = self.scheduler.fail(plan, message)
        while self._in_flight:
            later, pending = self._in_flight.popleft()
            try:
                pending.wait()
            except Exception as e:
                logger.error("step %d failed after it: %s: %s", later.step, type(e).__name__, e)
            outputs.groups += self.scheduler.fail(later, message).groups
        for output in outputs.groups:
            if failed_at is not None and output.error == message:
                whose = "this request" if output.group_id == failed_at else "another request"
                output.error = f"the step failed at {whose}: {error}"
        self.executor.check_health()
        return outputs

    def _group_of(self, seq_id: int | None) -> int | None:
        groups = self.scheduler.queues.groups.values()
        return next((g.group_id for g in groups if any(s.seq_id == seq_id for s in g.seqs)), None)


class _Failed:
    """A step that was not submitted, or not waited for to its end."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        try:
            raise self._error
        finally:
            del self  # as in ``_submit``


def _interrupted() -> _Failed:
    """A step that a ``BaseException`` has torn, such as one that a signal handler of the program has raised."""
    # One for each: an error keeps the frames that it was raised in, and with them the engine.
    return _Failed(RuntimeError("interrupted"))
