"""The executor of processes that a launcher such as torchrun has started, each with an engine of its own."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.config.options import SpeculativeConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.core.plan import StepPlan, StepResult
from octavo.executor.executor import PendingStep, SubmittedStep, WorkerReports, reports_of
from octavo.executor.worker import DIGEST_BYTES, RankCheck, UniprocExecutor, WorkerSpec, digest, find_difference
from octavo.kernels import resolve_device

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_clock(options: EngineConfig, *, policy_uses_clock: bool) -> EngineConfig:
    """Options with which equal requests lead to equal plans in every process: nothing is decided by measured time.

    Rank 0's clock for all would take a message for every arrival and before every plan, and who has deadlines to keep
    serves requests, which is done with one scheduler.

    Raises:
        ConfigError: an option needs the time.
    """
    if policy_uses_clock:
        raise ConfigError(
            f"scheduling_policy {options.scheduling_policy!r} depends on time, which differs between processes: with "
            "external_launcher take a policy that does not (fcfs, static, sjf, ldf, lcfs, srpt, fair, mlfq), or let mp "
            "or ray run the workers, for which one process plans"
        )
    if options.scheduler_delay_factor:
        raise ConfigError("scheduler_delay_factor depends on time, which differs between processes: external_launcher "
                          "needs it to be 0")  # fmt: skip
    mode = "by_sequences" if options.preemption_mode == "auto" else options.preemption_mode
    drafts = (options.speculative_config or SpeculativeConfig(method="prediction")).model_copy(
        update={"adaptive": False}
    )
    changes = {"aging_limit": None, "preemption_mode": mode, "speculative_config": drafts}
    return options.model_copy(update=changes)


class ExternalLauncherExecutor(UniprocExecutor):
    """This process's worker. Every process gets the same requests in the same order and makes the same plans.

    So no plan is sent: the workers meet in the network's collectives only. With ``check_plans`` the processes compare
    digests of every plan before it is computed, and in the same message of what was sampled before.
    """

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        """Reads the process's place from the launcher's variables.

        Raises:
            ConfigError: they are missing, or contradict the options.
        """
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
        #: What not all processes have prepared yet. Each plans for itself, on what all have reported.
        self._preparing: set[str] = set()
        self._reports = WorkerReports(world)

    def start(self) -> None:
        """Takes this process's GPU if there is one, connects it with the others, and loads its share of the model.

        Not by ``collective_rpc``: the processes are not connected yet.
        """
        worker = self._alive()
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
        """Every process must have made the same call."""
        if self._alive().layout.world_size == 1:
            return [answer]
        return [msgspec.msgpack.decode(data) for data in _gather(msgspec.msgpack.encode(answer))]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts the step on this process's worker.

        Raises:
            EngineDeadError: the processes have different plans.
        """
        worker = self._alive()
        self._compare(plan)
        if worker.layout.world_size > 1:
            self._preparing.update(preparation.key for preparation in plan.prepare)
        try:
            return SubmittedStep(partial(self._receive, worker.runner.submit(plan)))
        except Exception as e:
            if worker.layout.world_size == 1:
                raise
            # The other processes may wait for this one in a collective, which fails when it has left the group.
            raise self._lose(f"a step failed in process {worker.rank}: {type(e).__name__}: {e}") from e

    def _receive(self, step: PendingStep) -> StepResult:
        """Waits for a step of this process; what it reports of preparations becomes that of all processes.

        Measured times are dropped: the scheduler learns costs from them, which would differ between ranks.
        """
        result = step.wait()
        result.seconds = result.swap_seconds = 0.0
        result.swaps = []
        self._check.add(result)
        self._combine_reports(result)
        return result

    def _combine_reports(self, result: StepResult) -> None:
        """Exchanges what the processes have prepared, while there is anything that one may report."""
        if not self._preparing:
            return
        data = _gather(msgspec.msgpack.encode(reports_of(result) or StepResult(result.step)))
        rank = self._alive().rank
        reports = [(i, msgspec.msgpack.decode(part, type=StepResult)) for i, part in enumerate(data) if i != rank]
        self._reports.combine(result, reports, rank)
        self._preparing.difference_update(result.prepared, result.prepare_errors)

    def _compare(self, plan: StepPlan) -> None:
        """Compares with the other processes what was sampled, and the plan: before it leads them to other collectives.

        Both in one message. What the last step of all has sampled is compared when another one follows.
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
        """Drops the worker and leaves the process group, if it has joined one: torch was imported for it then."""
        if self._worker is None:
            return
        self._worker = None
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _lose(self, reason: str) -> EngineDeadError:
        """This process cannot go on: the error to raise."""
        self.shutdown()
        self._lost = EngineDeadError(reason)
        return self._lost


def _gather(data: bytes) -> list[bytes]:
    """The bytes of every rank."""
    lengths = [int.from_bytes(length, "little") for length in _gather_equal(len(data).to_bytes(8, "little"))]
    parts = _gather_equal(data.ljust(max(lengths), b"\0"))
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _gather_equal(data: bytes) -> list[bytes]:
    """The bytes of every rank, of which all have as many."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return [part.numpy().tobytes() for part in parts]
