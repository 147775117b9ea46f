"""Names in a view: ids of requests and names of adapters, which the front end knows and engine cores do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from octavo.core.engine_view import MAX_ADAPTER_NAMES, MAX_ID_LENGTH, MAX_REQUEST_IDS, EngineView


def name_requests(view: EngineView, id_of_group: Callable[[int], str | None]) -> None:
    """Sets ``view.request_ids``: of the groups that the view mentions, those in its queues first.

    ``id_of_group``: the id of a group's request, None if it has ended.
    """
    ids = ((group_id, id_of_group(group_id)) for group_id in dict.fromkeys(_mentioned(view)))
    named = ((group_id, _bounded(request_id)) for group_id, request_id in ids if request_id is not None)
    view.request_ids = dict(itertools.islice(named, MAX_REQUEST_IDS))


def name_adapters(view: EngineView, names_of: Callable[[str], Sequence[str]]) -> None:
    """Sets the names of adapters in slots; ``names_of``: those of a content, by its digest."""
    for one in view.adapters:
        one.names = [_bounded(name) for name in names_of(one.key)[:MAX_ADAPTER_NAMES]]


def _mentioned(view: EngineView) -> Iterator[int]:
    yield from (row.group_id for row in view.groups)
    for shown in view.blocks:
        yield from (run.group_id for run in shown.runs)
    yield from (change.group_id for change in view.changes)
    for other in (*(row.preempted_for for row in view.groups), *(change.preempted_for for change in view.changes)):
        if other is not None:
            yield other


def _bounded(name: str) -> str:
    return name if len(name) <= MAX_ID_LENGTH else name[: MAX_ID_LENGTH - 1] + "…"
