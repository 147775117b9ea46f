"""Views name requests by the ids of their clients: those that are mentioned, bounded, the ones in the queues first."""

from __future__ import annotations

import msgspec

from octavo.core.stats import (
    MAX_ADAPTER_NAMES,
    MAX_ID_LENGTH,
    MAX_REQUEST_IDS,
    NOBODY,
    AdapterSlot,
    BlockMap,
    BlockRun,
    Change,
    EngineView,
    GroupRow,
    SchedulerState,
)
from octavo.engine.front_end import name_adapters, name_requests


def row(group_id: int, preempted_for: int | None = None) -> GroupRow:
    return GroupRow(group_id, "running", 1, 4, 1, 4, 0, 0.1, 0, 0, 0, 0, preempted_for)


def view(rows: list[GroupRow], owners: list[int], changes: list[Change] | None = None) -> EngineView:
    runs = [BlockRun(1, 2, 1, owner, 0, 0) for owner in owners]
    blocks = BlockMap(0, False, 16, None, 0, len(runs), [0, 0, len(runs), 0, 0], runs)
    return EngineView(0, 1.0, 512, 64, SchedulerState(), [blocks], rows, [], changes or [], 0, 0)


def test_all_that_a_view_mentions_are_named() -> None:
    shown = view([row(1, preempted_for=2)], [3, NOBODY, 1], [Change("swap", 1, 4, preempted_for=5)])
    name_requests(shown, {i: f"chatcmpl-{i}" for i in range(1, 9)}.get)
    assert shown.request_ids == {i: f"chatcmpl-{i}" for i in (1, 2, 3, 4, 5)}


def test_one_that_has_ended_has_no_name() -> None:
    shown = view([row(1), row(2)], [])
    name_requests(shown, {2: "b"}.get)
    assert shown.request_ids == {2: "b"}


def test_names_are_bounded_in_number_and_length_and_the_queues_come_first() -> None:
    shown = view([row(10_000)], list(range(2 * MAX_REQUEST_IDS)))
    name_requests(shown, lambda group_id: "x" * 10_000)
    assert len(shown.request_ids) == MAX_REQUEST_IDS and next(iter(shown.request_ids)) == 10_000
    assert {len(name) for name in shown.request_ids.values()} == {MAX_ID_LENGTH}
    assert len(msgspec.json.encode(shown.request_ids)) < 100_000


def test_adapters_are_called_by_the_names_of_their_content_within_bounds() -> None:
    shown = view([], [])
    shown.adapters = [AdapterSlot(0, "a", 2), AdapterSlot(1, "b", 0), AdapterSlot(2, "c", 0)]
    name_adapters(shown, lambda key: {"a": ["sql", "tables"], "b": ["x" * 1000] * 50}.get(key, ()))
    assert [one.names for one in shown.adapters] == [
        ["sql", "tables"],
        ["x" * (MAX_ID_LENGTH - 1) + "…"] * MAX_ADAPTER_NAMES,
        [],
    ]


def test_names_are_kept_in_json() -> None:
    shown = view([row(1)], [1])
    shown.adapters = [AdapterSlot(3, "a", 2, ["sql"])]
    name_requests(shown, {1: "chatcmpl-1"}.get)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=EngineView) == shown
