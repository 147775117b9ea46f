"""The executor of workers in processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, reported_error
from octavo.core.model_config import ModelConfig
from octavo.core.parallel import ParallelLayout
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.broadcast import SLOT_BYTES, SLOTS, Broadcast, shared_memory
from octavo.executor.executor import Executor, PendingStep
from octavo.executor.pipeline import SampledTokens
from octavo.executor.worker import LocalConnections, WorkerSpec, function_name
from octavo.executor.worker_process import FAILED, LOG, Call, Failure, Log, Step, WorkerStart

#: Seconds that the processes may take to end before they are killed.
_END_TIMEOUT = 3.0
#: Seconds that other workers have to answer a message on which one has failed.
_GRACE = 5.0

logger = logging.getLogger("octavo")


class MultiprocExecutor(Executor):
    """A process for each rank; messages go through ``Broadcast``.

    Each worker answers each message, in their order.
    """

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Prepares the workers; ``start`` starts their processes."""
        self._options = options
        self._layout = ParallelLayout.of(options, 0)
        self.num_stages = options.pipeline_parallel_size
        self._spec = WorkerSpec(options.model_dump(), config, str(folder), dtype, rank=0)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._broadcast: Broadcast | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._results = msgspec.msgpack.Decoder(StepResult)
        #: Messages sent, and answers received of each worker; those that were not asked for yet, by message.
        self._sent = 0
        self._received = [0] * self._layout.world_size
        self._answers: list[dict[int, tuple[int, bytes]]] = [{} for _ in self._received]
        self._sampled = SampledTokens(self.num_stages)
        self._lost: EngineDeadError | None = None

    def start(self) -> None:
        """Starts the processes and loads the model; errors are those of ``ModelRunner``."""
        world = self._layout.world_size
        gpus = self._visible_gpus()
        with contextlib.ExitStack() as inherited:  # descriptors that are the workers' alone from then on
            memory = _closing(inherited, shared_memory(SLOTS * SLOT_BYTES))
            connections = self._connect(inherited, uses_memory=not gpus)
            descriptors = [d for c in connections if c is not None for d in _descriptors(c)]
            sockets = []
            for rank in range(world):
                ours, theirs = socket.socketpair()
                sockets.append(ours)
                with theirs:
                    fds = [theirs.fileno(), memory, *descriptors]
                    self._processes.append(_spawn(rank, fds, gpus[rank] if gpus else None))
            self._broadcast = Broadcast(sockets, memory)
        level = logger.getEffectiveLevel()
        self._call(WorkerStart(self._spec, connections, world, level))
        store = self._call(Call("open_store"))[0] if gpus else None
        self.collective_rpc("init_device", [store])
        self.collective_rpc("load_model")

    def _visible_gpus(self) -> list[str]:
        """A GPU for each worker, as CUDA_VISIBLE_DEVICES names it; none if workers compute on the CPU.

        Raises:
            ConfigError: there are too few.
        """
        from octavo.kernels import resolve_device

        if resolve_device(self._options.device) == "cpu":
            return []
        import torch

        world, there = self._layout.world_size, torch.cuda.device_count()
        if there < world:
            raise ConfigError(
                f"tensor_parallel_size ({self._options.tensor_parallel_size}) x pipeline_parallel_size "
                f"({self._options.pipeline_parallel_size}) needs {world} GPUs, but this machine has {there}"
            )
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (named.split(",") if named else [str(i) for i in range(there)])[:world]

    def _connect(self, inherited: contextlib.ExitStack, *, uses_memory: bool) -> list[LocalConnections | None]:
        """Memory and pipes between the workers, by rank; None on GPUs, which have links of their own."""
        layout, options = self._layout, self._options
        if not uses_memory:
            return [None] * layout.world_size
        made = [LocalConnections() for _ in range(layout.world_size)]
        size = layout.tensor_parallel_size
        if size > 1:
            from octavo.kernels.cpu.collectives import SharedMemoryCommunicator

            for stage in range(layout.pipeline_parallel_size):
                group = _closing(inherited, shared_memory(SharedMemoryCommunicator.bytes_for(size)))
                for rank in range(stage * size, (stage + 1) * size):
                    made[rank].group = group
        from octavo.executor.connections import link_slots

        floats = options.max_num_batched_tokens * self._spec.config.hidden_size
        for rank in range(layout.world_size - size):
            memory = _closing(inherited, shared_memory(4 * link_slots(layout) * floats))
            read, write = (_closing(inherited, end) for end in os.pipe())
            made[rank].outgoing, made[rank + size].incoming = (memory, write), (memory, read)
        return list(made)

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
        return self._call(Call(name, list(args), dict(kwargs or {})), timeout)

    def _call(self, message: Call | WorkerStart, timeout: float | None = None) -> list[Any]:
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
        return _PendingStep(self, self._send(self._encoder.encode(Step(plan, self._sampled.take()))))

    def receive_step(self, number: int) -> StepResult:
        """The result of message ``number``, a step."""
        answers = self._receive(number)
        for rank, (kind, content) in enumerate(answers):
            if kind == FAILED and len(answers) == 1:
                raise _error(content)
            if kind == FAILED:
                raise self._lose(f"worker {rank} failed: {_error(content)}")
        result = self._results.decode(answers[self._layout.output_rank][1])
        self._sampled.add(result)
        return result

    def _send(self, data: bytes) -> int:
        """Sends an encoded message to all workers: its number."""
        broadcast = self._alive()
        while self._sent - min(self._received) >= SLOTS:
            self._pump([rank for rank, count in enumerate(self._received) if self._sent - count >= SLOTS], None)
        try:
            broadcast.send(data)
        except ConnectionError:
            raise self._lose(self._exit_reason()) from None
        self._sent += 1
        return self._sent

    def _receive(self, number: int, timeout: float | None = None) -> list[tuple[int, bytes]]:
        """The answers of all workers to message ``number``, by rank.

        Raises:
            EngineDeadError: a worker is lost.
            OctavoError: one has failed and the others do not answer: they may wait for it in a collective.
            TimeoutError: not all have answered within ``timeout`` seconds.
        """
        self._alive()
        deadline = None if timeout is None else time.monotonic() + timeout
        failure: tuple[int, bytes] | None = None
        while missing := [rank for rank, count in enumerate(self._received) if count < number]:
            failure = failure or self._find_failure(number)
            if failure is not None:
                deadline = min(deadline or math.inf, time.monotonic() + _GRACE)
            try:
                self._pump(missing, None if deadline is None else deadline - time.monotonic())
            except TimeoutError:
                if failure is None:
                    self._lose(f"workers {missing} have not answered within {timeout} s")
                    raise TimeoutError(f"workers {missing} have not answered within {timeout} s") from None
                error = _error(failure[1])
                self._lose(f"worker {failure[0]} failed: {error}")
                raise error from None
        return [answers.pop(number) for answers in self._answers]

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
            try:
                kind, content = broadcast.receive(rank)
            except ConnectionError:
                raise self._lose(self._exit_reason(rank)) from None
            if kind == LOG:
                message = msgspec.msgpack.decode(content, type=Log)
                logger.log(message.level, "%s", message.text)
            else:
                self._received[rank] += 1
                self._answers[rank][self._received[rank]] = kind, content

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """See ``Executor``: also detects a process that has ended since the last step."""
        self._alive()
        if any(process.poll() is not None for process in self._processes):
            raise self._lose(self._exit_reason())

    def shutdown(self) -> None:
        """Closes the connections, at which the processes end, and kills those that do not."""
        if self._lost is None:
            self._lost = EngineDeadError("the executor was shut down; a new engine must be made")
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None
        self._end_processes(_END_TIMEOUT)

    def _alive(self) -> Broadcast:
        if self._lost is not None:
            raise self._lost
        assert self._broadcast is not None, "start comes first"
        return self._broadcast

    def _lose(self, reason: str) -> EngineDeadError:
        """Ends all workers, as one cannot go on: the error to raise."""
        self._lost = EngineDeadError(f"{reason}; all workers of the engine were ended")
        self._end_processes(0.0)
        self.shutdown()
        return self._lost

    def _exit_reason(self, rank: int | None = None) -> str:
        """How the process of a worker ended; without ``rank`` the first that has."""
        deadline = time.monotonic() + 1.0  # its socket closes some milliseconds before it has ended
        while time.monotonic() < deadline:
            for number, process in enumerate(self._processes):
                code = process.poll()
                if code is not None and rank in (None, number):
                    how = f"exited with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"
                    return f"worker {number} (process {process.pid}) {how}"
            time.sleep(0.01)
        return "a worker has closed its connection"

    def _end_processes(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                continue
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a call of a driver cannot be killed
                process.wait(_END_TIMEOUT)


class _PendingStep:
    def __init__(self, executor: MultiprocExecutor, number: int) -> None:
        self._executor = executor
        self._number = number

    def wait(self) -> StepResult:
        return self._executor.receive_step(self._number)


def _spawn(rank: int, descriptors: list[int], gpu: str | None) -> subprocess.Popen[bytes]:
    """Starts the process of a worker; the first two descriptors are those of its socket and of the messages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    command = [sys.executable, "-P", "-m", "octavo.executor.worker_process"]
    return subprocess.Popen(
        [*command, str(descriptors[0]), str(descriptors[1]), str(rank)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # Ctrl-C is for the executor's process alone
    )


def _closing(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _descriptors(connections: LocalConnections) -> list[int]:
    links = [end for link in (connections.incoming, connections.outgoing) if link for end in link]
    return links if connections.group is None else [connections.group, *links]


def _error(content: bytes) -> Exception:
    """The exception of a ``Failure``."""
    failure = msgspec.msgpack.decode(content, type=Failure)
    return reported_error(failure.kind, failure.message)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
