"""What several workers report of the adapters that they load, as one report."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.plan import StepResult


class AdapterLoads:
    """An adapter is loaded when every worker has it, and has failed if it failed on any of them.

    So no plan places an adapter that a slower worker still reads, or one that a worker could not read.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: By key: of each worker that has reported, its error, or None.
        self._reports: dict[str, dict[int, str | None]] = {}

    def combine(self, result: StepResult, others: Iterable[tuple[int, StepResult]], rank: int) -> None:
        """Leaves in the result of worker ``rank`` what is known of all workers, with the reports of ``others``."""
        for reporter, report in ((rank, result), *others):
            for key in report.loaded_adapters:
                self._reports.setdefault(key, {})[reporter] = None
            for key, message in report.adapter_errors.items():
                self._reports.setdefault(key, {})[reporter] = message
        result.loaded_adapters, result.adapter_errors = [], {}
        for key in [key for key, reports in self._reports.items() if len(reports) == self._world_size]:
            reports = self._reports.pop(key)
            errors = [reports[r] for r in sorted(reports) if reports[r] is not None]
            if errors:
                result.adapter_errors[key] = errors[0] or ""
            else:
                result.loaded_adapters.append(key)


def loads_of(result: StepResult) -> StepResult | None:
    """The part of a result that every worker reports; None if there is nothing."""
    if not (result.loaded_adapters or result.adapter_errors):
        return None
    return StepResult(result.step, loaded_adapters=result.loaded_adapters, adapter_errors=result.adapter_errors)
