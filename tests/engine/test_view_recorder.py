"""Views of an engine: they agree with its statistics, say what has changed, and cost nothing while nobody asks."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.stats import MAX_ADAPTER_SLOTS, NUM_STEPS, BlockState, EngineView, StepStats
from octavo.engine.core import ViewRecorder
from tests.scheduler.fake_preparations import adapter_options, lora
from tests.scheduler.fake_worker import Engine
from tests.scheduler.test_scenarios import make, request


class Watched:
    """A scheduler over a fake worker, and who watches it."""

    def __init__(self, **options: Any) -> None:
        self.engine: Engine = make(**options)
        self.recorder = ViewRecorder(self.engine.scheduler, clock=lambda: self.engine.now)
        self.engine.loop.observers.append(self.recorder)
        self.recorder.view()

    def step(self) -> None:
        self.engine.step()
        self.engine.now += 0.01
        self.recorder.note(self.engine.loop.measure_emptied())

    def run(self) -> list[EngineView]:
        """Steps to the end; a view after each step."""
        views = []
        while self.engine.scheduler.has_work:
            self.step()
            views.append(self.recorder.view())
        return views


def kinds(views: list[EngineView]) -> list[str]:
    return [change.kind for view in views for change in view.changes]


def test_a_view_agrees_with_the_statistics_after_every_step() -> None:
    watched = Watched(blocks=12, host=8, prefix_caching=True, preemption_mode="swap")
    for group_id in range(1, 5):
        watched.engine.add(request(group_id, [1, 2, 3, 4, 5, 6, 7, 8, group_id], max_tokens=14, n=2))
    seen = set()
    while watched.engine.scheduler.has_work:
        watched.step()
        view, counts = watched.recorder.view(), watched.engine.scheduler.counts()
        device = view.blocks[0].counts
        assert device[BlockState.USED] + device[BlockState.SHARED] == counts.blocks_used == view.state.blocks_used
        assert device[BlockState.CACHED] == counts.blocks_cached and device[BlockState.FREE] == counts.blocks_free
        assert (
            view.blocks[1].counts[BlockState.USED] + view.blocks[1].counts[BlockState.SHARED] == counts.host_blocks_used
        )
        waiting, running, swapped = watched.engine.queues
        assert {row.group_id for row in view.groups} == {*waiting, *running, *swapped}
        assert [record.step for record in view.steps] == [counts.steps]
        seen.update(kinds([view]))
    assert seen >= {"fork", "copy", "swap", "swap_out", "swap_in"}


def test_a_fork_names_its_group_and_the_blocks_that_it_shares() -> None:
    watched = Watched()
    watched.engine.add(request(7, 8, max_tokens=3, n=2))
    views = watched.run()
    [fork] = [change for view in views for change in view.changes if change.kind == "fork"]
    assert fork.group_id == 7 and len(fork.blocks) == 2


def test_a_preemption_says_what_it_costs_and_for_whom() -> None:
    options: dict[str, Any] = {
        "scheduling_policy": "static",
        "priority_preemption": True,
        "preemption_mode": "recompute",
    }
    watched = Watched(blocks=6, **options)
    watched.engine.add(request(1, 12, priority=5, max_tokens=8))
    watched.step()
    watched.engine.add(request(2, 12, priority=0, max_tokens=8))
    changes = [change for view in watched.run() for change in view.changes]
    [preempted] = [change for change in changes if change.kind == "recompute"]
    assert (preempted.group_id, preempted.preempted_for) == (1, 2) and preempted.cost >= 12


def test_without_blocks_a_preemption_is_for_nobody() -> None:
    watched = Watched(blocks=6, preemption_mode="recompute")
    watched.engine.add(request(1, 8, max_tokens=12))
    watched.engine.add(request(2, 8, max_tokens=12))
    changes = [change for view in watched.run() for change in view.changes]
    preempted = [change for change in changes if change.kind == "recompute"]
    assert preempted and all(change.preempted_for is None for change in preempted)


def test_evicted_blocks_are_named() -> None:
    watched = Watched(blocks=6, prefix_caching=True)
    for group_id in (1, 2, 3):
        watched.engine.add(request(group_id, 15, max_tokens=2))
    views = watched.run()
    evicted = [block for view in views for change in view.changes if change.kind == "evict" for block in change.blocks]
    assert evicted and len(evicted) == views[-1].evicted_blocks == watched.engine.blocks.groups[0].cache.num_evicted


def test_an_eviction_says_why() -> None:
    watched = Watched(blocks=6, prefix_caching=True)
    watched.engine.add(request(1, 15, max_tokens=2))
    watched.run()
    group = watched.engine.blocks.groups[0]
    ended, held = [group.cache.on_device.at(block).digest for block in group.device.cached()][:2]
    group.cache.hold(ended)
    group.cache.unhold(ended, evict_first=True)
    group.cache.follow({held: 1})
    for group_id in (2, 3):
        watched.engine.add(request(group_id, 15, max_tokens=2))
    whys = [change.why for view in watched.run() for change in view.changes if change.kind == "evict"]
    assert whys[0] == "ended" and set(whys) == {"ended", "held", "room"}


def test_adapters_in_slots_are_shown_with_what_runs_with_them_the_busiest_first() -> None:
    watched = Watched(adapters=adapter_options(3))
    for group_id, adapter in enumerate((lora("A"), lora("B"), None, lora("B")), start=1):
        watched.engine.add(request(group_id, 5, max_tokens=6 if group_id == 1 else 12, adapter=adapter))
    views = watched.run()
    shown = [[(one.key, one.num_running) for one in view.adapters] for view in views]
    assert [("B", 2), ("A", 1)] in shown and [("B", 2), ("A", 0)] in shown
    assert all(len(view.adapters) == view.state.adapters.in_slots for view in views if view.state.adapters is not None)
    assert {one.slot for one in views[-1].adapters} == set(watched.engine.worker.preparations.slots)


def test_adapters_that_are_named_are_bounded() -> None:
    most = MAX_ADAPTER_SLOTS + 3
    watched = Watched(adapters=adapter_options(most), blocks=400)
    for group_id in range(most):
        watched.engine.add(request(group_id, 4, max_tokens=3, adapter=lora(f"{group_id}")))
    last = watched.run()[-1]
    assert last.state.adapters is not None and last.state.adapters.in_slots == most
    assert len(last.adapters) == MAX_ADAPTER_SLOTS


def test_steps_come_once_and_all_that_are_known_when_asked() -> None:
    watched = Watched()
    watched.engine.add(request(1, 4, max_tokens=10))
    for _ in range(3):
        watched.step()
    assert [record.step for record in watched.recorder.view().steps] == [1, 2, 3]
    watched.step()
    assert [record.step for record in watched.recorder.view().steps] == [4]
    assert watched.recorder.view().steps == []
    assert [record.step for record in watched.recorder.view(fresh=True).steps] == [1, 2, 3, 4]


def test_records_are_bounded() -> None:
    recorder = ViewRecorder(make().scheduler)
    stats = StepStats()
    for _ in range(NUM_STEPS + 50):
        recorder.note(stats)
    assert len(recorder.view(fresh=True).steps) == NUM_STEPS


def test_whoever_no_longer_asks_is_no_longer_waited_for() -> None:
    watched = Watched()
    assert watched.recorder.watches
    watched.engine.now += 60
    assert not watched.recorder.watches
    watched.recorder.view()
    assert watched.recorder.watches


def test_a_view_crosses_processes_and_is_json() -> None:
    watched = Watched(prefix_caching=True)
    watched.engine.add(request(1, 9, max_tokens=4, n=2))
    view = watched.run()[1]
    for coding in (msgspec.msgpack, msgspec.json):
        assert coding.decode(coding.encode(view), type=EngineView) == view
