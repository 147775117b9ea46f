"""What several workers report of what they prepare, as one report."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.plan import StepResult


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
