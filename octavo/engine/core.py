"""The engine core: runs the steps of one model. It knows token ids only.

``StepLoop.step`` asks the scheduler for a plan, submits it to the executor and applies the result; ``EngineCore`` loads
the model and owns its KV cache blocks; ``ViewRecorder`` shows its state to those who watch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from octavo.config.engine_config import EngineConfig, idle_options
from octavo.config.kv_spec import GroupBlocks, KVLayout
from octavo.config.options import MAX_LOGPROBS_ON_GPU, SpeculativeConfig
from octavo.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineStateError,
    InsufficientMemoryError,
    SequenceError,
)
from octavo.core.model_config import ModelConfig
from octavo.core.plan import EngineCoreOutputs, GroupOutput, StepPlan, StepResult
from octavo.core.request import AdapterRef, EngineCoreRequest, SequenceStatus, adapter_preparation, limits_of
from octavo.core.stats import (
    MAX_ADAPTER_SLOTS,
    MAX_CHANGES,
    MAX_GROUPS,
    NOBODY,
    NUM_STEPS,
    AdapterSlot,
    Change,
    EngineView,
    GroupRow,
    SchedulerState,
    StepRecord,
    StepStats,
)
from octavo.engine.lives import LifeRecorder
from octavo.engine.messages import Abort, Add, Call, Stop, ToCore
from octavo.executor.executor import Executor, SubmittedStep
from octavo.executor.uniproc import make_executor, without_clock
from octavo.kernels import resolve_device
from octavo.loader.weights import read_config
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_map import block_maps
from octavo.memory.stored import StoreLimits
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, num_parameters
from octavo.process.startup import StartupFacts
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.image_time import ImageTime
from octavo.scheduler.isolation import Isolation, describe
from octavo.scheduler.policies import load_policy
from octavo.scheduler.preparations import Preparations
from octavo.scheduler.scheduler import Scheduler
from octavo.speculation.speculator import make_speculator

if TYPE_CHECKING:
    from octavo.engine.blame import LastSteps
    from octavo.engine.tokenizer import Tokenizer
    from octavo.executor.executor import PendingStep

logger = logging.getLogger("octavo")
#: A logger of its own, so that a command can leave out these lines.
startup_logger = logging.getLogger("octavo.startup")

T = TypeVar("T")
#: The tags of ``wake_up``.
SLEEPING_PARTS = ("weights", "kv_cache")
#: Seconds after a view in which changes are recorded for the next one.
_WATCH_SECONDS = 5.0
#: Seconds in which the last blocks are passed to the KV stores before sleep and shutdown, and between two tries.
_LAST_WRITES, _WRITE_PAUSE = 1.0, 0.01
#: Most device blocks that a change names.
_MAX_BLOCKS = 64
#: The fields of ``StepStats`` that are those of ``SchedulerState``, in their order.
state_of = operator.attrgetter(*SchedulerState.__struct_fields__)
#: Share of the time of a CPU's threads for writes to the KV stores, of blocks that a prompt has found, while sequences
#: run (``StoreLimits.busy_share``).
_WRITE_SHARE = 0.01
_RECORDED_FIELDS = set(StepRecord.__struct_fields__) & set(StepStats.__struct_fields__)


class StepLoop:
    """The step loop: owns the steps in flight, which are submitted and not yet received.

    Invariant: results are received in order; between two calls fewer than ``max_in_flight`` steps are in flight, and
    none without open requests. With more than one it is what vLLM calls the batch queue or async scheduling.

    If a step fails or the scheduler raises, the scheduler's state is rebuilt from the open requests, and ``Isolation``
    finds the request at fault: that one ends with an error, the others continue with the same bits.
    """

    #: Number of the engine core, of several behind one front end.
    replica = 0

    def __init__(self, scheduler: Scheduler, executor: Executor, *, max_in_flight: int = 1) -> None:
        """``max_in_flight``: steps submitted at once, including the one that is computed."""
        self.executor = executor
        self.max_in_flight = max_in_flight
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._recorder: LastSteps | None = None
        #: Outputs of failures between two steps, for the next steps to return.
        self._late: deque[EngineCoreOutputs] = deque()
        self.use(scheduler)
        self.times = StepTimes()
        self.observers: list[StepObserver] = []
        self.journal: StepJournal | None = None
        self._step_ended: float | None = None
        #: At the last measured step: prompt and decode tokens, seconds in the worker and in kernels.
        self._totals: tuple[float, float, float, float] = (0, 0, 0.0, 0.0)

    def use(self, scheduler: Scheduler) -> None:
        """Switches to a scheduler without requests; the previous one must have none left."""
        self.scheduler = scheduler
        self._isolation = Isolation(scheduler)
        self._last_submitted = 0

    def record_to(self, recorder: LastSteps) -> None:
        """Records the computed requests for the process that watches this one."""
        self._recorder = recorder
        self.scheduler.queues.on_attempt = self._isolation.on_attempt = recorder.attempt
        self._isolation.on_trial = recorder.begin_trial

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or its end not yet reported."""
        return self.scheduler.has_work or self._isolation.is_active or bool(self._late)

    @property
    def has_writes(self) -> bool:
        """Whether no request is unfinished, and ``step`` would pass cached blocks to the KV stores."""
        return self.scheduler.has_writes and not self.has_work

    def write_step(self) -> None:
        """A step of that kind."""
        self._report_later(self.step())

    def write_rest(self, seconds: float) -> None:
        """Steps of that kind until the stores have all, for ``seconds`` at most."""
        end, before = time.perf_counter() + seconds, None
        while self.has_writes and time.perf_counter() < end:
            self.write_step()
            if before == (before := self.scheduler.counts().stores):
                time.sleep(_WRITE_PAUSE)  # the stores are behind

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request; if the scheduler raises at it, the request ends with an error."""
        if self.journal is not None:
            self.journal.added(request, is_idle=not (self.has_work or self._in_flight))
        self._between_steps(partial(self._isolation.add, request))

    def abort(self, group_id: int) -> None:
        if self.journal is not None:
            self.journal.ended(group_id)
        if not self._isolation.abort(group_id):
            self._between_steps(partial(self.scheduler.finish_group, group_id))
            self._isolation.abort(group_id)  # if the scheduler has raised, the request was requeued there
        self.drain()

    def stop(self, group_id: int, index: int) -> None:
        if self.journal is not None:
            self.journal.ended(group_id, index)
        if not self._isolation.stop(group_id, index):
            self._between_steps(partial(self.scheduler.finish_sequence, group_id, index))
            self._isolation.stop(group_id, index)
        self.drain()

    def _between_steps(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as e:
            self._report_later(self._take_over(e))

    def _report_later(self, outputs: EngineCoreOutputs) -> None:
        if outputs != EngineCoreOutputs():
            self._late.append(outputs)

    def measured_step(self) -> tuple[EngineCoreOutputs, StepStats]:
        """Runs ``step`` and returns its statistics too."""
        start = time.perf_counter()
        outputs = self.step()
        end = time.perf_counter()
        between = start - self._step_ended if self._step_ended is not None else 0.0
        self._step_ended = end if self.has_work else None
        return outputs, self._measure(end - start, between)

    def measure_emptied(self) -> StepStats:
        """Statistics after aborts have ended all requests, so that no step will follow."""
        self._step_ended = None
        return self._measure(0.0, 0.0)

    def _measure(self, seconds: float, between_seconds: float) -> StepStats:
        counts, times = self.scheduler.counts(), self.times
        totals = (counts.prefill_tokens, counts.decode_tokens, times.worker, times.kernels)
        prefill, decode, worker, kernels = (now - before for now, before in zip(totals, self._totals, strict=True))
        self._totals = totals
        of_step = seconds, worker, kernels, between_seconds, int(prefill), int(decode), self.replica
        fields = *state_of(counts), *of_step
        return StepStats(*fields)

    def step(self) -> EngineCoreOutputs:
        """Receives the result of one step; if the step fails, its requests are computed again (``Isolation``).

        Raises:
            EngineDeadError: a worker is lost, or a step fails that computes none of the requests: none can follow.
            Exception: the scheduler raises repeatedly without any request.
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
        if failed or len(self._in_flight) >= self.max_in_flight:
            return False
        return self._scheduling(lambda: self.scheduler.can_run_ahead)

    def _scheduling(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as e:
            raise _SchedulerError(e) from e

    def drain(self) -> None:
        """Receives the steps in flight if all of their requests have ended."""
        try:
            while self._in_flight and not self.scheduler.has_work:
                self._receive()
        except _SchedulerError as failure:
            self._report_later(self._take_over(failure.error))

    def _take_over(self, error: Exception, failed: StepPlan | None = None) -> EngineCoreOutputs:
        """Recovers after the scheduler has raised, or a step has ``failed``: its unreported outputs, and the end of the
        request at fault, if it is known.

        Steps in flight are received and their tokens computed again: it is unknown which of them the scheduler has
        applied, and they build on the failed step. What is in the KV cache is not trusted.
        """
        scheduler = self.scheduler
        groups: set[int] | None = None
        named: int | None = None
        if failed is None:
            logger.error("the scheduler failed; its requests go on without the one at fault", exc_info=error)
            if self.journal is not None:
                self.journal.forget()
        else:
            groups = scheduler.groups_of(failed)
            if isinstance(error, SequenceError) and error.seq_id in scheduler.queues.sequences:
                named = scheduler.queues.sequences[error.seq_id].group.group_id
            scheduler.preparations.repeat(failed)
            if self.journal is not None and not self._isolation.is_active:
                self.journal.failed(failed, error)
        outputs, scheduler.unreported = scheduler.unreported or EngineCoreOutputs(), None
        while self._in_flight:
            plan, pending = self._in_flight.popleft()
            try:
                result = pending.wait()
            except Exception as e:
                logger.error("step %d failed: %s", plan.step, describe(e))
                scheduler.preparations.repeat(plan)
            else:
                outputs.groups += [
                    GroupOutput(group.group_id, SequenceStatus.FINISHED_ERROR.value, failure)
                    for group, failure in scheduler.preparations.update(plan, result)
                ]
        self.executor.check_health()
        requests, ends = scheduler.take_all(self._last_submitted)
        if failed is not None:
            scheduler.queues.forget += failed.forget  # the workers may not have come to it
        outputs.groups += ends
        ended = {output.group_id for output in outputs.groups}
        left = [request for request in requests if request.group_id not in ended]
        end, goes_on = self._isolation.observe_failure(error, left, failed=groups, named=named)
        if not goes_on and failed is not None:
            if self._recorder is not None:
                self._recorder.blame(self._isolation.last_failed)
            raise EngineDeadError(f"every step fails, also one without any request: {describe(error)}") from error
        if not goes_on:
            raise error
        if end is not None:
            outputs.groups.append(end)
        return outputs

    def _submit(self) -> None:
        journal = self.journal
        if journal is not None and self._isolation.is_active:
            journal.forget()
            journal = None
        elif journal is not None:
            journal.before_plan(self.scheduler)
        plan = self._scheduling(self.scheduler.schedule)
        if journal is not None:
            journal.planned(plan, self.scheduler)
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
            logger.exception("step %d failed; its requests go on without the one at fault", plan.step)
            del pending  # as in ``_submit``
            return self._take_over(e, plan)
        except BaseException:
            self._in_flight.appendleft((plan, _interrupted()))
            raise
        times = self.times
        times.steps += 1
        times.worker += result.seconds
        times.kernels += result.kernel_seconds
        times.device += result.device_seconds
        times.idle += result.idle_seconds
        try:
            outputs = self.scheduler.update(plan, result)
        except Exception as e:
            self._in_flight.appendleft((plan, SubmittedStep(lambda: result)))
            raise _SchedulerError(e) from e
        self.scheduler.unreported = None
        if self.journal is not None:
            self.journal.received(plan.step, outputs)
        return EngineCoreOutputs() if self._isolation.is_probing else outputs


class _SchedulerError(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Failed:
    """A step that was not submitted, or whose wait was interrupted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        try:
            raise self._error
        finally:
            del self  # as in ``_submit``


def _interrupted() -> _Failed:
    """A step interrupted by a ``BaseException``, such as one from a signal handler."""
    # One for each: an error keeps the frames that it was raised in, and with them the engine.
    return _Failed(RuntimeError("interrupted"))


@dataclass(slots=True)
class StepTimes:
    steps: int = 0
    total: float = 0.0
    #: In the worker, and there in kernels (measured only with ``time_kernels``).
    worker: float = 0.0
    kernels: float = 0.0
    device: float = 0.0
    idle: float = 0.0


class StepObserver(Protocol):
    """Called with each plan while it is in ``StepLoop.observers``."""

    def planned(self, plan: StepPlan) -> None:
        """Called before the step is submitted; must return within microseconds."""


class StepJournal(Protocol):
    """Keeps what the scheduler is given, for a dump of a step that fails; all but ``failed`` take microseconds."""

    def added(self, request: EngineCoreRequest, *, is_idle: bool) -> None: ...

    def ended(self, group_id: int, index: int | None = None) -> None:
        """An abort, or the end of one sequence."""

    def before_plan(self, scheduler: Scheduler) -> None:
        """Called before each plan for which no request is kept out of the scheduler."""

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None: ...

    def received(self, step: int, outputs: EngineCoreOutputs) -> None: ...

    def forget(self) -> None:
        """The scheduler has lost its state, or requests are kept out of it."""

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """A step has failed, first of all those with its requests; the scheduler still has its state."""


class EngineCore(StepLoop):
    """The step loop of one model: makes its scheduler, KV cache blocks and executor, and owns them."""

    def __init__(self, options: EngineConfig, folder: Path, replica: int = 0) -> None:
        """Loads the model in ``folder`` and makes its KV cache, on a GPU after measuring the peak memory of a step
        (vLLM: profile_run).
        """
        start = time.perf_counter()
        self.replica = replica
        policy = load_policy(options.scheduling_policy)  # refuses an unknown name before the model is loaded
        device = resolve_device(options.device)
        if replica == 0:
            for line in idle_options(options, device):
                logger.warning("%s", line)
        if options.distributed_executor_backend == "external_launcher":
            options = without_clock(options, policy_uses_clock=policy.uses_clock)
        self.model_config = read_config(folder, options)
        self.dtype = resolve_dtype(options, self.model_config)
        processors = len(os.sched_getaffinity(0))
        if (options.num_threads or 0) > processors:  # they wait for one another by spinning
            logger.warning(
                "num_threads is %d, but this process may use %d processors: more threads than these make steps slower",
                options.num_threads,
                processors,
            )
        context_length = _context_length(options, self.model_config)
        limit = options.max_logprobs or 0
        if (limit == -1 or limit > MAX_LOGPROBS_ON_GPU) and device != "cpu":
            raise ConfigError(f"max_logprobs must be in [0, {MAX_LOGPROBS_ON_GPU}] on a GPU, not {limit}")
        named = options
        if options.speculative_config is not None or self.model_config.head == "lm":
            from octavo.loader.mtp import with_own_drafts

            options = with_own_drafts(options, self.model_config, folder, on_cpu=device == "cpu")
        check_draft_model(options, self.model_config, folder)
        if self.model_config.is_encoder:
            options = options.for_encoder(device)
        elif self.model_config.encoder_facts is not None:
            options = options.for_encoder_decoder(device, context_length)
        elif self.model_config.model_impl == "transformers":
            options = options.for_transformers(device, context_length)
        else:
            options = options.with_token_budget(device, context_length)
        if self.model_config.has_only_states:
            options = options.for_states(self.model_config.architecture)
        #: With ``max_num_batched_tokens`` resolved.
        self.options = options
        # The rotary table need not be longer, and two kinds of scaling are better with a short one.
        fitted = replace(self.model_config, max_position=context_length)
        try:
            executor = make_executor(options, fitted, folder, self.dtype, replica)
        except InsufficientMemoryError as e:
            if named.speculative_config is not None or options.speculative_config is None:
                raise
            logger.warning("the model's layers for multi-token prediction are left out: %s", e)
            options = self.options = options.model_copy(update={"speculative_config": None})
            executor = make_executor(options, fitted, folder, self.dtype, replica)
        #: Called once: by ``shutdown``, or when the core is dropped or the process ends.
        self._end_workers = weakref.finalize(self, executor.shutdown)
        in_flight = options.token_budget * _steps_in_flight(options)
        #: Longest sequence in tokens: as configured, or less if the blocks hold less.
        self.max_model_len, counts = executor.cache_size(context_length, in_flight)
        if self.max_model_len < context_length:
            logger.warning(
                "the KV cache holds %d tokens, less than the context length of %d: longer requests are refused",
                self.max_model_len,
                context_length,
            )
        self._warn_of_long_inputs(counts)
        if "state_checkpoint_tokens" in options.model_fields_set and any(
            (group.state_tokens or 0) >= self.max_model_len > options.block_size for group in executor.kv_groups()
        ):
            logger.warning(
                "no sequence of up to %d tokens gets as far as state_checkpoint_tokens (%d): states are kept at the "
                "ends of prompts and answers alone",
                self.max_model_len,
                options.state_checkpoint_tokens,
            )
        host_counts = executor.num_host_blocks(self.max_model_len, in_flight)
        groups = executor.kv_groups()
        sizes = [
            GroupBlocks(count, host_count, group.window, group.block_bytes, group.state_tokens)
            for count, host_count, group in zip(counts, host_counts, groups, strict=True)
        ]
        executor.collective_rpc("make_cache", [counts, host_counts, self.max_model_len])
        stores = _store_limits(options)
        self.blocks = BlockManager(sizes, options.block_size, stores=stores, **block_settings(options))
        scheduler = self._new_scheduler(executor, sizes, Preparations(limits_of(options)))
        super().__init__(scheduler, executor, max_in_flight=_steps_in_flight(options))
        checkpoint = self.model_config.quantization
        self.startup = StartupFacts(
            model=options.model,
            architecture=self.model_config.architecture,
            parameters=num_parameters(build_without_weights(self.model_config, self.dtype)),
            dtype=self.dtype,
            checkpoint_quantization=checkpoint.name if checkpoint else None,
            kv_cache_dtype=self.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
            groups=sizes,
            block_size=options.block_size,
            max_model_len=self.max_model_len,
            full_length_requests=KVLayout.of(groups, options, in_flight).full_length_seqs(counts, self.max_model_len),
            max_num_seqs=options.max_num_seqs,
            token_budget=options.token_budget,
            seconds=time.perf_counter() - start,
            workers=executor.startup_facts(),
        )
        for line in self.startup.lines():
            startup_logger.info("%s", line)
        self.is_sleeping = False

    def _warn_of_long_inputs(self, counts: Sequence[int]) -> None:
        longest, size = self.model_config.longest_input(self.max_model_len), self.options.block_size
        needed = 0 if longest is None else -(-longest // size) + -(-self.max_model_len // size)
        if needed > min(counts, default=needed):
            logger.warning(
                "the KV cache has %d blocks, but a request of %d tokens with an encoder's input of %s needs %d: one "
                "that outgrows the cache ends with an error",
                min(counts),
                self.max_model_len,
                longest,
                needed,
            )

    def _new_scheduler(self, executor: Executor, sizes: list[GroupBlocks], preparations: Preparations) -> Scheduler:
        options = self.options
        drafts = options.speculative_config
        uses_clock = options.distributed_executor_backend != "external_launcher"
        # Predictions of requests need no option, but blocks of states have room for drafts with the option only.
        if drafts is None and all(size.state_tokens is None for size in sizes):
            drafts = SpeculativeConfig(method="prediction", adaptive=uses_clock)
        images = None
        if self.model_config.image_facts is not None:
            images = ImageTime(options.image_step_ms / 1000, learns=uses_clock)
        scheduler = Scheduler(
            self.blocks,
            options,
            self.max_model_len,
            speculator=None if drafts is None else make_speculator(drafts),
            runs_ahead=_steps_in_flight(options) > 1,
            num_stages=executor.num_stages,
            preparations=preparations,
            image_time=images,
        )
        if options.preemption_mode == "auto":  # the only mode that needs the cost of moving a block
            seconds = executor.measure_swap()
            if seconds:
                scheduler.move_cost.observe_move(sum(size.block_bytes for size in sizes), seconds)
        return scheduler

    def handle(self, message: ToCore) -> None:
        """Does what a front end asks without waiting for an answer."""
        match message:
            case Add(request):
                self.add(request)
            case Abort(group_id):
                self.abort(group_id)
            case Stop(group_id, index):
                self.stop(group_id, index)
            case Call(_, method, args):
                self.call(method, args)

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Calls one of ``OPERATIONS``; arguments may be plain data of another process."""
        return OPERATIONS[method](self)(*args)

    def pin_adapter(self, ref: Any) -> None:
        adapter = msgspec.convert(ref, AdapterRef)
        self.scheduler.preparations.pin(adapter_preparation(adapter), adapter.name)

    def sleep(self, level: int = 1) -> None:
        """Frees memory until ``wake_up``; see ``LLM.sleep`` for the levels. Level 2 may follow level 1.

        Pinned prefixes are released: the owner must compute them again. Adapters stay in host memory.
        """
        if level not in (1, 2):
            raise ConfigError(
                f"the level of sleep must be 1 (the KV cache is freed) or 2 (the weights too), not {level!r}"
            )
        if self.has_work:
            raise EngineStateError("requests are unfinished: let them end or abort them before sleep()")
        self.write_rest(_LAST_WRITES)
        logger.info("sleeping at level %d: %.2f GiB of memory freed", level, self.executor.sleep(level) / (1 << 30))
        self.blocks.pinned.clear()
        self.scheduler.reset_prefix_cache()
        self.is_sleeping = True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restores weights and KV cache, or those named in ``tags``; returns whether both are there."""
        if unknown := set(tags or ()) - set(SLEEPING_PARTS):
            raise ConfigError(f"tags of wake_up must be of {', '.join(SLEEPING_PARTS)}, not {', '.join(unknown)}")
        parts = [*SLEEPING_PARTS] if tags is None else [*tags]
        self.is_sleeping = not all(self.executor.collective_rpc("wake_up", [parts]))
        return not self.is_sleeping

    @property
    def was_shut_down(self) -> bool:
        return not self._end_workers.alive

    def shutdown(self) -> None:
        """Ends the workers, after blocks for the KV stores; they also end when the core is garbage collected."""
        if self._end_workers.alive and not self.is_sleeping:
            with contextlib.suppress(Exception):  # such as a lost worker
                self.executor.check_health()
                self.write_rest(_LAST_WRITES)
        self._end_workers()


#: What ``EngineCore.call`` calls, by name.
OPERATIONS: dict[str, Callable[[EngineCore], Callable[..., Any]]] = {
    "stats": lambda core: core.scheduler.stats,
    "reset_prefix_cache": lambda core: core.scheduler.reset_prefix_cache,
    "sleep": lambda core: core.sleep,
    "wake_up": lambda core: core.wake_up,
    "pin_adapter": lambda core: core.pin_adapter,
    "unpin_adapter": lambda core: core.scheduler.preparations.unpin,
    "unpin_prefix": lambda core: core.blocks.release_prefix,
    "collective_rpc": lambda core: core.executor.collective_rpc,
}


def block_settings(options: EngineConfig) -> dict[str, Any]:
    """The arguments of ``BlockManager``; the token budget in ``options`` must be resolved."""
    return {
        "max_num_batched_tokens": options.token_budget * _steps_in_flight(options),
        "cuts_prompts": options.cuts_prompts,
        "watermark": options.watermark,
        "prefix_caching": options.enable_prefix_caching,
        "host_cache": options.host_prefix_cache,
        "hold_share": options.cache_hold_share,
    }


def _store_limits(options: EngineConfig) -> StoreLimits | None:
    if not options.has_stores:
        return None
    if options.moves_decodes:  # requests wait to be moved until their blocks are written
        return StoreLimits(reports_written=True)
    if resolve_device(options.device) != "cpu":
        return StoreLimits()
    return StoreLimits(busy_share=_WRITE_SHARE * (options.num_threads or len(os.sched_getaffinity(0))))


def _steps_in_flight(options: EngineConfig) -> int:
    """One per pipeline stage; two with ``async_scheduling``, the default on a GPU."""
    if options.pipeline_parallel_size > 1:
        return options.pipeline_parallel_size
    return 2 if options.plans_ahead(resolve_device(options.device)) else 1


def resolve_dtype(options: EngineConfig, config: ModelConfig) -> str:
    """The type in which the network computes."""
    if options.dtype != "auto":
        return options.dtype
    stored = config.checkpoint_dtype
    if stored == "float16" and resolve_device(options.device) == "cpu":
        return "bfloat16"
    return stored if stored in ("float32", "float16") else "bfloat16"


def _context_length(options: EngineConfig, config: ModelConfig) -> int:
    length = options.max_model_len or config.default_length
    if length > config.max_position:
        raise ConfigError(
            f"max_model_len ({length}) is longer than the model's context length ({config.max_position} tokens)"
            f"{config.context_note and '; ' + config.context_note}"
        )
    budget = options.max_num_batched_tokens
    if config.is_encoder:
        return length
    if not options.enable_chunked_prefill and budget is not None and budget < length:
        raise ConfigError(
            f"with enable_chunked_prefill off, max_num_batched_tokens ({budget}) must be at least the context length "
            f"({length}); lower max_model_len or raise the budget"
        )
    return length


class ViewRecorder:
    """Records the last steps and the changes since the last view.

    ``note`` keeps the statistics of each step, at no further cost. After a ``view``, ``planned`` must be called with
    each plan until ``watches`` is False.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        steps: Iterable[tuple[float, StepStats]] = (),
        obstacle: Callable[[], str] | None = None,
    ) -> None:
        """``steps``: those before, which another recorder has noted; ``obstacle``: instead of the scheduler's."""
        self._scheduler, self._clock = scheduler, clock
        self._obstacle = obstacle or scheduler.obstacle
        #: Times at which the last steps ended, and their statistics.
        self.steps: deque[tuple[float, StepStats]] = deque(steps, maxlen=NUM_STEPS)
        #: Number of all steps, and of those before the last view.
        self._noted = self._sent = 0
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._num_changes = self._preempted = 0
        #: Blocks that each KV group had evicted at the last plan.
        self._evicted = self._num_evicted()
        #: By tier: blocks that the KV stores had evicted at the last plan.
        self._evicted_by_store: dict[str, int] = {}
        #: By group: its preemptions at the last plan.
        self._seen: dict[int, int] = {}
        self._lives = LifeRecorder(scheduler, clock)
        self._last_view = -_WATCH_SECONDS

    def note(self, stats: StepStats) -> None:
        self.steps.append((self._clock(), stats))
        self._noted += 1
        if self.watches:
            self._lives.stepped()
        else:
            self._lives.clear()

    @property
    def watches(self) -> bool:
        """Whether a view was asked for within the last seconds."""
        return self._clock() - self._last_view < _WATCH_SECONDS

    def planned(self, plan: StepPlan) -> None:
        """Records the changes that a plan makes to blocks and groups."""
        step = plan.step
        if pairs := plan.blocks_to_swap_out[:_MAX_BLOCKS]:
            self._add(Change("swap_out", step, NOBODY, [device for device, _ in pairs]))
        if pairs := plan.blocks_to_swap_in[:_MAX_BLOCKS]:
            self._add(Change("swap_in", step, NOBODY, [device for _, device in pairs]))
        for source, target in plan.blocks_to_copy:
            self._add(Change("copy", step, NOBODY, [source, target]))
        for fork in plan.forks:
            sequence = self._scheduler.queues.sequences.get(fork.child)
            group_id = NOBODY if sequence is None else sequence.group.group_id
            self._add(Change("fork", step, group_id, self._scheduler.blocks.table(fork.child)[:_MAX_BLOCKS]))
        evicted = self._num_evicted()
        if evicted != self._evicted:
            for group, now, before in zip(self._scheduler.blocks.groups, evicted, self._evicted, strict=True):
                last = list(group.cache.last_evicted)[before - now :] if now > before else []
                for why, ones in itertools.groupby(last, key=operator.itemgetter(1)):
                    self._add(Change("evict", step, NOBODY, [block for block, _ in ones], why=why))
            self._evicted = evicted
        self._add_stored(plan)
        counts = self._scheduler.counts()
        preempted = counts.preemptions_by_recompute + counts.preemptions_by_swap
        if preempted != self._preempted:
            self._preempted = preempted
            self._add_preemptions(step)
        self._lives.planned(plan)

    def _add_stored(self, plan: StepPlan) -> None:
        """What came from the KV stores, and what these have evicted, as far as they have reported it."""
        if self._scheduler.fetches is None:
            return
        if plan.blocks_fetched:
            blocks = [block for _, _, block in plan.blocks_fetched[:_MAX_BLOCKS]]
            self._add(Change("swap_in", plan.step, NOBODY, blocks, why="store"))
        for tier in self._scheduler.fetches.stats.tiers:
            before = self._evicted_by_store.get(tier.tier, tier.evicted)
            if tier.evicted > before:
                self._add(Change("evict", plan.step, NOBODY, cost=tier.evicted - before, why=tier.tier))
            self._evicted_by_store[tier.tier] = tier.evicted

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        self._num_changes += 1

    def _num_evicted(self) -> list[int]:
        return [group.cache.num_evicted for group in self._scheduler.blocks.groups]

    def _add_preemptions(self, step: int) -> None:
        for group in self._scheduler.queues.groups.values():
            totals = group.totals
            preempted = totals.num_recomputes + totals.num_swaps
            if preempted > self._seen.get(group.group_id, 0) and group.status is not SequenceStatus.RUNNING:
                number, cause = group.group_id, group.preempted_for
                if group.status is SequenceStatus.SWAPPED:
                    self._add(Change("swap", step, number, [], totals.num_swapped_blocks, cause))
                else:
                    self._add(Change("recompute", step, number, [], totals.num_recomputed_tokens, cause))
                self._lives.preempted(group, step)
            self._seen[group.group_id] = preempted

    def view(self, fresh: bool = False) -> EngineView:
        """The state now, and the changes since the last view; ``fresh``: includes all recorded steps."""
        start, now = time.thread_time(), self._clock()
        if not self.watches:  # earlier changes were not recorded
            self._changes.clear()
            self._lives.clear()
            self._num_changes, self._evicted = 0, self._num_evicted()
            self._evicted_by_store.clear()
            self._seen = {
                group.group_id: group.totals.num_recomputes + group.totals.num_swaps
                for group in self._scheduler.queues.groups.values()
            }
        self._last_view = now
        counts, options = self._scheduler.counts(), self._scheduler.options
        self._preempted = counts.preemptions_by_recompute + counts.preemptions_by_swap
        new = len(self.steps) if fresh else min(self._noted - self._sent, len(self.steps))
        self._sent = self._noted
        groups = list(self._scheduler.queues.groups.values())
        holders = [(holder, group.group_id) for group in groups for holder in group.holder_ids]
        view = EngineView(
            replica=0,
            at=now,
            token_budget=options.token_budget,
            max_num_seqs=options.max_num_seqs,
            state=SchedulerState(*state_of(counts)),
            blocks=block_maps(self._scheduler.blocks, holders),
            groups=list(self._rows(groups, now)),
            steps=[step_record(at, stats) for at, stats in itertools.islice(self.steps, len(self.steps) - new, None)],
            changes=list(self._changes),
            num_changes=self._num_changes,
            evicted_blocks=sum(self._num_evicted()),
            adapters=[
                AdapterSlot(adapter.slot, adapter.key, adapter.num_running)
                for adapter in self._scheduler.preparations.adapters_in_slots()[:MAX_ADAPTER_SLOTS]
                if adapter.slot is not None
            ],
            lives=self._lives.take(groups),
        )
        self._seen = {group.group_id: self._seen.get(group.group_id, 0) for group in groups}
        self._changes.clear()
        self._num_changes = 0
        view.cost = time.thread_time() - start
        return view

    def _rows(self, groups: list[SequenceGroup], now: float) -> Iterator[GroupRow]:
        blocks = self._scheduler.blocks
        obstacle = self._obstacle() if len(groups) > len(self._scheduler.queues.running) else ""
        for status in (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED):
            ones = (group for group in groups if group.status is status)
            for group in itertools.islice(ones, MAX_GROUPS):
                totals, prompt = group.totals, len(group.request.prompt_token_ids)
                yield GroupRow(
                    group.group_id,
                    status.value,
                    group.num_seqs,
                    prompt,
                    group.num_tokens - prompt,
                    group.num_computed,
                    totals.num_cached_tokens,
                    max(0.0, now - group.request.arrival_time),
                    totals.num_recomputes,
                    totals.num_recomputed_tokens,
                    totals.num_swaps,
                    totals.num_swapped_blocks,
                    group.preempted_for,
                    group.is_held,
                    "" if status is SequenceStatus.RUNNING else self._waits_for(group) or obstacle,
                    _num_blocks(blocks, group),
                    group.request.progress is not None,
                )

    def _waits_for(self, group: SequenceGroup) -> str:
        """What it waits for by itself."""
        needs = self._scheduler.preparations.needs(group)
        missing = next((prepared.preparation.kind for prepared in needs if not prepared.is_usable), "")
        return "store" if group.is_held else missing


def _num_blocks(blocks: BlockManager, group: SequenceGroup) -> int:
    if len(holders := group.holder_ids) == 1:
        return sum(layers.num_held(holders[0]) for layers in blocks.groups)
    return len({block for holder in holders for _, block in blocks.held(holder)})


def step_record(at: float, stats: StepStats) -> StepRecord:
    fields = {name: getattr(stats, name) for name in _RECORDED_FIELDS}
    preemptions = stats.preemptions_by_recompute + stats.preemptions_by_swap
    return StepRecord(step=stats.steps, at=at, preemptions=preemptions, **fields)


def check_draft_model(options: EngineConfig, config: ModelConfig, folder: Path) -> None:
    """Refuses a draft model with another vocabulary than the model in ``folder``, before weights are read.

    Both must have the same tokens with the same ids. Embedding rows without a token may differ in number; without
    tokenizers to compare, the sizes must be equal.
    """
    draft = options.speculative_config
    if draft is None or draft.method != "draft_model":
        return
    # Imported here: the core's process needs no tokenizer otherwise.
    from octavo.engine.tokenizer import NoTokenizer, find_tokenizer
    from octavo.loader.mtp import drafter_folder

    draft_folder = drafter_folder(options)
    draft_size = read_model_config(draft_folder, model_impl="octavo").vocab_size
    if draft_folder == folder:
        return
    tokenizer = find_tokenizer(options, folder)
    draft_tokenizer = find_tokenizer(options.model_copy(update={"tokenizer": None}), draft_folder)
    if isinstance(tokenizer, NoTokenizer) or isinstance(draft_tokenizer, NoTokenizer):
        difference = None
        if draft_size != config.vocab_size:
            difference = f"{draft_size} tokens instead of {config.vocab_size}"
    else:
        difference = _difference(tokenizer, draft_tokenizer)
    if difference is not None:
        raise ConfigError(
            f"speculative_config: the draft model {draft.model!r} has another vocabulary than the model "
            f"{options.model!r}: {difference}; take one of the same family, or method 'ngram' or 'suffix'"
        )


def _difference(model: Tokenizer, drafts: Tokenizer) -> str | None:
    model_tokens, draft_tokens = (
        {token_id: text for text, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
        for tokenizer in (model, drafts)
    )
    for token_id in sorted(model_tokens.keys() & draft_tokens.keys()):
        if model_tokens[token_id] != draft_tokens[token_id]:
            return f"token {token_id} is {draft_tokens[token_id]!r} instead of {model_tokens[token_id]!r}"
    if len(model_tokens) != len(draft_tokens):
        return f"{len(draft_tokens)} tokens instead of {len(model_tokens)}"
    missing = min(model_tokens.keys() ^ draft_tokens.keys(), default=None)
    return None if missing is None else f"token {missing} is in one of them alone"
