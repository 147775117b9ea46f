"""Executors of workers in other processes: ``MultiprocExecutor`` on this machine, ``RayExecutor`` on a cluster.

Both send plans and calls as messages, which each worker answers in order, and end all workers when one is lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.config.options import FIRST_STEP_TIMEOUT, ParallelLayout
from octavo.core.errors import ConfigError, EngineDeadError, EngineKilledError, OctavoError
from octavo.core.plan import StepPlan, StepResult
from octavo.core.plugins import how_to_install
from octavo.executor.channels import SECRET_BYTES, SLOT_BYTES, SLOTS, Broadcast, accept, connect, link_slots
from octavo.executor.executor import Executor, PendingStep, SubmittedStep, WorkerReports, reports_of
from octavo.executor.worker import WorkerSpec, find_difference, function_name, own_address
from octavo.executor.worker_loop import FAILED, LOG, StepMessage, WorkerCall, WorkerStart, serve
from octavo.process.children import Failure, LogMessage, ProcessorWaits
from octavo.process.interrupts import HeldInterrupts
from octavo.process.start_process import (
    LocalConnections,
    end_process,
    how_it_ended,
    is_stopped,
    num_out_of_memory,
    shared_memory,
    start_process,
    was_killed,
)

#: Seconds that the other workers have to answer a message on which one has failed.
_GRACE = 5.0
#: Share of the step timeout after which to check whether workers have had a processor.
_LOOK = 0.1
#: Seconds that workers may take to end before they are killed.
END_TIMEOUT = 3.0

logger = logging.getLogger("octavo")


class RemoteExecutor(Executor):
    """Workers at the other ends of sockets. Subclasses start and end them."""

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        self._replica = replica
        self._options = options
        self._layout = ParallelLayout.of(options, 0)
        self.num_stages = options.pipeline_parallel_size
        self._spec = spec
        self._broadcast: Broadcast | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._results = msgspec.msgpack.Decoder(StepResult)
        #: Numbers of messages sent, and of answers received by rank.
        self._sent = 0
        self._received = [0] * self._layout.world_size
        #: Messages whose answers a caller waits for; and, by rank, their answers so far.
        self._awaited: set[int] = set()
        self._answers: list[dict[int, tuple[int, bytes]]] = [{} for _ in self._received]
        #: By sequence id, for the other pipeline stages: tokens that the last stage has sampled since the last plan.
        self._sampled: dict[int, list[int]] = {}
        self._reports = WorkerReports(self._layout.world_size)
        self._lost: EngineDeadError | None = None
        self._patience = max(options.step_timeout, FIRST_STEP_TIMEOUT)

    @abstractmethod
    def _exit_reason(self, rank: int | None = None) -> str:
        """Describes how a worker ended; without ``rank``, the first that has."""

    def _was_killed(self) -> bool:
        """Whether somebody has killed or stopped a worker, as far as that can be detected."""
        return False

    def _held_up(self) -> float:
        """Seconds since the last call for which a worker waited for a processor."""
        return 0.0

    @abstractmethod
    def _end_workers(self, timeout: float) -> None:
        """Ends the workers that have not ended by themselves within ``timeout`` seconds."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
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
        sampled, self._sampled = self._sampled, {}
        self._reports.submitted(plan)
        number = self._send(self._encoder.encode(StepMessage(plan, sampled)))
        return SubmittedStep(partial(self.receive_step, number))

    def receive_step(self, number: int) -> StepResult:
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
                samplers = range(reporter, self._layout.world_size)
                first = max(1, result.step + 1 - self._options.rank_check_interval)
                if difference := find_difference({r: digests.get(r, b"") for r in samplers}, first, result.step):
                    raise self._lose(difference)
            if reports or reports_of(result) is not None:
                self._reports.combine(result, reports, reporter)
        if self.num_stages > 1:
            counts, start = result.num_tokens or [1] * len(result.seq_ids), 0
            for seq_id, count in zip(result.seq_ids, counts, strict=True):
                self._sampled.setdefault(seq_id, []).extend(result.token_ids[start : start + count])
                start += count
        return result

    def _send(self, data: bytes) -> int:
        broadcast = self._alive()
        while self._sent - min(self._received) >= SLOTS:
            self._pump([rank for rank, count in enumerate(self._received) if self._sent - count >= SLOTS], None)
        with self._whole_message():
            broadcast.send(data)
            self._sent += 1
            self._awaited.add(self._sent)
        return self._sent

    @contextlib.contextmanager
    def _whole_message(self, rank: int | None = None) -> Iterator[None]:
        """Sends or receives a message as a whole, or ends the workers: the next message's start would be unknown.

        ``rank``: the worker on the other side, if it is one.
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

        For a step, time in which workers had no processor does not count for ``timeout``.

        Raises:
            EngineDeadError: a worker is lost.
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
                if failure is None:
                    replies = ((rank, *answers.get(number, (None, b""))) for rank, answers in enumerate(self._answers))
                    failure = next(((rank, content) for rank, kind, content in replies if kind == FAILED), None)
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
        finally:  # answers after an interrupt are dropped
            self._awaited.discard(number)
            for answers in self._answers:
                answers.pop(number, None)

    def _pump(self, ranks: list[int], timeout: float | None) -> None:
        """Waits for at least one of these workers, and takes an answer of each that has sent one."""
        broadcast = self._alive()
        for rank in broadcast.wait(ranks, timeout):
            with self._whole_message(rank):
                kind, content = broadcast.receive(rank)
                if kind != LOG:
                    self._received[rank] += 1
                    if self._received[rank] in self._awaited:
                        self._answers[rank][self._received[rank]] = kind, content
            if kind == LOG:
                message = msgspec.msgpack.decode(content, type=LogMessage)
                logger.log(message.level, "%s", message.text)

    def check_health(self) -> None:
        self._alive()
        idle = [rank for rank, count in enumerate(self._received) if count == self._sent]
        with contextlib.suppress(TimeoutError):  # idle workers send nothing, unless they have ended
            if idle:
                self._pump(idle, 0.0)

    def shutdown(self) -> None:
        """Closes the connections, so that the workers end; kills those that do not. KV stores are flushed before."""
        if self._lost is None:
            if self._broadcast is not None and self._options.has_stores:
                with contextlib.suppress(OctavoError, TimeoutError):
                    self.collective_rpc("close", timeout=END_TIMEOUT + 1.0)
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
        kind = EngineKilledError if killed else EngineDeadError
        self._lost = kind(f"{reason}; all workers of the engine were ended")
        self._end_workers(0.0)
        self.shutdown()
        return self._lost


def _error(content: bytes) -> Exception:
    return msgspec.msgpack.decode(content, type=Failure).error()


class MultiprocExecutor(RemoteExecutor):
    """A process for each rank. Messages go through shared memory; on CPUs, so do collectives and hidden states."""

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        super().__init__(options, spec, replica)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waits = ProcessorWaits()
        self._out_of_memory = num_out_of_memory()

    def start_workers(self) -> None:
        world = self._layout.world_size
        gpus = self._visible_gpus()
        with contextlib.ExitStack() as inherited:  # closes descriptors that only the workers use from then on
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
        """Names of a GPU for each worker, for CUDA_VISIBLE_DEVICES; none if workers compute on the CPU."""
        from octavo.kernels import num_gpus, resolve_device

        if resolve_device(self._options.device) == "cpu":
            return []
        options, world, available = self._options, self._layout.world_size, num_gpus()
        if available < world * options.data_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size ({options.tensor_parallel_size}) x pipeline_parallel_size "
                f"({options.pipeline_parallel_size}) x data_parallel_size ({options.data_parallel_size}) needs "
                f"{world * options.data_parallel_size} GPUs, but this machine has {available}"
            )
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(i) for i in range(available)]
        return names[self._replica * world : (self._replica + 1) * world]

    def _connect(self, inherited: contextlib.ExitStack, *, uses_memory: bool) -> list[LocalConnections | None]:
        """Shared memory and pipes between the workers, by rank; None on GPUs, which use NCCL."""
        layout, options = self._layout, self._options
        if not uses_memory:
            return [None] * layout.world_size
        connections = [LocalConnections() for _ in range(layout.world_size)]
        size = layout.tensor_parallel_size
        if size > 1:
            from octavo.kernels.cpu.backend import SharedMemoryCommunicator

            for stage in range(layout.pipeline_parallel_size):
                group = _closing(inherited, shared_memory(SharedMemoryCommunicator.bytes_for(size)))
                for rank in range(stage * size, (stage + 1) * size):
                    connections[rank].group = group
        floats = options.token_budget * self._spec.model_config().hidden_size
        for rank in range(layout.world_size - size):
            memory = _closing(inherited, shared_memory(4 * link_slots(layout) * floats))
            read, write = (_closing(inherited, end) for end in os.pipe())
            connections[rank].outgoing, connections[rank + size].incoming = (memory, write), (memory, read)
        return list(connections)

    def _exit_reason(self, rank: int | None = None) -> str:
        deadline = time.monotonic() + 1.0  # its socket closes some milliseconds before it has ended
        while time.monotonic() < deadline:
            for number, process in enumerate(self._processes):
                code = process.poll()
                if code is not None and rank in (None, number):
                    return f"worker {number} (process {process.pid}) {how_it_ended(code)}"
            time.sleep(0.01)
        return "a worker has closed its connection"

    def _was_killed(self) -> bool:
        codes = [process.poll() for process in self._processes]
        if any(code is not None and was_killed(code, self._out_of_memory) for code in codes):
            return True
        return any(is_stopped(process.pid) for process in self._processes)

    def _held_up(self) -> float:
        return self._waits.since_last(process.pid for process in self._processes)

    def _end_workers(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            end_process(process, max(0.0, deadline - time.monotonic()))


def _closing(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


# --- Ray: workers on any machines of a cluster ------------------------------------------------------------------------

_PLACEMENT_TIMEOUT = 60.0
#: Connections that may wait to be accepted: workers, and strangers before them.
_BACKLOG = 256


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray ({how_to_install('ray')}); or use mp on one machine"
        ) from None
    return ray


class RayWorker:
    """The actor of a rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def serve(self, address: tuple[str, int], secret: bytes) -> None:
        """Connects to the executor and serves its messages until it ends."""
        serve(connect(address, secret, self._rank), None, self._rank)


