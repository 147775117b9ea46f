"""The executor interface, and the simplest one: one worker in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult


class Executor(ABC):
    """Owns the workers' life and carries plans to them."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every worker: their answers, by rank."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all workers."""


class UniprocExecutor(Executor):
    """One worker, called directly."""

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Loads the model; errors are those of ``ModelRunner``."""
        from octavo.runner.model_runner import ModelRunner

        self._worker = ModelRunner(options, config, folder, dtype)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on the worker."""
        return [getattr(self._worker, method)(*args)]

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on the worker."""
        return self._worker.execute(plan)
