"""Waiting groups and the KV stores: what is fetched, computed, passed over and written; and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.config.kv_spec import GroupBlocks
from octavo.config.options import SchedulerOptions
from octavo.core.plan import StepPlan
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import PendingMoves
from octavo.memory.prefix_cache import PrefixChain
from octavo.memory.stored import StoredBlocks, StoreLimits
from octavo.scheduler.fetches import FetchCost, Fetches, PrefixFetch
from tests.memory.test_memory_machine import run_seed
from tests.scheduler.builders import BLOCK, finish, request
from tests.scheduler.fake_stores import FakeStores
from tests.scheduler.fake_worker import Engine
from tests.scheduler.test_scheduler_machine import WITH_WINDOWS, run_cases

PROMPT = [7 + i for i in range(40)]


def make(
    stores: FakeStores | None,
    groups: list[GroupBlocks] | None = None,
    depth: int = 1,
    limits: StoreLimits | None = None,
    max_model_len: int = 128,
    **options: Any,
) -> Engine:
    blocks = BlockManager(
        groups or [GroupBlocks(64)],
        BLOCK,
        prefix_caching=True,
        max_num_batched_tokens=64,
        stores=None if stores is None else limits or StoreLimits(),
    )
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "aging_limit": None}
    return Engine(
        blocks, SchedulerOptions(**{**defaults, **options}), max_model_len, max_in_flight=depth, stores=stores
    )


def filled(groups: list[GroupBlocks] | None = None, prompt: list[int] = PROMPT) -> FakeStores:
    """Stores after an engine that has computed a prompt."""
    stores = FakeStores(0, lossy=False)
    engine = make(stores, groups)
    engine.add(request(1, prompt, max_tokens=3))
    finish(engine)
    return stores


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [37, 40, 41])
@pytest.mark.parametrize("fetch_bytes", [1, 3, 100])
def test_another_engine_finds_a_prompt_that_was_stored(depth: int, length: int, fetch_bytes: int) -> None:
    stores = filled()
    engine = make(stores, depth=depth, limits=StoreLimits(fetch_bytes=fetch_bytes))
    answer = engine.add(request(1, PROMPT[:length] + [1] * max(0, length - 40), max_tokens=3))
    finish(engine)
    cached = {37: 36, 40: 39, 41: 40}[length]
    assert answer.group.totals.num_cached_tokens == cached
    stats = engine.scheduler.counts().stores
    assert stats is not None and stats.fetches == 1 and stats.waiting == 0
    assert stats.fetched_tokens == length // BLOCK * BLOCK == BLOCK * stores.num_placed
    assert engine.scheduler.counts().prefill_tokens == length - cached
    written = sum(len(plan.blocks_to_store) for plan in engine.plans)
    assert written <= 1, "what came from the stores is not written again"


def test_without_stores_plans_name_nothing_of_them() -> None:
    engine = make(None)
    engine.add(request(1, PROMPT, max_tokens=9))
    finish(engine)
    assert engine.scheduler.counts().stores is None and not engine.scheduler.has_writes
    for plan in engine.plans:
        assert not (plan.fetch or plan.blocks_fetched or plan.drop_fetches or plan.blocks_to_store)


def test_others_pass_a_group_that_waits_and_decodes_go_on() -> None:
    engine = make(filled())
    assert engine.worker.stores is not None
    engine.worker.stores.delay = 5
    engine.add(request(2, 3, max_tokens=30))  # less than a block
    engine.step()
    fetched = engine.add(request(1, PROMPT))
    engine.add(request(3, 3))
    for _ in range(4):
        plan = engine.step()
        assert 2 in engine.computed(plan) and 1 not in engine.computed(plan) and not plan.awaits_prepared
        assert engine.queues[0] == [1] and engine.scheduler.counts().num_waiting == 1
    assert 3 in engine.queues[1]
    while engine.queues[0]:
        engine.step()
    assert fetched.group.totals.num_cached_tokens == 39
    finish(engine)


def test_an_idle_engine_waits_for_the_fetch() -> None:
    engine = make(filled())
    assert engine.worker.stores is not None
    engine.worker.stores.delay = 1000  # but for steps that wait
    engine.add(request(1, PROMPT))
    plan = engine.step()
    assert plan.awaits_prepared and plan.fetch and not plan.seq_ids
    plan = engine.step()  # the blocks come and are used by the same step
    assert plan.blocks_fetched and plan.drop_fetches and engine.computed(plan) == {1: 1}
    finish(engine)


def test_equal_prefixes_share_a_fetch() -> None:
    stores = filled()
    engine = make(stores)
    assert engine.worker.stores is not None
    engine.worker.stores.delay = 3
    answers = [engine.add(request(group_id, [*PROMPT, group_id], max_tokens=5)) for group_id in (1, 2, 3)]
    engine.add(request(4, 3, max_tokens=30))
    finish(engine)
    assert engine.worker.stores.num_begun == 1 and stores.num_placed == 10
    assert [answer.group.totals.num_cached_tokens for answer in answers] == [40, 40, 40]


def test_a_follower_fetches_the_rest_when_its_leader_has_ended() -> None:
    engine = make(filled())
    assert engine.worker.stores is not None
    engine.worker.stores.delay = 3
    engine.add(request(1, PROMPT))
    follower = engine.add(request(2, [*PROMPT, 5]))
    engine.add(request(4, 3, max_tokens=30))
    engine.step()
    engine.abort(1)
    finish(engine)
    assert follower.group.totals.num_cached_tokens == 40 and engine.worker.stores.num_begun == 2


def test_a_prompt_is_computed_if_the_stores_do_not_answer() -> None:
    engine = make(filled(), limits=StoreLimits(patience=5.0, pause=30.0))
    assert engine.worker.stores is not None
    engine.worker.stores.delay = None
    engine.add(request(1, PROMPT, max_tokens=3))
    for _ in range(3):
        assert not engine.step().seq_ids
        engine.now += 2.0
    plan = engine.step()
    assert engine.computed(plan) == {1: 40} and plan.drop_fetches
    engine.worker.stores.delay = 0
    engine.add(request(2, [*PROMPT[::-1]], max_tokens=3))
    assert not engine.step().fetch, "the stores are left alone for a while"
    stats = engine.scheduler.counts().stores
    assert stats is not None and (stats.timeouts, stats.fetches) == (1, 1)
    finish(engine)
    engine.now += 30.0
    engine.add(request(3, 40, max_tokens=3))
    assert engine.step().fetch
    finish(engine)


def test_computing_is_chosen_where_it_is_cheaper_and_fetching_tried_again_later() -> None:
    engine = make(filled())
    assert engine.worker.stores is not None
    engine.worker.stores.seconds_per_block = 4.5 * engine.worker.seconds_per_token
    choices = []
    for group_id in range(10, 20):
        engine.add(request(group_id, PROMPT if group_id == 10 else 40, max_tokens=2))
        before = engine.worker.stores.num_begun
        finish(engine)
        choices.append(engine.worker.stores.num_begun > before)
    assert choices[:2] == [True, False] and True in choices[2:]
    stats = engine.scheduler.counts().stores
    assert stats is not None and stats.computed == choices.count(False)


def test_costs() -> None:
    cost = FetchCost()
    assert cost.is_cheaper(1000, 1, None) and cost.is_cheaper(1000, 1, 1e-3)
    cost.observe(10, 1.0)
    assert cost.is_cheaper(4, 401, 1e-3) and not cost.is_cheaper(4, 399, 1e-3)
    cost.observe(0, 0.5)
    assert not cost.is_cheaper(1, 500, 1e-3), "also a fetch that finds nothing takes time"


def test_what_the_stores_lack_is_not_asked_for_by_each_of_many() -> None:
    engine = make(FakeStores(0, lossy=False))
    assert engine.worker.stores is not None
    for group_id in range(1, 6):
        engine.add(request(group_id, [*PROMPT, group_id], max_tokens=3))
    finish(engine)
    assert engine.worker.stores.num_begun == 1


def test_short_prompts_that_come_at_once_are_looked_up_at_once() -> None:
    engine = make(FakeStores(0, lossy=False), limits=StoreLimits(fetch_bytes=12, max_fetches=2))
    for group_id in range(1, 8):
        engine.add(request(group_id, 8, max_tokens=3))  # of two blocks
    assert [len(engine.step().fetch) for _ in range(2)] == [6, 1]
    assert engine.queues[0] == [7], "computed in one step"
    finish(engine)


@pytest.mark.parametrize("window", [3, 9, 30])
def test_of_windows_the_blocks_that_the_next_token_reads_are_fetched(window: int) -> None:
    groups = [GroupBlocks(64), GroupBlocks(64, window=window)]
    stores = filled(groups)
    engine = make(stores, groups, limits=StoreLimits(fetch_bytes=4))
    answer = engine.add(request(1, [*PROMPT, 1, 2, 3, 4, 5, 6], max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 40
    in_window = 10 - (40 - window + 1) // BLOCK
    assert stores.num_placed == 10 + in_window
    asked = [key for plan in engine.plans for fetch in plan.fetch for key in fetch.blocks]
    assert len([group for group, _ in asked if group == 1]) == in_window


def test_of_windows_alone_the_blocks_behind_the_last_window_are_left_out() -> None:
    groups = [GroupBlocks(64, window=9)]
    stores = filled(groups)
    engine = make(stores, groups)
    answer = engine.add(request(1, [*PROMPT, 1, 2], max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 40 and stores.num_placed == 2


def test_plans_name_a_bounded_number_of_bytes_to_store() -> None:
    stores = FakeStores(0, lossy=False)
    engine = make(stores, limits=StoreLimits(step_bytes=3))
    engine.add(request(1, PROMPT, max_tokens=2))
    finish(engine)
    counts = [len(plan.blocks_to_store) for plan in engine.plans]
    assert max(counts) == 3 and sum(counts) == 10 == len(stores.values), "an idle engine passes the rest"
    assert counts[0] == 0, "nothing before the result is known"


def test_evicted_blocks_are_stored_first() -> None:
    stores = FakeStores(0, lossy=False)
    engine = make(stores, [GroupBlocks(12)], limits=StoreLimits(step_bytes=1), max_model_len=44)
    engine.add(request(1, 40, max_tokens=1))
    engine.step()
    engine.step()
    engine.add(request(2, 40, max_tokens=1))
    while not engine.queues[1] and engine.loop.has_work:
        plan = engine.step()
    evicted = {block for block, _ in engine.scheduler.blocks.groups[0].cache.last_evicted}
    assert len(plan.blocks_to_store) == 1 and plan.blocks_to_store[0][0] in evicted
    finish(engine)
    stats = engine.scheduler.counts().stores
    assert stats is not None and stats.lost_blocks > 0


def test_no_more_is_written_than_the_stores_take() -> None:
    engine = make(FakeStores(0, lossy=False), limits=StoreLimits(second_bytes=2.0, burst_bytes=3))
    engine.add(request(1, PROMPT, max_tokens=12))
    counts = []
    while engine.loop.has_work:
        counts.append(len(engine.step().blocks_to_store))
        engine.now += 0.5
    assert [count for count in counts if count][:8] == [3, *[1] * 7]


def test_a_reset_of_the_prefix_cache_drops_fetches_and_writes() -> None:
    stores = filled()
    engine = make(stores, limits=StoreLimits(step_bytes=1))
    assert engine.worker.stores is not None
    engine.worker.stores.delay = None
    engine.add(request(1, PROMPT, max_tokens=3))
    engine.add(request(2, 3, max_tokens=20))
    for _ in range(6):
        engine.step()
    assert engine.queues == ([1], [2], []) and engine.scheduler.has_writes
    engine.scheduler.reset_prefix_cache()
    plan = engine.step()
    assert plan.drop_fetches and not plan.blocks_to_store and engine.computed(plan) == {2: 1, 1: 40}
    finish(engine)


STATES = [GroupBlocks(64), GroupBlocks(16, window=2, state_tokens=3 * BLOCK)]


def test_of_states_the_last_checkpoint_in_the_prefix_is_fetched() -> None:
    stores = filled(STATES)
    engine = make(stores, STATES)
    answer = engine.add(request(1, [*PROMPT, 1, 2, 3], max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 9 * BLOCK
    asked = [key for plan in engine.plans for fetch in plan.fetch for key in fetch.blocks]
    assert [group for group, _ in asked] == [*[0] * 9, 1] and stores.num_placed == 10


def test_without_the_last_checkpoint_the_one_before_is_fetched() -> None:
    stores = filled(STATES)
    states = sorted((stores.ends[digest], digest) for group, digest in stores.values if group == 1)
    assert [end for end, _ in states] == [11, 23, 35]
    del stores.values[1, states[-1][1]]
    engine = make(stores, STATES)
    answer = engine.add(request(1, PROMPT, max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 6 * BLOCK


def test_states_in_memory_behind_those_of_the_stores_are_kept() -> None:
    engine = make(filled(STATES), STATES)
    engine.add(request(1, PROMPT[:38], max_tokens=3))
    finish(engine)
    placed = engine.worker.stores.stores.num_placed if engine.worker.stores is not None else 0
    answer = engine.add(request(2, [*PROMPT[:38], 1, 2, 3, 4, 5, 6], max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 38
    assert engine.worker.stores is not None and engine.worker.stores.stores.num_placed == placed


def test_of_states_alone_the_last_checkpoint_is_placed() -> None:
    groups = [GroupBlocks(16, window=2, state_tokens=BLOCK)]
    stores = filled(groups)
    engine = make(stores, groups)
    answer = engine.add(request(1, [*PROMPT, 1, 2], max_tokens=3))
    finish(engine)
    assert answer.group.totals.num_cached_tokens == 40 and stores.num_placed == 1


# Faults planted: the machine of the scheduler finds each of them.

Patch = pytest.MonkeyPatch


def a_fetched_block_may_be_taken_in_the_same_step(patch: Patch) -> None:
    patch.setattr(PendingMoves, "receive", lambda moves, block: None)


def a_block_is_stored_that_comes_with_the_same_plan(patch: Patch) -> None:
    add, add_to = StoredBlocks.add, StoredBlocks.add_to
    place = StoredBlocks.place

    def placed(stored: StoredBlocks, group: int, chain: PrefixChain, index: int, *rest: Any) -> bool:
        done = place(stored, group, chain, index, *rest)
        stored._known[group].clear()
        add(stored, group, chain.digests[index + 1])
        return done

    def named(stored: StoredBlocks, plan: StepPlan, now: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PendingMoves, "is_target", lambda moves, block: False)
            add_to(stored, plan, now)

    patch.setattr(StoredBlocks, "place", placed)
    patch.setattr(StoredBlocks, "add_to", named)


def fetched_blocks_are_taken_for_those_behind_them(patch: Patch) -> None:
    place = StoredBlocks.place

    def mutated(
        stored: StoredBlocks, group: int, chain: PrefixChain, index: int, tokens: list[int], source: tuple[int, int]
    ) -> bool:
        return place(stored, group, chain, min(index + 1, len(chain) - 1), tokens, source)

    patch.setattr(StoredBlocks, "place", mutated)


def missing_blocks_are_placed(patch: Patch) -> None:
    place_first = Fetches._place_first

    def mutated(fetches: Fetches, prefix: PrefixFetch, now: float) -> None:
        prefix.begun[0].num_found = len(prefix.begun[0].blocks)
        place_first(fetches, prefix, now)

    patch.setattr(Fetches, "_place_first", mutated)


def a_fetch_is_dropped_before_its_blocks_are_placed(patch: Patch) -> None:
    update = Fetches.update

    def mutated(fetches: Fetches, plan: StepPlan, *rest: Any) -> None:
        update(fetches, plan, *rest)
        fetches._drop += [fetch.fetch_id for p in fetches._prefixes.values() for fetch in p.begun if fetch.num_found]
        fetches.add_to(StepPlan(0))
        fetches._dropped.clear()

    patch.setattr(Fetches, "update", mutated)


def an_ended_group_leaves_its_fetch(patch: Patch) -> None:
    drop = Fetches._drop_begun

    def mutated(fetches: Fetches, prefix: PrefixFetch) -> None:
        drop(fetches, prefix)
        fetches._drop.clear()

    patch.setattr(Fetches, "_drop_begun", mutated)


def drops_of_a_failed_step_are_forgotten(patch: Patch) -> None:
    forget_all = Fetches.forget_all

    def mutated(fetches: Fetches) -> None:
        fetches._dropped.clear()
        forget_all(fetches)

    patch.setattr(Fetches, "forget_all", mutated)


def followers_are_never_released(patch: Patch) -> None:
    def mutated(fetches: Fetches, prefix: PrefixFetch) -> None:
        if prefix.group.is_held:
            fetches._set_held(prefix.group, False)

    patch.setattr(Fetches, "_release", mutated)


def a_block_is_stored_before_the_result_is_known(patch: Patch) -> None:
    add_to = StoredBlocks.add_to

    def mutated(stored: StoredBlocks, plan: StepPlan, now: float) -> None:
        add_to(stored, plan, now)
        for group in stored._groups:
            for entry in group.cache.on_device.entries():
                block, digest = entry.block, entry.digest
                if len(plan.blocks_to_store) < 2 and block not in {b for b, _ in plan.blocks_to_store}:
                    plan.blocks_to_store.append((group.device.first, digest) if block % 3 == 0 else (block, digest))

    patch.setattr(StoredBlocks, "add_to", mutated)


MUTATIONS = [
    a_fetched_block_may_be_taken_in_the_same_step,
    a_block_is_stored_that_comes_with_the_same_plan,
    fetched_blocks_are_taken_for_those_behind_them,
    missing_blocks_are_placed,
    a_fetch_is_dropped_before_its_blocks_are_placed,
    an_ended_group_leaves_its_fetch,
    drops_of_a_failed_step_are_forgotten,
    followers_are_never_released,
    a_block_is_stored_before_the_result_is_known,
]


@pytest.mark.parametrize("plant", MUTATIONS)
def test_a_planted_fault_is_found(plant: Callable[[Patch], None]) -> None:
    """By the seeds of the machines' own tests."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            for seed in range(60 if plant is a_fetched_block_may_be_taken_in_the_same_step else 0):
                run_seed(seed, 60)
            for first in (0, 1000, 2000):
                run_cases(first, 25, WITH_WINDOWS if first == 1000 else None, stores=True, images=first == 2000)
