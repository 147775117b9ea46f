"""What several workers report of the adapters that they load, and of grammars that they compile, as one report."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.plan import StepResult

#: Fields of ``StepResult``: keys of what a worker has now, and by key why it cannot have it.
_KINDS = (("loaded_adapters", "adapter_errors"), ("compiled_grammars", "grammar_errors"))


class WorkerReports:
    """An adapter is loaded when every worker has it, and has failed if it failed on any of them; so are grammars.

    So no plan places an adapter that a slower worker still reads, or one that a worker could not read.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        #: For each kind, by key: of each worker that has reported, its error, or None.
        self._reports: list[dict[str, dict[int, str | None]]] = [{} for _ in _KINDS]

    def combine(self, result: StepResult, others: Iterable[tuple[int, StepResult]], rank: int) -> None:
        """Leaves in the result of worker ``rank`` what is known of all workers, with the reports of ``others``."""
        answers = [(rank, result), *others]
        for (done, failed), reports in zip(_KINDS, self._reports, strict=True):
            for reporter, report in answers:
                for key in getattr(report, done):
                    reports.setdefault(key, {})[reporter] = None
                for key, message in getattr(report, failed).items():
                    reports.setdefault(key, {})[reporter] = message
            keys: list[str] = []
            errors: dict[str, str] = {}
            for key in [key for key, of_workers in reports.items() if len(of_workers) == self._world_size]:
                of_workers = reports.pop(key)
                messages = [message for _, message in sorted(of_workers.items()) if message is not None]
                if messages:
                    errors[key] = messages[0]
                else:
                    keys.append(key)
            setattr(result, done, keys)
            setattr(result, failed, errors)


def reports_of(result: StepResult) -> StepResult | None:
    """The part of a result that every worker reports; None if there is nothing."""
    names = [name for kind in _KINDS for name in kind] + ["sampled_digest"]
    fields = {name: value for name in names if (value := getattr(result, name))}
    return StepResult(result.step, **fields) if fields else None
