"""The step loop: plans of the scheduler go to the executor, and their results back; statistics of each step."""

from __future__ import annotations

import logging
import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo.core.engine_outputs import EngineCoreOutputs, GroupOutput
from octavo.core.errors import SequenceError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.core.stats import SchedulerState, StepStats
from octavo.scheduler.isolation import Isolation
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.engine.flight_recorder import LastSteps
    from octavo.executor.executor import Executor, PendingStep

logger = logging.getLogger("octavo")
T = TypeVar("T")

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

    If the scheduler raises, at whatever request, its state is made anew from what is known of all requests, and
    ``Isolation`` finds the one at which it raises: that ends with an error, and the others go on with the same bits.
    """

    #: Number of the engine core, of several behind one front end.
    replica = 0

    def __init__(self, scheduler: Scheduler, executor: Executor, *, max_in_flight: int = 1) -> None:
        """``max_in_flight``: steps that may be submitted at once, the one that is computed included."""
        self.executor = executor
        self.max_in_flight = max_in_flight
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._recorder: LastSteps | None = None
        #: Outputs of failures between two steps, which the next steps report.
        self._late: deque[EngineCoreOutputs] = deque()
        self.use(scheduler)
        self.times = StepTimes()
        self.observers: list[StepObserver] = []
        self._step_ended: float | None = None
        #: Totals at the last measured step: tokens of prompts and decodes, seconds in the worker and in kernels.
        self._computed: tuple[float, float, float, float] = (0, 0, 0.0, 0.0)

    def use(self, scheduler: Scheduler) -> None:
        """Takes a scheduler that has no request yet; the one before it has none any more."""
        self.scheduler = scheduler
        self._isolation = Isolation(scheduler)
        #: Number of the last plan that the executor has got.
        self._last_submitted = 0

    @property
    def recorder(self) -> LastSteps | None:
        """Notes which requests are computed, for those who see this process end."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: LastSteps) -> None:
        self._recorder = recorder
        self.scheduler.queues.on_attempt = self._isolation.on_attempt = recorder.attempt
        self._isolation.on_trial = recorder.begin_trial

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or the end of one is still to be reported."""
        return self.scheduler.has_work or self._isolation.is_active or bool(self._late)

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request; one at which the scheduler raises ends with an error."""
        self._between_steps(partial(self._isolation.add, request))

    def abort(self, group_id: int) -> None:
        """Ends a request in any state; nothing happens if it has ended."""
        if not self._isolation.abort(group_id):
            self._between_steps(partial(self.scheduler.finish_group, group_id))
            self._isolation.abort(group_id)  # if the scheduler has raised: it was to go on
        self.drain()

    def stop(self, group_id: int, index: int) -> None:
        """Ends one sequence of a request, as a stop text does; nothing happens if it has ended."""
        if not self._isolation.stop(group_id, index):
            self._between_steps(partial(self.scheduler.finish_sequence, group_id, index))
            self._isolation.stop(group_id, index)
        self.drain()

    def _between_steps(self, call: Callable[[], object]) -> None:
        """Calls the scheduler while no step is computed here."""
        try:
            call()
        except Exception as e:
            self._report_later(self._take_over(e))

    def _report_later(self, outputs: EngineCoreOutputs) -> None:
        if outputs != EngineCoreOutputs():
            self._late.append(outputs)

    # --- steps ------------------------------------------------------------------------------------------------------

    def measured_step(self) -> tuple[EngineCoreOutputs, StepStats]:
        """``step``, with its statistics."""
        start = time.perf_counter()
        outputs = self.step()
        end = time.perf_counter()
        between = start - self._step_ended if self._step_ended is not None else 0.0
        self._step_ended = end if self.has_work else None
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
            Exception: the scheduler raises again and again although it has no request.
        """
        if self._late:
            return self._late.popleft()
        start = time.perf_counter()
        try:
            outputs = self._step()
        except _SchedulerError as failure:
            outputs = self._take_over(failure.error)
        self.times.total += time.perf_counter() - start
        return outputs

    def _step(self) -> EngineCoreOutputs:
        self._scheduling(self._isolation.turn)
        if not self._in_flight:
            self._submit()
        while self._may_run_ahead():
            self._submit()
        outputs = self._receive()
        self.drain()
        return outputs

    def _may_run_ahead(self) -> bool:
        failed = any(isinstance(pending, _Failed) for _, pending in self._in_flight)
        return len(self._in_flight) < self.max_in_flight and not failed and self._scheduling(self._can_run_ahead)

    def _can_run_ahead(self) -> bool:
        return self.scheduler.can_run_ahead

    def _scheduling(self, call: Callable[[], T]) -> T:
        """The result of a call of the scheduler.

        Raises:
            _SchedulerError: it has raised.
        """
        try:
            return call()
        except Exception as e:
            raise _SchedulerError(e) from e

    def drain(self) -> None:
        """Waits for the steps in flight if all of their requests have ended meanwhile."""
        try:
            while self._in_flight and not self.scheduler.has_work:
                self._receive()
        except _SchedulerError as failure:
            self._report_later(self._take_over(failure.error))

    def _take_over(self, error: Exception) -> EngineCoreOutputs:
        """Goes on after the scheduler has raised: what it has appended so far, and perhaps the end of a request.

        Steps in flight are waited for. What they have sampled is computed again: it is not known which of it counts.
        """
        scheduler = self.scheduler
        logger.error("the scheduler failed; its requests go on without the one at fault", exc_info=error)
        outputs, scheduler.unreported = scheduler.unreported or EngineCoreOutputs(), None
        while self._in_flight:
            plan, pending = self._in_flight.popleft()
            try:
                result = pending.wait()
            except Exception as e:
                logger.error("step %d failed: %s: %s", plan.step, type(e).__name__, e)
                scheduler.preparations.repeat(plan)
            else:
                failed = scheduler.preparations.update(plan, result)
                outputs.groups += [
                    GroupOutput(group.group_id, SequenceStatus.FINISHED_ERROR.value, message, adapter_failed=is_adapter)
                    for group, message, is_adapter in failed
                ]
        self.executor.check_health()
        requests, ends = scheduler.take_all(self._last_submitted)
        outputs.groups += ends
        ended = {output.group_id for output in outputs.groups}
        end, goes_on = self._isolation.observe_failure(error, [r for r in requests if r.group_id not in ended])
        if not goes_on:
            raise error
        if end is not None:
            outputs.groups.append(end)
        return outputs

    def _submit(self) -> None:
        plan = self._scheduling(self.scheduler.schedule)
        if self._recorder is not None and plan.seq_ids:
            sequences = self.scheduler.queues.sequences
            self._recorder.note(plan.seq_ids, lambda seq_id: sequences[seq_id].group.group_id)
        for observer in self.observers:
            observer.planned(plan)
        self._last_submitted = plan.step
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
        return self._update(plan, result)

    def _update(self, plan: StepPlan, result: StepResult) -> EngineCoreOutputs:
        try:
            outputs = self.scheduler.update(plan, result)
        except Exception as e:
            self._in_flight.appendleft((plan, _Done(result)))
            raise _SchedulerError(e) from e
        self.scheduler.unreported = None
        return outputs

    def _fail(self, plan: StepPlan, error: Exception) -> EngineCoreOutputs:
        """Ends the requests of the plan and of the plans after it, which build on it."""
        message = f"the step failed: {type(error).__name__}: {error}"
        failed_at = self._group_of(error.seq_id) if isinstance(error, SequenceError) else None
        outputs = self._scheduling(partial(self.scheduler.fail, plan, message))
        while self._in_flight:
            later, pending = self._in_flight.popleft()
            try:
                pending.wait()
            except Exception as e:
                logger.error("step %d failed after it: %s: %s", later.step, type(e).__name__, e)
            outputs.groups += self._scheduling(partial(self.scheduler.fail, later, message)).groups
        for output in outputs.groups:
            if failed_at is not None and output.error == message:
                whose = "this request" if output.group_id == failed_at else "another request"
                output.error = f"the step failed at {whose}: {error}"
        self.executor.check_health()
        return outputs

    def _group_of(self, seq_id: int | None) -> int | None:
        groups = self.scheduler.queues.groups.values()
        return next((g.group_id for g in groups if any(s.seq_id == seq_id for s in g.seqs)), None)


class _SchedulerError(Exception):
    """The scheduler has raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Done:
    """A step whose result could not be applied."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


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
