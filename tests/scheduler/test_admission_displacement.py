"""Running groups that are preempted for a waiting one: enough of them, no more than needed, or none."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest

from octavo.memory.kv_group import BlocksNeeded
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.step import Step
from tests.scheduler.builders import finish, make, request, step
from tests.scheduler.fake_worker import Engine, watch_displacement
from tests.scheduler.virtual_engine import Job, VirtualEngine

BATCHING = pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
STATIC: dict[str, Any] = {"scheduling_policy": "static", "priority_preemption": True, "preemption_mode": "recompute"}


@BATCHING
def test_nothing_is_preempted_for_a_group_that_would_not_fit_then(batching: str) -> None:
    engine = make(blocks=10, batching=batching, **STATIC)
    engine.add(request(1, 22, priority=0, max_tokens=4))
    engine.add(request(2, 5, priority=5, max_tokens=4))
    step(engine)
    engine.add(request(3, 17, priority=1, max_tokens=4))
    assert step(engine) == {1: 1, 2: 1}
    assert engine.queues == ([3], [1, 2], [])
    finish(engine)
    assert engine.scheduler.stats().preemptions_by_recompute == 0


@BATCHING
def test_a_cached_prefix_of_running_groups_counts(batching: str) -> None:
    shared = [*range(500, 516)]  # four blocks
    engine = make(blocks=10, batching=batching, prefix_caching=True, **STATIC)
    engine.add(request(1, shared, priority=0, max_tokens=8))
    step(engine)
    engine.add(request(2, 13, priority=5, max_tokens=8))
    step(engine)
    assert engine.queues[1] == [1, 2]
    engine.add(request(3, [*shared, *range(9)], priority=1, max_tokens=2))
    step(engine)  # seven blocks, four of them those of 1: with those of 2 it fits
    assert engine.queues == ([2], [1, 3], [])
    finish(engine)


@BATCHING
def test_those_that_are_not_needed_are_spared(batching: str) -> None:
    engine = make(blocks=16, batching=batching, **STATIC)
    for group_id, prompt in [(1, 5), (2, 29), (3, 5), (4, 5)]:
        engine.add(request(group_id, prompt, priority=group_id, max_tokens=8))
    step(engine)
    step(engine)
    engine.add(request(5, 25, priority=0, max_tokens=2))
    step(engine)  # seven blocks: without 2 there are nine, without 3 and 4 not enough
    assert engine.queues == ([2], [5, 1, 3, 4], [])
    finish(engine)


def test_blocks_for_the_next_tokens_of_those_that_give_way_do_not_count() -> None:
    engine = make(blocks=8, **STATIC)
    engine.add(request(1, 5, priority=0, max_tokens=4))
    engine.add(request(2, 8, priority=5, max_tokens=4))
    step(engine)  # 2 needs a block for its next token
    engine.add(request(3, 23, priority=1, max_tokens=2))
    step(engine)  # six blocks: four that are free, and the two of 2
    assert engine.queues == ([2], [1, 3], [])
    finish(engine)


@pytest.mark.parametrize(
    ("victim", "batching"),
    [
        ("last", "prefill_first"),
        ("most_blocks", "mixed"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("last", "mixed"),
                ("least_computed", "mixed"),
                ("least_computed", "prefill_first"),
                ("most_blocks", "prefill_first"),
            )
        ),
    ],
)
def test_the_preempted_are_enough_and_none_of_them_could_stay(batching: str, victim: str) -> None:
    """Against all sets of groups that could be preempted, each tried on a copy of the engine."""
    displaced = 0
    for seed in range(10):
        rng = random.Random(seed)
        engine = make(
            blocks=rng.randint(14, 24),
            prefix_caching=rng.random() < 0.5,
            batching=batching,
            preemption_victim=victim,
            max_num_seqs=rng.choice([5, 12]),
            max_num_batched_tokens=400,
            watermark=rng.choice([0.0, 0.1]),
            **STATIC,
        )
        prefix = [*range(900, 908)]
        for group_id in range(1, 6):
            prompt = [*prefix[: rng.choice([0, 8])], *range(100 * group_id, 100 * group_id + rng.randint(1, 20))]
            engine.add(request(group_id, prompt, priority=rng.randint(1, 3), n=rng.choice([1, 1, 2]), max_tokens=20))
        for _ in range(rng.randint(2, 4)):
            step(engine)
        engine.add(request(9, [*prefix, *range(rng.randint(1, 40))], max_tokens=2))
        before = copy.deepcopy(engine)
        candidates = [g.group_id for g in engine.scheduler.queues.running if g.priority > 0]
        engine.step()
        gone = set(candidates) - {g.group_id for g in engine.scheduler.queues.running}
        if not before.scheduler._admission.fits(before.answers[9].group):
            sets = [{*s} for n in range(1, len(candidates) + 1) for s in itertools.combinations(candidates, n)]
            enough = [s for s in sets if fits_without(before, s)]
            assert (gone in enough) if enough else not gone, f"seed {seed}: {gone}, enough: {enough}"
            assert not any(s < gone for s in enough), f"seed {seed}: {gone}, enough: {enough}"
            displaced += bool(gone)
    assert displaced


def fits_without(engine: Engine, group_ids: set[int]) -> bool:
    """Whether group 9 is admitted in the next step of a copy if these are preempted, and no further one is."""
    engine = copy.deepcopy(engine)
    scheduler = engine.scheduler
    staying = {g.group_id for g in scheduler.queues.running} - group_ids

    def preempt(at: Step) -> SequenceGroup | None:
        for group_id in group_ids:
            scheduler._preemption.preempt(scheduler.queues.groups[group_id], at)
        return scheduler.queues.groups[9]

    scheduler._displacement.preempt_for_waiting = preempt  # type: ignore[method-assign, assignment]
    scheduler.schedule()
    running = {g.group_id for g in scheduler.queues.running}
    return running >= {9, *staying}


@pytest.mark.parametrize(
    ("policy", "batching"),
    [
        ("srpt", "prefill_first"),
        ("deadline", "mixed"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("srpt", "mixed"),
                ("deadline", "prefill_first"),
                ("mlfq", "mixed"),
                ("mlfq", "prefill_first"),
            )
        ),
    ],
)
def test_under_every_policy_that_displaces_the_waiting_group_runs_at_once(policy: str, batching: str) -> None:
    rng = random.Random(7)
    engine = VirtualEngine(policy, blocks=40, options={"max_num_seqs": 4, "batching": batching, "aging_limit": None})
    displaced = watch_displacement(engine.scheduler)
    for i in range(120):
        target = rng.choice([None, 0.3]) if policy == "deadline" else None
        length = rng.choice([3, 200])
        engine.add(Job(engine.now, [i + 1] * rng.randint(1, 150), length, user=f"user {length}", ttft_target=target))
        for _ in range(rng.randint(1, 12)):
            engine.step()
    engine.serve([])
    assert displaced


@pytest.mark.parametrize("groups", [50, 200])
def test_running_groups_are_looked_at_a_few_times_however_many_are_preempted(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(blocks=2 * groups, max_num_seqs=groups, max_num_batched_tokens=16 * groups)
    for group_id in range(groups):
        engine.add(request(group_id, 7, max_tokens=40))
    looks = 0

    def awaits_result(group: SequenceGroup) -> bool:
        nonlocal looks
        looks += 1
        return False

    monkeypatch.setattr(SequenceGroup, "awaits_result", property(awaits_result))
    while not engine.scheduler.stats().preemptions_by_recompute:
        looks = 0
        step(engine)
    assert engine.scheduler.stats().preemptions_by_recompute > groups // 5
    assert looks < 4 * groups


@pytest.mark.parametrize("groups", [25, 100])
def test_needs_are_summed_a_few_times_however_many_groups_are_displaced(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(
        blocks=2 * groups, max_num_batched_tokens=8 * groups, max_num_seqs=groups + 1,
        preemption_victim="least_computed", **STATIC,
    )  # fmt: skip
    for group_id in range(groups):
        engine.add(request(group_id, 7, priority=5, max_tokens=40))
    step(engine)
    engine.add(request(groups, 6 * groups, max_tokens=2))
    sums = 0
    add = BlocksNeeded.__add__

    def counted(self: BlocksNeeded, other: BlocksNeeded) -> BlocksNeeded:
        nonlocal sums
        sums += 1
        return add(self, other)

    monkeypatch.setattr(BlocksNeeded, "__add__", counted)
    step(engine)
    assert engine.scheduler.stats().preemptions_by_recompute > groups // 2
    assert sums < 12 * groups
