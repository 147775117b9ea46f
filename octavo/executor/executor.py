"""The interface of executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.core.plan import StepPlan, StepResult
from octavo.process.startup import WorkerFacts


class PendingStep(Protocol):
    """A step submitted to the workers."""

    def wait(self) -> StepResult:
        """The result, once it is done. Steps are waited for in the order in which they were submitted.

        Raises:
            Exception: the step failed.
        """


@dataclass(frozen=True)
class SubmittedStep:
    """A ``PendingStep`` whose result a function gives."""

    wait: Callable[[], StepResult]


class Executor(ABC):
    """Owns the workers, sends plans to them, and combines their results.

    All workers get the same plans in the same order and have the same number of blocks.

    A step has failed if it failed on any worker. ``wait`` then raises: how far each came is unknown and may differ, so
    nothing of the step counts, and the scheduler ends its requests with an error and forgets the contents of the blocks
    that it moved. A single worker has applied the plan's changes to its rows as far as it could, and takes further
    plans, which name the step's sequences only to forget them. Of several, the others may wait for the one that failed
    in the middle of a collective: all are ended then, ``check_health`` raises from then on, and the engine ends.
    """

    #: Whether workers run in this process, so that requests may hold code (logits processors).
    in_process: bool = False
    #: Pipeline stages: steps that must be in flight to keep all workers busy.
    num_stages: int = 1

    #: Whether the workers are connected by torch.distributed, through a store that the first of them opens.
    needs_store: bool = False

    def start(self) -> None:
        """Creates the workers, gives each its device, and loads the model.

        Raises:
            OctavoError: the checkpoint is unusable, or memory, devices or options do not allow to run it.
        """
        self.start_workers()
        store = self.collective_rpc("open_store")[0] if self.needs_store else None
        self.collective_rpc("init_device", [store])
        self.collective_rpc("load_model")

    @abstractmethod
    def start_workers(self) -> None:
        """Creates the workers: they answer calls, and have no device and no model yet.

        Raises:
            OctavoError: there are too few devices, or what runs the workers does not start.
        """

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker as first argument: the answers, by rank.

        Arguments and answers are plain data where workers run in other processes, and functions must be importable
        there. ``timeout`` in seconds.

        Raises:
            EngineDeadError: a worker is lost, or ``shutdown`` was called.
            InsufficientMemoryError: memory ran out on a worker.
            TimeoutError: not all have answered in time; the workers are ended.
            Exception: the method failed on a worker.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on all workers; while one is in flight others may follow, which run after it.

        They may schedule sequences that sample in it, unless their sampling needs tokens by their id or there are
        several stages.

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

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, that every worker has memory for."""
        lengths, counts = zip(*self.collective_rpc("cache_size", [max_model_len, max_num_batched_tokens]), strict=True)
        return min(lengths), [*map(min, zip(*counts, strict=True))]

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        """Blocks of each KV group for preempted requests that every worker has memory for."""
        counts = self.collective_rpc("num_host_blocks", [max_model_len, max_num_batched_tokens])
        return [*map(min, zip(*counts, strict=True))]

    def kv_groups(self) -> list[tuple[int, int | None]]:
        """The groups of KV layers: bytes of a block in all layers of each, on the worker with most; and its window."""
        workers = self.collective_rpc("kv_groups")
        return [(max(size for size, _ in group), group[0][1]) for group in zip(*workers, strict=True)]

    def startup_facts(self) -> list[WorkerFacts]:
        """What each worker got at its start, by rank; to be asked once there is a KV cache."""
        return msgspec.convert(self.collective_rpc("startup_facts"), list[WorkerFacts])

    def measure_swap(self) -> float:
        """Seconds until every worker has moved one block between device and host; 0.0 without host blocks."""
        return max(self.collective_rpc("measure_swap"))

    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``, see ``ModelRunner.sleep``: bytes, of all workers together."""
        return sum(self.collective_rpc("sleep", [level]))


# What several workers report of what they prepare, as one report.


class WorkerReports:
    """Something is prepared when every worker has it, and has failed if it failed on any of them.

    So no plan places what a slower worker still prepares, or what a worker could not prepare.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: By key: of each worker that has reported, its error, or None.
        self._reports: dict[str, dict[int, str | None]] = {}

    def combine(self, result: StepResult, others: Iterable[tuple[int, StepResult]], rank: int) -> None:
        """Leaves in the result of worker ``rank`` what is known of all workers, with the reports of ``others``."""
        for reporter, report in [(rank, result), *others]:
            for key in report.prepared:
                self._reports.setdefault(key, {})[reporter] = None
            for key, message in report.prepare_errors.items():
                self._reports.setdefault(key, {})[reporter] = message
        result.prepared, result.prepare_errors = [], {}
        for key in [key for key, of_workers in self._reports.items() if len(of_workers) == self._world_size]:
            of_workers = self._reports.pop(key)
            messages = [message for _, message in sorted(of_workers.items()) if message is not None]
            if messages:
                result.prepare_errors[key] = messages[0]
            else:
                result.prepared.append(key)


def reports_of(result: StepResult) -> StepResult | None:
    """The part of a result that every worker reports; None if there is nothing."""
    names = ("prepared", "prepare_errors", "sampled_digest")
    fields = {name: value for name in names if (value := getattr(result, name))}
    return StepResult(result.step, **fields) if fields else None
