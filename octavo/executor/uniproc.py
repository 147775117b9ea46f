"""The executor of a worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, memory_errors
from octavo.core.plan import StepPlan
from octavo.executor.executor import Executor, PendingStep
from octavo.executor.worker import Worker, WorkerSpec


class UniprocExecutor(Executor):
    """A worker that is called directly; it lives as long as this process, or until ``shutdown``."""

    in_process = True

    def __init__(self, options: EngineConfig, spec: WorkerSpec, replica: int) -> None:
        """Prepares the worker; ``start`` loads the model."""
        self._worker: Worker | None = Worker(spec)
        #: Why there is no worker any more.
        self._lost = EngineDeadError("the executor was shut down; a new engine must be made")

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
            return self._of_all_workers(worker.call(method, args, kwargs or {}))

    def _of_all_workers(self, answer: Any) -> list[Any]:
        """The answers by rank, of this worker's."""
        return [answer]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on the worker."""
        return self._alive().runner.submit(plan)

    def check_health(self) -> None:
        """See ``Executor``."""
        self._alive()

    def shutdown(self) -> None:
        """Drops the worker, and with it weights and KV cache."""
        self._worker = None

    def _alive(self) -> Worker:
        if self._worker is None:
            raise self._lost
        return self._worker
