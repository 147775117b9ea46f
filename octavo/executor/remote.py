"""What executors of workers in other processes have in common: messages to them, and what becomes of failures."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.config.options import FIRST_STEP_TIMEOUT, ParallelLayout
from octavo.core.errors import ConfigError, EngineDeadError, EngineKilledError
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.channels import SLOT_BYTES, SLOTS, Broadcast
from octavo.executor.executor import Executor, PendingStep, SubmittedStep, WorkerReports, reports_of
from octavo.executor.worker import WorkerSpec, find_difference, function_name
from octavo.executor.worker_loop import FAILED, LOG, StepMessage, WorkerCall, WorkerStart
from octavo.process.children import (
    Failure,
    LocalConnections,
    LogMessage,
    ProcessorWaits,
    how_it_ended,
    is_stopped,
    num_out_of_memory,
    shared_memory,
    start_process,
    was_killed,
)
from octavo.process.interrupts import HeldInterrupts

#: Seconds that other workers have to answer a message on which one has failed.
_GRACE = 5.0
#: Share of a step's time after which it is looked whether workers have had a processor.
_LOOK = 0.1

#: Seconds that workers may take to end before they are killed.
END_TIMEOUT = 3.0

logger = logging.getLogger("octavo")


class RemoteExecutor(Executor):
    """Workers at the other ends of sockets. Each answers each message, in their order.

    What starts and ends them is a subclass's.
    """

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        """Prepares the workers; ``start`` starts them."""
        self._replica = replica
        self._options = options
        self._layout = ParallelLayout.of(options, 0)
        self.num_stages = options.pipeline_parallel_size
        self._spec = spec
        self._broadcast: Broadcast | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._results = msgspec.msgpack.Decoder(StepResult)
        #: Messages sent, and answers received of each worker; messages whose answers are still wanted, and those that
        #: have come.
        self._sent = 0
        self._received = [0] * self._layout.world_size
        self._wanted: set[int] = set()
        self._answers: list[dict[int, tuple[int, bytes]]] = [{} for _ in self._received]
        self._sampled = StageTokens(self.num_stages)
        self._reports = WorkerReports(self._layout.world_size)
        self._lost: EngineDeadError | None = None
        #: Seconds that a step may take.
        self._patience = max(options.step_timeout, FIRST_STEP_TIMEOUT)

    @abstractmethod
    def _exit_reason(self, rank: int | None = None) -> str:
        """How a worker ended; without ``rank``, the first that has."""

    def _was_killed(self) -> bool:
        """Whether somebody has ended or stopped a worker, as far as that can be known."""
        return False

    def _held_up(self) -> float:
        """Seconds since the last call for which a worker was ready to run while others had the processors."""
        return 0.0

    @abstractmethod
    def _end_workers(self, timeout: float) -> None:
        """Ends the workers that have not ended by themselves within ``timeout`` seconds."""

    # --- messages ---------------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """See ``Executor``."""
        name = method if isinstance(method, str) else function_name(method)
        return self._call(WorkerCall(name, list(args), dict(kwargs or {})), timeout)

    def _call(self, message: WorkerCall | WorkerStart, timeout: float | None = None) -> list[Any]:
        try:
            data = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError) as e:
            raise ConfigError(f"a call of workers in other processes takes plain data as arguments: {e}") from None
        answers = self._receive(self._send(data), timeout)
        for kind, content in answers:
            if kind == FAILED:
                raise _error(content)
        return [msgspec.msgpack.decode(content) for _, content in answers]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Sends the plan to all workers."""
        number = self._send(self._encoder.encode(StepMessage(plan, self._sampled.take())))
        return SubmittedStep(partial(self.receive_step, number))

    def receive_step(self, number: int) -> StepResult:
        """The result of message ``number``, a step."""
        answers = self._receive(number, self._patience, of_step=True)
        self._patience = self._options.step_timeout
        for rank, (kind, content) in enumerate(answers):
            if kind == FAILED and len(answers) == 1:
                raise _error(content)
            if kind == FAILED:
                raise self._lose(f"worker {rank} failed: {_error(content)}")
        reporter = self._layout.output_rank
        result = self._results.decode(answers[reporter][1])
        if len(answers) > 1:
            reports = [(i, self._results.decode(data)) for i, (_, data) in enumerate(answers) if data and i != reporter]
            if result.sampled_digest:
                digests = {rank: answer.sampled_digest for rank, answer in [(reporter, result), *reports]}
                self._compare_ranks(digests, result.step)
            if reports or reports_of(result) is not None:
                self._reports.combine(result, reports, reporter)
        self._sampled.add(result)
        return result

    def _compare_ranks(self, digests: dict[int, bytes], step: int) -> None:
        """Ends the engine if those of a rank that samples is another than the others'."""
        sampling = {rank: digests.get(rank, b"") for rank in range(self._layout.output_rank, self._layout.world_size)}
        first = max(1, step + 1 - self._options.rank_check_interval)
        if difference := find_difference(sampling, first, step):
            raise self._lose(difference)

    def _send(self, data: bytes) -> int:
        """Sends an encoded message to all workers: its number."""
        broadcast = self._alive()
        while self._sent - min(self._received) >= SLOTS:
            self._pump([rank for rank, count in enumerate(self._received) if self._sent - count >= SLOTS], None)
        with self._whole_message():
            broadcast.send(data)
            self._sent += 1
            self._wanted.add(self._sent)
        return self._sent

    @contextlib.contextmanager
    def _whole_message(self, rank: int | None = None) -> Iterator[None]:
        """Sends or receives one as a whole, or ends the workers: nobody could tell where the next begins.

        Raises:
            EngineDeadError: the worker ``rank`` is lost, or any.
        """
        with HeldInterrupts():
            try:
                yield
            except ConnectionError:
                raise self._lose(self._exit_reason(rank), killed=self._was_killed()) from None
            except BaseException as e:  # of a signal handler of the program
                self._lose(f"{type(e).__name__} was raised in the middle of a message")
                raise

    def _receive(self, number: int, timeout: float | None = None, *, of_step: bool = False) -> list[tuple[int, bytes]]:
        """The answers of all workers to message ``number``, by rank.

        Of a step, the time in which workers had no processor does not count for ``timeout``.

        Raises:
            EngineDeadError: a worker is lost.
            OctavoError: one has failed and the others do not answer: they may wait for it in a collective.
            TimeoutError: not all have answered within ``timeout`` seconds.
        """
        self._alive()
        deadline = None if timeout is None else time.monotonic() + timeout
        failure: tuple[int, bytes] | None = None
        if deadline is not None and timeout is not None and of_step:
            deadline -= timeout * (1 - _LOOK)
        quiet = 0.0
        try:
            while missing := [rank for rank, count in enumerate(self._received) if count < number]:
                failure = failure or self._find_failure(number)
                if failure is not None:
                    deadline = min(deadline or math.inf, time.monotonic() + _GRACE)
                try:
                    self._pump(missing, None if deadline is None else deadline - time.monotonic())
                except TimeoutError:
                    if failure is None and of_step and timeout is not None:
                        # The first look has nothing to compare with.
                        quiet += max(0.0, _LOOK * timeout - self._held_up())
                        if quiet < timeout * (1 - _LOOK / 2):
                            deadline = time.monotonic() + _LOOK * timeout
                            continue
                    if failure is None:
                        silent = f"workers {missing} have not answered within {timeout:g} s"
                        self._lose(silent, killed=self._was_killed())
                        raise TimeoutError(silent) from None
                    error = _error(failure[1])
                    self._lose(f"worker {failure[0]} failed: {error}")
                    raise error from None
            return [answers[number] for answers in self._answers]
        finally:  # what comes after an interrupt is dropped
            self._wanted.discard(number)
            for answers in self._answers:
                answers.pop(number, None)

    def _find_failure(self, number: int) -> tuple[int, bytes] | None:
        """The worker that has answered message ``number`` with an error, and the error, if there is one."""
        for rank, answers in enumerate(self._answers):
            kind, content = answers.get(number, (None, b""))
            if kind == FAILED:
                return rank, content
        return None

    def _pump(self, ranks: list[int], timeout: float | None) -> None:
        """Takes what at least one of these workers has sent."""
        broadcast = self._alive()
        for rank in broadcast.wait(ranks, timeout):
            with self._whole_message(rank):
                kind, content = broadcast.receive(rank)
                if kind != LOG:
                    self._received[rank] += 1
                    if self._received[rank] in self._wanted:
                        self._answers[rank][self._received[rank]] = kind, content
            if kind == LOG:
                message = msgspec.msgpack.decode(content, type=LogMessage)
                logger.log(message.level, "%s", message.text)

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """See ``Executor``: also detects a worker that has ended since it answered last."""
        self._alive()
        idle = [rank for rank, count in enumerate(self._received) if count == self._sent]
        with contextlib.suppress(TimeoutError):  # they have said nothing, as they should
            if idle:
                self._pump(idle, 0.0)

    def shutdown(self) -> None:
        """Closes the connections, at which the workers end, and ends those that do not."""
        if self._lost is None:
            self._lost = EngineDeadError("the executor was shut down; a new engine must be made")
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
        self._end_workers(END_TIMEOUT)

    def _alive(self) -> Broadcast:
        if self._lost is not None:
            raise self._lost
        assert self._broadcast is not None, "start comes first"
        return self._broadcast

    def _lose(self, reason: str, *, killed: bool = False) -> EngineDeadError:
        """Ends all workers, as one cannot go on: the error to raise."""
        kind = EngineKilledError if killed else EngineDeadError
        self._lost = kind(f"{reason}; all workers of the engine were ended")
        self._end_workers(0.0)
        self.shutdown()
        return self._lost


