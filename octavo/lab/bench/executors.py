"""What an executor costs a step: a plan to the workers, and a result back, without a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult, TableChange
from octavo.executor.executor import Executor
from octavo.executor.uniproc import choose_executor
from octavo.executor.worker import Worker, WorkerSpec

#: Steps that are measured, and those before them.
STEPS, WARM_UP = 300, 10


@dataclass(frozen=True)
class StepCost:
    """The cost of a decode step."""

    executor: str
    workers: int
    sequences: int
    #: Median microseconds from the plan to the result.
    step_us: float


class EchoRunner:
    """Stands for a ``ModelRunner`` that takes no time: each sequence samples token 1."""

    device_name = "cpu"

    def submit(self, plan: StepPlan, sampled: dict[int, list[int]] | None = None) -> EchoRunner:
        """Keeps the plan."""
        self._plan = plan
        return self

    def wait(self) -> StepResult:
        """A token for each sequence."""
        return StepResult(self._plan.step, list(self._plan.seq_ids), [1] * len(self._plan.seq_ids))


class EchoWorker(Worker):
    """A worker that computes nothing."""

    _echo = EchoRunner()

    @property
    def runner(self) -> EchoRunner:  # type: ignore[override]
        """In place of a runner of the model that it would load."""
        return self._echo


def make_echo_worker(worker: Worker) -> None:
    """Changes a worker that an executor has started, wherever it runs; it must have loaded nothing."""
    worker.__class__ = EchoWorker


def decode_plan(step: int, seqs: int, block_size: int = 16) -> StepPlan:
    """The plan of a decode step of ``seqs`` sequences, of which one in ``block_size`` gets a new block."""
    ids = list(range(seqs))
    changes = [TableChange(i, step // block_size, [i]) for i in ids if i % block_size == step % block_size]
    return StepPlan(step, table_changes=changes, seq_ids=ids, num_tokens=[1] * seqs)


def measure(options: EngineConfig, sizes: Sequence[int]) -> Iterator[StepCost]:
    """The cost of a step of so many sequences each, with the workers of ``options``.

    Raises:
        OctavoError: the workers cannot be started.
    """
    stages = max(2, options.pipeline_parallel_size)
    config = ModelConfig("LlamaForCausalLM", 256, 64, 128, stages, 8, 8, 8, 256)
    executor = choose_executor(options)(options, WorkerSpec.of(options, config, Path(), "float32"), 0)
    try:
        executor.start_workers()
        executor.collective_rpc(make_echo_worker)
        for size in sizes:
            name = type(executor).__name__.removesuffix("Executor").lower()
            yield StepCost(name, options.world_size, size, 1e6 * _median_step(executor, size))
    finally:
        executor.shutdown()


def _median_step(executor: Executor, seqs: int) -> float:
    seconds = []
    for step in range(1, STEPS + WARM_UP + 1):
        plan = decode_plan(step, seqs)
        start = time.perf_counter()
        executor.submit(plan).wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])
