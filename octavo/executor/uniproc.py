"""Executors of a worker in this process: ``UniprocExecutor``, and ``ExternalLauncherExecutor`` for torchrun."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError, memory_errors
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.executor import Executor, PendingStep, SubmittedStep, WorkerReports, reports_of
from octavo.executor.worker import DIGEST_BYTES, RankCheck, Worker, WorkerSpec, digest, find_difference
from octavo.kernels import num_gpus, resolve_device

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class UniprocExecutor(Executor):
    """A worker in this process, which is called directly."""

    in_process = True

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        self._worker: Worker | None = Worker(spec)
        self._lost = EngineDeadError("the executor was shut down; a new engine must be made")

    def start_workers(self) -> None:
        pass

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        worker = self._alive()
        with memory_errors():
            return self._of_all_workers(worker.call(method, args, kwargs or {}))

    def _of_all_workers(self, answer: Any) -> list[Any]:
        return [answer]

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._alive().runner.submit(plan)

    def check_health(self) -> None:
        self._alive()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _alive(self) -> Worker:
        if self._worker is None:
            raise self._lost
        return self._worker


class ExternalLauncherExecutor(UniprocExecutor):
    """A worker of a launcher: every process gets the same requests in the same order and makes the same plans (SPMD).

    So no plan is sent: the workers meet in the network's collectives only. With ``check_plans`` the processes compare a
    digest of every plan, and of the tokens sampled before, ahead of the step.
    """

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        missing = [name for name in _NAMES if name not in os.environ]
        if missing:
            raise ConfigError(
                f"distributed_executor_backend='external_launcher' needs a launcher such as torchrun, which sets "
                f"{', '.join(missing)}"
            )
        if options.pipeline_parallel_size > 1:
            raise ConfigError("external_launcher has no pipeline stages: results would have to be sent; use mp or ray")
        if options.data_parallel_size > 1:
            raise ConfigError("external_launcher has no replicas: start several engines, or use mp or ray")
        rank, world, local_rank, local_size = (int(os.environ[name]) for name in _NAMES[:4])
        if world != options.world_size:
            raise ConfigError(
                f"the launcher has started {world} processes, but tensor_parallel_size is "
                f"{options.tensor_parallel_size}: both must be equal"
            )
        place = msgspec.structs.replace(spec, rank=rank, local_rank=local_rank, local_size=local_size)
        super().__init__(options, place, replica)
        self._checks_plans = options.check_plans and world > 1
        self._check = RankCheck(options.rank_check_interval)
        #: Resources that not all processes have reported as prepared.
        self._preparing: set[str] = set()
        self._reports = WorkerReports(world)

    def start(self) -> None:
        worker = self._alive()  # not collective_rpc: the processes are not connected yet
        if resolve_device(worker.options.device) == "cuda":
            import torch

            count = torch.cuda.device_count()
            if worker.spec.local_rank >= count:
                raise ConfigError(
                    f"this machine has {count} GPUs, but {worker.spec.local_size} processes were started on it"
                )
            torch.cuda.set_device(worker.spec.local_rank)
        worker.init_device()
        worker.load_model()

    def _of_all_workers(self, answer: Any) -> list[Any]:
        if self._alive().layout.world_size == 1:
            return [answer]
        return [msgspec.msgpack.decode(data) for data in _gather(msgspec.msgpack.encode(answer))]

    def submit(self, plan: StepPlan) -> PendingStep:
        worker = self._alive()
        self._compare(plan)
        if worker.layout.world_size > 1:
            self._preparing.difference_update(plan.drop)
            self._preparing.update(preparation.key for preparation in plan.prepare)
            self._reports.submitted(plan)
        try:
            return SubmittedStep(partial(self._receive, worker.runner.submit(plan)))
        except Exception as e:
            if worker.layout.world_size == 1:
                raise
            # Other processes may wait for this one in a collective, which fails when it leaves the group.
            raise self._lose(f"a step failed in process {worker.rank}: {type(e).__name__}: {e}") from e

    def _receive(self, step: PendingStep) -> StepResult:
        result = step.wait()
        # The scheduler learns costs from measured times, which differ between ranks.
        result.seconds = result.swap_seconds = result.compute_seconds = 0.0
        result.swaps = []
        self._check.add(result)
        if self._preparing:
            data = _gather(msgspec.msgpack.encode(reports_of(result) or StepResult(result.step)))
            rank = self._alive().rank
            reports = [(i, msgspec.msgpack.decode(part, type=StepResult)) for i, part in enumerate(data) if i != rank]
            self._reports.combine(result, reports, rank)
            self._preparing.difference_update(result.prepared, result.prepare_errors)
        return result

    def _compare(self, plan: StepPlan) -> None:
        """Compares the plan, and the tokens sampled before it, with the other processes', in one message.

        Different plans would lead them to different collectives. The tokens of the very last step are not compared.
        """
        first, last, sampled = self._check.take()
        planned = digest(plan) if self._checks_plans else b""
        if not planned and not sampled:
            return
        digests = _gather_equal(planned.ljust(DIGEST_BYTES) + sampled.ljust(DIGEST_BYTES))
        if difference := find_difference({rank: each[DIGEST_BYTES:] for rank, each in enumerate(digests)}, first, last):
            raise self._lose(difference)
        different = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if different:
            raise self._lose(
                f"the plans of step {plan.step} differ: those of ranks {different} are not that of rank 0; every "
                "process must get the same requests in the same order"
            )

    def shutdown(self) -> None:
        if self._worker is None:
            return
        super().shutdown()
        dist = sys.modules.get("torch.distributed")  # imported if the worker has joined a process group
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _lose(self, reason: str) -> EngineDeadError:
        self.shutdown()
        self._lost = EngineDeadError(reason)
        return self._lost


def without_clock(options: EngineConfig, *, policy_uses_clock: bool) -> EngineConfig:
    """Options with which no decision depends on time, so that equal requests lead to equal plans in every process.

    To share rank 0's clock would take a message for every arrival and every plan; deadlines are the business
    of the server, with one scheduler.
    """
    if policy_uses_clock:
        raise ConfigError(
            f"scheduling_policy {options.scheduling_policy!r} depends on time, which differs between processes: with "
            "external_launcher take a policy that does not (fcfs, static, sjf, ldf, lcfs, srpt, fair, mlfq), or let mp "
            "or ray run the workers, for which one process plans"
        )
    if options.scheduler_delay_factor:
        raise ConfigError(
            "scheduler_delay_factor depends on time, which differs between processes: external_launcher needs 0"
        )
    for name in ("kv_disk", "kv_store"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"{name} depends on time, which differs between processes: external_launcher runs without; let mp or "
                "ray run the workers"
            )
    mode = "by_sequences" if options.preemption_mode == "auto" else options.preemption_mode
    drafts = options.speculative_config
    if drafts is not None:
        drafts = drafts.model_copy(update={"adaptive": False})
    changes = {"aging_limit": None, "preemption_mode": mode, "speculative_config": drafts}
    return options.model_copy(update=changes)


def _gather(data: bytes) -> list[bytes]:
    """Gathers the bytes of every rank."""
    lengths = [int.from_bytes(length, "little") for length in _gather_equal(len(data).to_bytes(8, "little"))]
    parts = _gather_equal(data.ljust(max(lengths), b"\0"))
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _gather_equal(data: bytes) -> list[bytes]:
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return [part.numpy().tobytes() for part in parts]


def make_executor(options: EngineConfig, config: ModelConfig, folder: Path, dtype: str, replica: int = 0) -> Executor:
    """Makes the executor that ``options`` ask for, and starts its workers.

    ``config``: of the model, with the requested context length; ``dtype``: of weights and activations; ``replica``:
    number of this engine core among the ``data_parallel_size`` ones, which share the machine.
    """
    executor = choose_executor(options)(options, WorkerSpec.of(options, config, folder, dtype, replica), replica)
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def choose_executor(options: EngineConfig) -> Callable[[EngineConfig, WorkerSpec, int], Executor]:
    """The class of the executor that ``options`` ask for; by default, the one that suits the machine."""
    backend = options.distributed_executor_backend
    if backend is None:
        # A replica may see its own GPU alone, which must be set before its process looks for one.
        alone = options.world_size == 1 and (options.data_parallel_size == 1 or resolve_device(options.device) == "cpu")
        # Ray may know of more GPUs than this machine has.
        fits = resolve_device(options.device) == "cpu" or importlib.util.find_spec("ray") is None
        fits = fits or num_gpus() >= options.world_size * options.data_parallel_size
        backend = "uni" if alone else "mp" if fits else "ray"
    if backend == "uni":
        return UniprocExecutor
    if backend == "mp":
        from octavo.executor.remote import MultiprocExecutor

        return MultiprocExecutor
    if backend == "external_launcher":
        return ExternalLauncherExecutor
    from octavo.executor.remote import RayExecutor

    return RayExecutor
