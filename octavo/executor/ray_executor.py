"""The executor of actors on a Ray cluster: a worker on as many machines as it takes.

Ray places the workers and ends them. Messages go through a socket to each: a call of an actor takes some milliseconds,
and a step of a small model is no longer.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.plugins import how_to_install
from octavo.executor.channels import SECRET_BYTES, Broadcast, accept, connect
from octavo.executor.remote import RemoteExecutor
from octavo.executor.worker import WorkerSpec, own_address
from octavo.executor.worker_loop import WorkerStart, serve

#: Seconds that the cluster may take to find room for the workers.
_PLACEMENT_TIMEOUT = 60.0
#: Connections that may wait to be accepted: workers, and strangers before them.
_BACKLOG = 256

logger = logging.getLogger("octavo")


def import_ray() -> Any:
    """The package ``ray``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"distributed_executor_backend='ray' needs Ray ({how_to_install('ray')}); or use mp on one machine"
        ) from None
    return ray


class RayWorker:
    """The actor."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def node(self) -> str:
        """The id of the machine that it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def serve(self, address: tuple[str, int], secret: bytes) -> None:
        """Connects to the executor and does what it says, until it ends."""
        serve(connect(address, secret, self._rank), None, self._rank)


class RayExecutor(RemoteExecutor):
    """An actor for each rank, in a placement group with a device for each.

    The workers are connected by torch.distributed: NCCL between GPUs, Gloo on CPUs.
    """

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        """Prepares the workers.

        Raises:
            ConfigError: Ray is not installed.
        """
        super().__init__(options, spec, replica)
        self._ray: Any = import_ray()
        self.needs_store = options.world_size > 1
        self._workers: list[Any] = []
        self._serving: list[Any] = []
        self._group: Any = None

    def start_workers(self) -> None:
        """Places the actors and connects to them."""
        if not self._ray.is_initialized():
            self._ray.init(address=os.environ.get("RAY_ADDRESS"), configure_logging=False)
        resource = self._resource()
        self._group = self._place(resource)
        self._workers = [self._make_actor(rank, resource) for rank in range(self._layout.world_size)]
        try:
            nodes = self._ray.get([worker.node.remote() for worker in self._workers])
        except self._ray.exceptions.RayError as e:
            raise EngineDeadError(f"a worker could not be started: {type(e).__name__}: {e}") from None
        self._broadcast = Broadcast(self._connect(), None)
        places = [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]
        self._call(WorkerStart(self._spec, [None] * len(nodes), places, logger.getEffectiveLevel()))

    def _resource(self) -> str:
        """What each worker takes one of: GPU or CPU.

        Raises:
            ConfigError: the cluster has too few.
        """
        there = self._ray.cluster_resources()
        device = self._options.device
        resource = "GPU" if device == "cuda" or (device == "auto" and there.get("GPU", 0) >= 1) else "CPU"
        world = self._layout.world_size
        if there.get(resource, 0) < world:
            raise ConfigError(
                f"tensor_parallel_size ({self._options.tensor_parallel_size}) x pipeline_parallel_size "
                f"({self._options.pipeline_parallel_size}) needs {world} {resource}s, but the Ray cluster has "
                f"{there.get(resource, 0):g}"
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

    def _connect(self) -> list[socket.socket]:
        """Connections from the workers, by rank."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with socket.create_server((own_address(), 0), backlog=_BACKLOG) as server:
            address = server.getsockname()[:2]
            self._serving = [worker.serve.remote(address, secret) for worker in self._workers]
            return accept(server, secret, len(self._workers))

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
