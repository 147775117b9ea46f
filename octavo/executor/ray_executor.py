"""The executor of actors on a Ray cluster: a worker on as many machines as it takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, reported_error
from octavo.core.model_config import ModelConfig
from octavo.core.parallel import ParallelLayout
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.executor import Executor, PendingStep
from octavo.executor.pipeline import SampledTokens
from octavo.executor.worker import Worker, WorkerSpec, function_name

#: Seconds that the cluster may take to find room for the workers.
_PLACEMENT_TIMEOUT = 60.0


class RayWorker:
    """The actor. Errors are answers, so that their type and message arrive as they are."""

    def __init__(self, spec: bytes) -> None:
        """``spec``: an encoded ``WorkerSpec``."""
        self._worker = Worker(msgspec.msgpack.decode(spec, type=WorkerSpec))
        self._plans = msgspec.msgpack.Decoder(tuple[StepPlan, dict[int, list[int]]])

    def node(self) -> str:
        """The id of the machine that it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def set_local_rank(self, rank: int, size: int) -> None:
        """Its number among the workers of its machine, and how many these are."""
        self._worker.spec.local_rank, self._worker.spec.local_size = rank, size

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, tuple[str, str] | None]:
        """``Worker.call``: its value, or the error's name and message."""
        try:
            return self._worker.call(method, args, kwargs), None
        except Exception as e:
            return None, (type(e).__name__, str(e))

    def step(self, message: bytes) -> tuple[bytes, tuple[str, str] | None]:
        """A step: the encoded result if this worker's counts, or the error's name and message."""
        try:
            plan, sampled = self._plans.decode(message)
            layout, runner = self._worker.layout, self._worker.runner
            result = runner.submit(plan, None if layout.is_last_stage else sampled).wait()
        except Exception as e:
            return b"", (type(e).__name__, str(e))
        return msgspec.msgpack.encode(result) if layout.rank == layout.output_rank else b"", None


class RayExecutor(Executor):
    """An actor for each rank, in a placement group with a device for each.

    A step is a direct call of every actor. Workers are connected by torch.distributed (NCCL, or Gloo on CPUs).
    """

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Prepares the workers.

        Raises:
            ConfigError: Ray is not installed.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "distributed_executor_backend='ray' needs Ray: pip install 'octavo[ray]'; or use mp on one machine"
            ) from None
        self._ray: Any = ray
        self._options = options
        self._layout = ParallelLayout.of(options, 0)
        self.num_stages = options.pipeline_parallel_size
        self._spec = WorkerSpec(options.model_dump(), config, str(folder), dtype, rank=0)
        self._workers: list[Any] = []
        self._group: Any = None
        self._results = msgspec.msgpack.Decoder(StepResult)
        self._sampled = SampledTokens(self.num_stages)
        self._lost: EngineDeadError | None = None

    def start(self) -> None:
        """Places the actors and loads the model."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=True, configure_logging=False)
        resource = self._resource()
        self._group = self._place(resource)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(RayWorker)
        environment = {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
        for rank in range(self._layout.world_size):
            spec = msgspec.structs.replace(self._spec, rank=rank)
            placed = actor.options(
                num_cpus=int(resource == "CPU"),
                num_gpus=int(resource == "GPU"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
                runtime_env={"env_vars": environment},
                max_restarts=0,
            )
            self._workers.append(placed.remote(msgspec.msgpack.encode(spec)))
        self._number_by_machine()
        store = self.collective_rpc("open_store")[0] if self._layout.world_size > 1 else None
        self.collective_rpc("init_device", [store])
        self.collective_rpc("load_model")

    def _resource(self) -> str:
        """What each worker takes one of: GPU or CPU.

        Raises:
            ConfigError: the cluster has too few.
        """
        there = self._ray.cluster_resources()
        wanted = self._options.device
        resource = "GPU" if wanted == "cuda" or (wanted == "auto" and there.get("GPU", 0) >= 1) else "CPU"
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

    def _number_by_machine(self) -> None:
        nodes = self._get([worker.node.remote() for worker in self._workers])
        places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
        counts = [nodes.count(node) for node in nodes]
        self._get([w.set_local_rank.remote(p, n) for w, p, n in zip(self._workers, places, counts, strict=True)])

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """See ``Executor``."""
        self.check_health()
        name = method if isinstance(method, str) else function_name(method)
        answers = self._get([w.call.remote(name, list(args), dict(kwargs or {})) for w in self._workers], timeout)
        for _, error in answers:
            if error is not None:
                raise reported_error(*error)
        return [value for value, _ in answers]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Calls every actor with the plan."""
        self.check_health()
        # Stored once and read by all actors, instead of being sent to each.
        message = self._ray.put(msgspec.msgpack.encode((plan, self._sampled.take())))
        return _PendingStep(self, [worker.step.remote(message) for worker in self._workers])

    def receive_step(self, references: list[Any]) -> StepResult:
        """The result of a step; ``references`` are those of its calls, by rank."""
        self.check_health()
        answers = self._get(references)
        for rank, (_, error) in enumerate(answers):
            if error is not None and len(answers) == 1:
                raise reported_error(*error)
            if error is not None:
                raise self._lose(f"a step failed on worker {rank}: {error[0]}: {error[1]}")
        result = self._results.decode(answers[self._layout.output_rank][0])
        self._sampled.add(result)
        return result

    def _get(self, references: list[Any], timeout: float | None = None) -> list[Any]:
        """The values of calls, by rank; if one has failed, the others are not waited for.

        Raises:
            EngineDeadError: an actor is lost.
            TimeoutError: not all have answered in time.
        """
        ray, waiting, deadline = self._ray, list(references), timeout
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1, timeout=deadline)
                if not done:
                    self._lose(f"workers have not answered within {timeout} s")
                    raise TimeoutError(f"workers have not answered within {timeout} s")
                failed = [v for v in ray.get(done) if isinstance(v, tuple) and v[1] is not None]
                if failed and waiting:  # they may wait for it, in the middle of a collective
                    _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=5.0)
                    if waiting:
                        self._lose(f"a worker failed: {reported_error(*failed[0][1])}")
                        raise reported_error(*failed[0][1])
            return list(ray.get(list(references)))
        except ray.exceptions.RayError as e:
            raise self._lose(f"a worker is lost: {type(e).__name__}: {e}") from None

    def check_health(self) -> None:
        """See ``Executor``; a lost actor is noticed at its next call."""
        if self._lost is not None:
            raise self._lost

    def shutdown(self) -> None:
        """Kills the actors and gives their places back; the cluster goes on."""
        if self._lost is None:
            self._lost = EngineDeadError("the executor was shut down; a new engine must be made")
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    def _lose(self, reason: str) -> EngineDeadError:
        self._lost = EngineDeadError(f"{reason}; all workers of the engine were ended")
        self.shutdown()
        return self._lost


class _PendingStep:
    def __init__(self, executor: RayExecutor, references: list[Any]) -> None:
        self._executor = executor
        self._references = references

    def wait(self) -> StepResult:
        return self._executor.receive_step(self._references)
