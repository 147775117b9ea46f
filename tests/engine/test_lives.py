"""Lives of requests in views: admitted, computed, preempted, ended, and what those that wait are waiting for."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.stats import EngineView, LifeEvent
from tests.engine.test_view_recorder import Watched
from tests.scheduler.fake_preparations import adapter_options, lora
from tests.scheduler.test_scenarios import request


def lives(views: list[EngineView], group_id: int) -> list[LifeEvent]:
    return [event for view in views for event in view.lives if event.group_id == group_id]


def obstacles(view: EngineView) -> dict[int, str]:
    return {row.group_id: row.waits_for for row in view.groups if row.status != "running"}


def test_a_life_has_the_chunks_of_its_prompt_and_its_end() -> None:
    watched = Watched(max_num_seqs=4, max_num_batched_tokens=8)
    watched.engine.add(request(1, 19, max_tokens=5))
    events = lives(watched.run(), 1)
    assert [event.kind for event in events] == ["admit", "prompt", "prompt", "prompt", "end"]
    assert [(event.amount, event.left) for event in events[1:4]] == [(8, 11), (8, 3), (3, 0)]
    assert (events[0].amount, events[0].why) == (0, "") and (events[-1].amount, events[-1].why) == (5, "length")
    assert [event.step for event in events[:4]] == [1, 1, 2, 3] and events[-1].at > events[3].at


def test_a_preempted_request_computes_again_what_it_has_lost() -> None:
    watched = Watched(blocks=6, preemption_mode="recompute")
    watched.engine.add(request(1, 8, max_tokens=12))
    watched.engine.add(request(2, 8, max_tokens=12))
    views = watched.run()
    events = lives(views, 2)
    assert [event.kind for event in events] == ["admit", "prompt", "recompute", "admit", "prompt", "end"]
    lost, again, chunk = events[2:5]
    assert again.why == "recompute" and lost.amount > 8 and again.amount + chunk.amount == lost.amount + 1
    assert any(obstacles(view) == {2: "blocks"} for view in views)
    assert max(row.num_blocks for view in views for row in view.groups if row.group_id == 2) > 2


def test_a_swapped_request_goes_on_without_a_chunk() -> None:
    watched = Watched(blocks=6, host=6, preemption_mode="swap")
    watched.engine.add(request(1, 8, max_tokens=12))
    watched.engine.add(request(2, 8, max_tokens=12))
    views = watched.run()
    events = lives(views, 2)
    assert [event.kind for event in events] == ["admit", "prompt", "swap", "admit", "end"]
    assert events[2].amount > 0 and events[3].why == "swap" and events[4].amount == 12
    assert any(obstacles(view) == {2: "blocks"} for view in views)


def test_found_tokens_and_those_of_several_sequences_are_counted() -> None:
    watched = Watched(prefix_caching=True)
    watched.engine.add(request(1, list(range(12)), max_tokens=2))
    watched.run()
    watched.engine.add(request(2, list(range(12)), max_tokens=3, n=2))
    admit, chunk, end = lives(watched.run(), 2)
    assert admit.amount > 0 and admit.amount + chunk.amount == 12
    assert end.amount == 6


def test_a_request_that_came_and_went_between_two_views_is_told_whole() -> None:
    watched = Watched()
    watched.engine.add(request(1, 4, max_tokens=3))
    while watched.engine.scheduler.has_work:
        watched.step()
    view = watched.recorder.view()
    assert not view.groups and [event.kind for event in view.lives] == ["admit", "prompt", "end"]
    watched.engine.add(request(2, 4, max_tokens=30))
    watched.step()
    watched.engine.scheduler.finish_group(2)
    watched.recorder.note(watched.engine.loop.measure_emptied())
    assert watched.recorder.view().lives[-1].why == "abort"


def test_whoever_waits_says_for_what() -> None:
    watched = Watched(max_num_seqs=1, blocks=40)
    for group_id in (1, 2):
        watched.engine.add(request(group_id, 4, max_tokens=6))
    watched.step()
    assert obstacles(watched.recorder.view()) == {2: "sequences"}
    watched = Watched(max_num_seqs=4, max_num_batched_tokens=8, blocks=40)
    for group_id in (1, 2):
        watched.engine.add(request(group_id, 12, max_tokens=6))
    watched.step()
    assert obstacles(watched.recorder.view()) == {2: "step"}
    watched = Watched(adapters=adapter_options(1), blocks=40)
    for group_id, adapter in enumerate((lora("A"), lora("B")), start=1):
        watched.engine.add(request(group_id, 4, max_tokens=6, adapter=adapter))
    seen: set[Any] = set()
    while watched.engine.scheduler.has_work:
        watched.step()
        seen |= {*obstacles(watched.recorder.view()).items()}
    assert (2, "lora") in seen


def test_what_nobody_watches_is_not_kept_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.lives.MAX_LIFE_EVENTS", 30)
    watched = Watched(max_num_seqs=4, max_num_batched_tokens=4, blocks=200)
    watched.engine.add(request(1, 160, max_tokens=1))
    while watched.engine.scheduler.has_work:
        watched.step()
        watched.engine.now -= 0.01  # nobody stops watching
    events = watched.recorder.view().lives
    assert len(events) == 30 and events[-1].kind == "end"
    watched.engine.now += 60
    watched.engine.add(request(2, 4, max_tokens=30))
    watched.step()
    assert watched.recorder.view().lives == []
