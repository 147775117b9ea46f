"""The executor of workers in processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import time

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.processor_waits import ProcessorWaits
from octavo.core.shared_memory import shared_memory
from octavo.core.start_process import how_it_ended, is_stopped, num_out_of_memory, start_process, was_killed
from octavo.executor.broadcast import SLOT_BYTES, SLOTS, Broadcast
from octavo.executor.local_connections import LocalConnections
from octavo.executor.remote import END_TIMEOUT, RemoteExecutor
from octavo.executor.worker import WorkerSpec
from octavo.executor.worker_loop import WorkerStart

logger = logging.getLogger("octavo")


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
            from octavo.kernels.cpu.collectives import SharedMemoryCommunicator

            for stage in range(layout.pipeline_parallel_size):
                group = _closing(inherited, shared_memory(SharedMemoryCommunicator.bytes_for(size)))
                for rank in range(stage * size, (stage + 1) * size):
                    made[rank].group = group
        from octavo.executor.rank_connections import link_slots

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
