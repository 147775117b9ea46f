"""``Executor``: the interface to an engine's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from octavo.config.kv_spec import GroupShape
from octavo.core.failures import SequenceFailure
from octavo.core.plan import StepPlan, StepResult
from octavo.process.startup import WorkerFacts


class PendingStep(Protocol):
    """A step submitted to the workers."""

    def wait(self) -> StepResult:
        """Waits for the step, in the order of submission: its result, or the exception with which it failed."""


@dataclass(frozen=True)
class SubmittedStep:
    """A ``PendingStep`` that calls a function."""

    wait: Callable[[], StepResult]


class Executor(ABC):
    """Owns the workers, sends plans to them, and combines their results.

    All workers get the same plans in the same order (SPMD) and have the same number of blocks. Pipeline stages get them
    one step apart, and ``num_stages`` steps are in flight (vLLM's virtual engines).

    A step has failed if it failed on any worker. ``wait`` then raises: workers may have stopped at different points, so
    nothing of the step counts: the scheduler forgets the contents of all blocks that are not pinned, and computes the
    requests again. A single worker has applied some of the plan's changes to its rows, and takes further plans, which
    name the step's sequences only to forget them. With several workers, the others may wait for the failed one in the
    middle of a collective: all are ended, ``check_health`` raises from then on, and the engine ends.
    """

    #: Whether workers run in this process, so that requests may hold code (logits processors).
    in_process: bool = False
    #: Pipeline stages: steps that must be in flight to keep all workers busy.
    num_stages: int = 1
    #: Whether torch.distributed connects the workers, through a store that rank 0 opens.
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
            OctavoError: there are too few devices, or a process or cluster does not start.
        """

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a function with each worker as first argument: the results, by rank.

        For workers in other processes, arguments and results are plain data, and functions must be importable there.
        ``timeout`` in seconds; a worker in this process ignores it.

        Raises:
            EngineDeadError: a worker is lost, or ``shutdown`` was called.
            InsufficientMemoryError: memory ran out on a worker.
            TimeoutError: not all workers answered in time; they are ended.
            Exception: the method failed on a worker.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingStep:
        """Starts one step on all workers (vLLM's ``execute_model``), after the steps that are in flight.

        With one stage, it may schedule sequences that sample in these, unless sampling needs their tokens by id.

        Raises:
            EngineDeadError: a worker is lost.
            Exception: the step failed.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Returns if every worker can take further steps; raises EngineDeadError if not."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees their memory; may be called again."""

    def cache_size(self, max_model_len: int, max_num_batched_tokens: int) -> tuple[int, list[int]]:
        """Tokens of the longest sequence, and blocks of each KV group, that every worker has memory for."""
        lengths, counts = zip(*self.collective_rpc("cache_size", [max_model_len, max_num_batched_tokens]), strict=True)
        return min(lengths), [*map(min, zip(*counts, strict=True))]

    def num_host_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> list[int]:
        """Blocks of each KV group for preempted requests that every worker has memory for."""
        counts = self.collective_rpc("num_host_blocks", [max_model_len, max_num_batched_tokens])
        return [*map(min, zip(*counts, strict=True))]

    def kv_groups(self) -> list[GroupShape]:
        """The KV groups, with the maximum over workers of a block's bytes."""
        workers = [[GroupShape(*group) for group in groups] for groups in self.collective_rpc("kv_groups")]
        return [
            group[0]._replace(block_bytes=max(shape.block_bytes for shape in group))
            for group in zip(*workers, strict=True)
        ]

    def startup_facts(self) -> list[WorkerFacts]:
        """Kernels, memory and times of each worker's start, by rank; after the KV cache is made."""
        return msgspec.convert(self.collective_rpc("startup_facts"), list[WorkerFacts])

    def measure_swap(self) -> float:
        """Seconds until every worker has moved one block between device and host; 0.0 without host blocks."""
        return max(self.collective_rpc("measure_swap"))

    def sleep(self, level: int) -> int:
        """Frees memory until ``wake_up``: bytes of all workers together. ``ModelRunner.sleep`` explains the levels."""
        return sum(self.collective_rpc("sleep", [level]))


class WorkerReports:
    """Combines the workers' reports: a resource is prepared when every worker has it, and fails if any worker fails.

    So no plan places a resource that a slower worker still prepares, or that a worker could not prepare. Likewise a
    fetch has ended when it has on every worker, with as many blocks as all have, after the slowest one's time.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: By key of the resource and rank: an error, or None.
        self._reports: dict[str, dict[int, SequenceFailure | None]] = {}
        #: By key of a resource: the last step that dropped it, and with it what earlier steps report.
        self._dropped: dict[str, int] = {}
        #: By id of the fetch and rank: blocks and seconds.
        self._fetches: dict[int, dict[int, tuple[int, float]]] = {}

    def submitted(self, plan: StepPlan) -> None:
        """Called with each plan, before ``combine`` with its result."""
        for key in plan.drop:
            self._dropped[key] = plan.step
            self._reports.pop(key, None)

    def combine(self, result: StepResult, others: Iterable[tuple[int, StepResult]], rank: int) -> None:
        """Adds the reports of ``others`` to those of worker ``rank``; ``result`` keeps what all report."""
        reports = [(rank, result), *others]
        self._dropped = {key: step for key, step in self._dropped.items() if step > result.step}
        for reporter, report in reports:
            for key, failure in [*((key, None) for key in report.prepared), *report.prepare_errors.items()]:
                if key not in self._dropped:
                    self._reports.setdefault(key, {})[reporter] = failure
        result.prepared, result.prepare_errors = [], {}
        for key in [key for key, of_workers in self._reports.items() if len(of_workers) == self._world_size]:
            of_workers = self._reports.pop(key)
            failures = [failure for _, failure in sorted(of_workers.items()) if failure is not None]
            if failures:
                result.prepare_errors[key] = failures[0]
            else:
                result.prepared.append(key)
        self._combine_fetches(result, reports)

    def _combine_fetches(self, result: StepResult, reports: list[tuple[int, StepResult]]) -> None:
        for reporter, report in reports:
            for (fetch_id, count), (_, seconds) in zip(report.fetched.items(), report.fetch_times, strict=True):
                self._fetches.setdefault(fetch_id, {})[reporter] = count, seconds
            if report is not result:
                result.stores += report.stores  # of the first worker alone
                result.written += report.written
                result.not_stored += report.not_stored
        result.fetched, result.fetch_times = {}, []
        for fetch_id in [i for i, those in self._fetches.items() if len(those) == self._world_size]:
            of_workers = self._fetches[fetch_id].values()
            result.fetched[fetch_id] = count = min(count for count, _ in of_workers)
            result.fetch_times.append((count, max(seconds for _, seconds in of_workers)))
            # Each worker fetches in the order of the ids: no report of an earlier one will follow.
            self._fetches = {i: those for i, those in self._fetches.items() if i > fetch_id}


def reports_of(result: StepResult) -> StepResult | None:
    """The fields of a result that every worker reports; None if all are empty."""
    preparations = ("prepared", "prepare_errors")
    of_stores = ("fetched", "fetch_times", "written", "not_stored", "stores")
    names = (*preparations, *of_stores, "sampled_digest")
    fields = {name: value for name in names if (value := getattr(result, name))}
    return StepResult(result.step, **fields) if fields else None
