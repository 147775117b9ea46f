"""The executor interface, and the simplest one: one worker in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from octavo.core.config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A step on its way through the workers."""

    def wait(self) -> StepResult:
        """What came of it, once it is done. Steps are waited for in the order in which they were submitted.

        Raises:
            Exception: the step failed.
        """


class Executor(ABC):
    """Owns the workers' life and carries plans to them."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every worker: their answers, by rank."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on all workers; while one is in flight a second may follow, which runs after it.

        The second may schedule sequences that sample in the first, unless their sampling needs tokens by their id.

        Raises:
            Exception: the step failed.
        """


class UniprocExecutor(Executor):
    """One worker, called directly."""

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Loads the model; errors are those of ``ModelRunner``."""
        from octavo.runner.model_runner import ModelRunner

        self._worker = ModelRunner(options, config, folder, dtype)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on the worker."""
        return [getattr(self._worker, method)(*args)]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on the worker."""
        return self._worker.submit(plan)
