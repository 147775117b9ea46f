"""The executor of one worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, memory_errors
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan
from octavo.executor.executor import Executor, PendingStep
from octavo.executor.worker import Worker, WorkerSpec


class UniprocExecutor(Executor):
    """One worker, called directly."""

    in_process = True

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str, replica: int) -> None:
        """Prepares the worker; ``start`` loads the model."""
        replicas = options.data_parallel_size
        spec = WorkerSpec.of(options, config, folder, dtype, 0, local_rank=replica, local_size=replicas)
        self._worker: Worker | None = Worker(spec)

    def start_workers(self) -> None:
        """The worker is there already."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """See ``Executor``; ``timeout`` is ignored, as the worker is called directly."""
        worker = self._alive()
        with memory_errors():
            return [worker.call(method, args, kwargs or {})]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on the worker."""
        return self._alive().runner.submit(plan)

    def check_health(self) -> None:
        """The worker lives as long as this process, or until ``shutdown``."""
        self._alive()

    def shutdown(self) -> None:
        """Drops the worker, and with it weights and KV cache."""
        self._worker = None

    def _alive(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; a new engine must be made")
        return self._worker
