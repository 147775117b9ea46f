"""Executors: the interface, a factory, and the executor of one worker in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, memory_errors
from octavo.core.model_config import ModelConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.core.startup import WorkerFacts

if TYPE_CHECKING:
    from octavo.runner.model_runner import ModelRunner


class PendingStep(Protocol):
    """A step submitted to the workers."""

    def wait(self) -> StepResult:
        """The result, once it is done. Steps are waited for in the order in which they were submitted.

        Raises:
            Exception: the step failed.
        """


class Executor(ABC):
    """Owns the workers, sends plans to them, and combines their results.

    All workers get the same plans in the same order and have the same number of blocks.

    A step has failed if it failed on any worker. ``wait`` then raises, once every worker has answered or is lost: none
    still computes the step when the next plan arrives. How far each came is unknown and may differ, so nothing of the
    step counts: the scheduler ends its requests with an error and forgets the contents of the blocks that it moved. A
    worker that lives has applied the plan's changes to its rows as far as it could, and takes further plans, which name
    the step's sequences only to forget them. A worker that is lost misses changes that no later plan repeats: from then
    on ``check_health`` raises, and the engine ends.
    """

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every worker: their answers, by rank.

        Raises:
            EngineDeadError: a worker is lost, or ``shutdown`` was called.
            InsufficientMemoryError: memory ran out on a worker.
            Exception: the method failed on a worker.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on all workers; while one is in flight a second may follow, which runs after it.

        The second may schedule sequences that sample in the first, unless their sampling needs tokens by their id.

        Raises:
            EngineDeadError: as ``collective_rpc``.
            Exception: the step failed.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Returns if every worker can take further steps.

        Raises:
            EngineDeadError: as ``collective_rpc``.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees their memory; nothing happens if it was called before."""

    def num_blocks(self, max_model_len: int) -> int:
        """KV cache blocks that every worker has memory for."""
        return min(self.collective_rpc("num_blocks", max_model_len))

    def num_host_blocks(self) -> int:
        """Blocks for preempted requests that every worker has memory for."""
        return min(self.collective_rpc("num_host_blocks"))

    def kv_groups(self) -> list[tuple[int, int | None]]:
        """The groups of KV layers, alike on every worker: bytes of a block in all layers of each, and its window."""
        groups: list[tuple[int, int | None]] = self.collective_rpc("kv_groups")[0]
        return groups

    def startup_facts(self) -> list[WorkerFacts]:
        """What each worker got at its start, by rank; to be asked once there is a KV cache."""
        return self.collective_rpc("startup_facts")

    def measure_swap(self) -> float:
        """Seconds until every worker has moved one block between device and host; 0.0 without host blocks."""
        return max(self.collective_rpc("measure_swap"))

    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``, see ``ModelRunner.sleep``: bytes, of all workers together."""
        return sum(self.collective_rpc("sleep", level))


class UniprocExecutor(Executor):
    """One worker, called directly."""

    def __init__(self, options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> None:
        """Loads the model; errors are those of ``ModelRunner``."""
        from octavo.runner.model_runner import ModelRunner

        self._worker: ModelRunner | None = ModelRunner(options, config, folder, dtype)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on the worker."""
        with memory_errors():
            return [getattr(self._alive(), method)(*args)]

    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on the worker."""
        return self._alive().submit(plan)

    def check_health(self) -> None:
        """The worker lives as long as this process, or until ``shutdown``."""
        self._alive()

    def shutdown(self) -> None:
        """Drops the worker, and with it weights and KV cache."""
        self._worker = None

    def _alive(self) -> ModelRunner:
        if self._worker is None:
            raise EngineDeadError("the executor was shut down; a new engine must be made")
        return self._worker


def make_executor(options: EngineConfig, config: ModelConfig, folder: Path, dtype: str) -> Executor:
    """The workers that ``options`` ask for: one, in this process.

    Args:
        config: the network's, with the context length that is wanted.
        folder: of the checkpoint.
        dtype: of weights and activations: float32, bfloat16 or float16.

    Raises:
        OctavoError: the checkpoint is unusable, or memory or options do not allow to run it.
    """
    return UniprocExecutor(options, config, folder, dtype)