class RayExecutor(RemoteExecutor):
    """An actor for each rank, in a placement group with a device for each.

    Ray places and ends the workers. Messages go through sockets, as a call of an actor takes as long as a step of a
    small model: some milliseconds. torch.distributed connects the workers: NCCL between GPUs, Gloo on CPUs.
    """

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        super().__init__(options, spec, replica)
        self._ray: Any = import_ray()
        self.needs_store = options.world_size > 1
        self._workers: list[Any] = []
        self._serving: list[Any] = []
        self._group: Any = None

    def start_workers(self) -> None:
        if not self._ray.is_initialized():
            self._ray.init(address=os.environ.get("RAY_ADDRESS"), configure_logging=False)
        resource = self._resource()
        self._group = self._place(resource)
        self._workers = [self._make_actor(rank, resource) for rank in range(self._layout.world_size)]
        try:
            nodes = self._ray.get([worker.node.remote() for worker in self._workers])
        except self._ray.exceptions.RayError as e:
            raise EngineDeadError(f"a worker could not be started: {type(e).__name__}: {e}") from None
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((own_address(), 0), backlog=_BACKLOG) as server:
            address = server.getsockname()[:2]
            self._serving = [worker.serve.remote(address, secret) for worker in self._workers]
            self._broadcast = Broadcast(accept(server, secret, len(self._workers)), None)
        places = [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]
        self._call(WorkerStart(self._spec, [None] * len(nodes), places, logger.getEffectiveLevel()))

    def _resource(self) -> str:
        """The resource that each worker takes one of: GPU or CPU."""
        available = self._ray.cluster_resources()
        device = self._options.device
        resource = "GPU" if device == "cuda" or (device == "auto" and available.get("GPU", 0) >= 1) else "CPU"
        world = self._layout.world_size
        if available.get(resource, 0) < world:
            raise ConfigError(
                f"tensor_parallel_size ({self._options.tensor_parallel_size}) x pipeline_parallel_size "
                f"({self._options.pipeline_parallel_size}) needs {world} {resource}s, but the Ray cluster has "
                f"{available.get(resource, 0):g}"
            )
        return resource

    def _place(self, resource: str) -> Any:
        from ray.util import placement_group, remove_placement_group

        group = placement_group([{resource: 1}] * self._layout.world_size, strategy="PACK")
        if not group.wait(_PLACEMENT_TIMEOUT):
            remove_placement_group(group)
            raise ConfigError(
                f"the Ray cluster has not found {self._layout.world_size} free {resource}s within "
                f"{_PLACEMENT_TIMEOUT:g} s; other jobs may hold them"
            )
        return group

    def _make_actor(self, rank: int, resource: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(RayWorker).options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}},
            max_restarts=0,
        )
        return actor.remote(rank)

    def _exit_reason(self, rank: int | None = None) -> str:
        ranks = range(len(self._serving)) if rank is None else [rank]
        for number in ranks:
            done, _ = self._ray.wait([self._serving[number]], timeout=2.0)
            if done:
                try:
                    self._ray.get(done[0])
                except self._ray.exceptions.RayError as e:
                    return f"worker {number} is lost: {type(e).__name__}: {str(e).splitlines()[0]}"
                return f"worker {number} has ended"
        return "a worker has closed its connection"

    def _end_workers(self, timeout: float) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
