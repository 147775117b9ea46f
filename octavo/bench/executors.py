"""What an executor costs a step: a plan to the workers, and a result back, without a model."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from octavo.core.config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult, TableChange
from octavo.executor.executor import Executor, choose_executor
from octavo.executor.worker import Worker


class EchoRunner:
    """Stands for a ``ModelRunner`` that takes no time: each sequence samples token 1."""

    device = torch.device("cpu")

    def submit(self, plan: StepPlan, sampled: dict[int, list[int]] | None = None) -> EchoRunner:
        """Keeps the plan."""
        self._plan = plan
        return self

    def wait(self) -> StepResult:
        """A token for each sequence."""
        return StepResult(self._plan.step, list(self._plan.seq_ids), [1] * len(self._plan.seq_ids))


def install_echo(worker: Worker) -> None:
    """Gives a worker an ``EchoRunner``."""
    worker.replace_runner(EchoRunner())


def decode_plan(step: int, seqs: int, block_size: int = 16) -> StepPlan:
    """The plan of a decode step of ``seqs`` sequences, of which one in ``block_size`` gets a new block."""
    ids = list(range(seqs))
    changes = [TableChange(i, step // block_size, [i]) for i in ids if i % block_size == step % block_size]
    return StepPlan(step, table_changes=changes, seq_ids=ids, num_tokens=[1] * seqs)


def measure(executor: Executor, seqs: int, steps: int) -> float:
    """Median seconds of a step of ``seqs`` sequences, of ``steps`` steps after the first few."""
    seconds = []
    for step in range(1, steps + 11):
        plan = decode_plan(step, seqs)
        start = time.perf_counter()
        executor.execute(plan)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[10:])


def run(options: EngineConfig, sizes: list[int], steps: int) -> dict[str, Any]:
    """Microseconds of a step outside the model by number of sequences, with the workers of ``options``.

    Raises:
        OctavoError: the workers cannot be started.
    """
    config = ModelConfig("LlamaForCausalLM", 256, 64, 128, max(2, options.pipeline_parallel_size), 8, 8, 8, 256)
    executor = choose_executor(options)(options, config, Path(), "float32", 0)
    try:
        executor.start_workers()
        executor.collective_rpc(install_echo)
        return {
            "executor": type(executor).__name__,
            "workers": options.world_size,
            "step_us": {n: round(measure(executor, n, steps) * 1e6, 1) for n in sizes},
        }
    finally:
        executor.shutdown()