class StageTokens:
    """Tokens that the last pipeline stage has sampled, collected until the next plan takes them to the other stages."""

    def __init__(self, stages: int) -> None:
        """Nothing is collected for one stage."""
        self._collects = stages > 1
        self._tokens: dict[int, list[int]] = {}

    def add(self, result: StepResult) -> None:
        """Takes the tokens of a result."""
        if not self._collects:
            return
        counts = result.num_tokens or [1] * len(result.seq_ids)
        start = 0
        for seq_id, count in zip(result.seq_ids, counts, strict=True):
            self._tokens.setdefault(seq_id, []).extend(result.token_ids[start : start + count])
            start += count

    def take(self) -> dict[int, list[int]]:
        """What was collected since the last call, by sequence id."""
        tokens, self._tokens = self._tokens, {}
        return tokens


def _error(content: bytes) -> Exception:
    """The exception of a ``Failure``."""
    return msgspec.msgpack.decode(content, type=Failure).error()


# The executor of workers in processes of this machine.


class MultiprocExecutor(RemoteExecutor):
    """A process for each rank. Messages go through shared memory; on CPUs, so do collectives and hidden states."""

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        """Prepares the workers; ``start`` starts their processes."""
        super().__init__(options, spec, replica)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waits = ProcessorWaits()
        self._out_of_memory = num_out_of_memory()

    def start_workers(self) -> None:
        """Starts the processes."""
        world = self._layout.world_size
        gpus = self._visible_gpus()
        with contextlib.ExitStack() as inherited:  # descriptors that are the workers' alone from then on
            memory = _closing(inherited, shared_memory(SLOTS * SLOT_BYTES))
            connections = self._connect(inherited, uses_memory=not gpus)
            descriptors = [d for c in connections if c is not None for d in c.descriptors]
            sockets = []
            for rank in range(world):
                ours, theirs = socket.socketpair()
                sockets.append(ours)
                with theirs:
                    process = start_process(
                        "octavo.executor.worker_loop",
                        *(theirs.fileno(), memory, rank),
                        environment={"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {},
                        pass_fds=[theirs.fileno(), memory, *descriptors],
                        stdin=subprocess.DEVNULL,
                    )
                    self._processes.append(process)
            self._broadcast = Broadcast(sockets, memory)
        self.needs_store = bool(gpus)
        first, workers = self._replica * world, self._options.data_parallel_size * world
        places = [(first + rank, workers) for rank in range(world)]
        self._call(WorkerStart(self._spec, connections, places, logger.getEffectiveLevel()))

    def _visible_gpus(self) -> list[str]:
        """A GPU for each worker, as CUDA_VISIBLE_DEVICES names it; none if workers compute on the CPU.

        Raises:
            ConfigError: there are too few.
        """
        from octavo.kernels import num_gpus, resolve_device

        if resolve_device(self._options.device) == "cpu":
            return []
        options, world, there = self._options, self._layout.world_size, num_gpus()
        if there < world * options.data_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size ({options.tensor_parallel_size}) x pipeline_parallel_size "
                f"({options.pipeline_parallel_size}) x data_parallel_size ({options.data_parallel_size}) needs "
                f"{world * options.data_parallel_size} GPUs, but this machine has {there}"
            )
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(i) for i in range(there)]
        return names[self._replica * world : (self._replica + 1) * world]

    def _connect(self, inherited: contextlib.ExitStack, *, uses_memory: bool) -> list[LocalConnections | None]:
        """Memory and pipes between the workers, by rank; None on GPUs, which have links of their own."""
        layout, options = self._layout, self._options
        if not uses_memory:
            return [None] * layout.world_size
        made = [LocalConnections() for _ in range(layout.world_size)]
        size = layout.tensor_parallel_size
        if size > 1:
            from octavo.kernels.cpu.backend import SharedMemoryCommunicator

            for stage in range(layout.pipeline_parallel_size):
                group = _closing(inherited, shared_memory(SharedMemoryCommunicator.bytes_for(size)))
                for rank in range(stage * size, (stage + 1) * size):
                    made[rank].group = group
        from octavo.executor.channels import link_slots

        floats = options.token_budget * self._spec.model_config().hidden_size
        for rank in range(layout.world_size - size):
            memory = _closing(inherited, shared_memory(4 * link_slots(layout) * floats))
            read, write = (_closing(inherited, end) for end in os.pipe())
            made[rank].outgoing, made[rank + size].incoming = (memory, write), (memory, read)
        return list(made)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _exit_reason(self, rank: int | None = None) -> str:
        """How the process of a worker ended; without ``rank`` the first that has."""
        deadline = time.monotonic() + 1.0  # its socket closes some milliseconds before it has ended
        while time.monotonic() < deadline:
            for number, process in enumerate(self._processes):
                code = process.poll()
                if code is not None and rank in (None, number):
                    return f"worker {number} (process {process.pid}) {how_it_ended(code)}"
            time.sleep(0.01)
        return "a worker has closed its connection"

    def _was_killed(self) -> bool:
        """See ``RemoteExecutor``."""
        codes = [process.poll() for process in self._processes]
        if any(code is not None and was_killed(code, self._out_of_memory) for code in codes):
            return True
        return any(is_stopped(process.pid) for process in self._processes)

    def _held_up(self) -> float:
        """See ``RemoteExecutor``."""
        return self._waits.since_last(process.pid for process in self._processes)

    def _end_workers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                continue
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a call of a driver cannot be killed
                process.wait(END_TIMEOUT)


def _closing(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor
