"""Small scenarios that pin what the scheduler does: groups, both ways to fill a step, preemption, policies, ageing."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from octavo.core.errors import ConfigError
from octavo.core.outputs import PoolingParams
from octavo.core.plan import StepPlan
from octavo.core.request import (
    AdapterRef,
    AnyTask,
    EngineCoreRequest,
    Feature,
    Generate,
    Pool,
    RequestOptions,
    SequenceStatus,
)
from octavo.core.sampling_params import SamplingParams
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.policies import POLICIES, Policy, load_policy
from octavo.scheduler.queue import GroupQueue
from octavo.scheduler.step import Step
from tests.scheduler.builders import finish, make, request, step
from tests.scheduler.fake_preparations import adapter_options
from tests.scheduler.fake_worker import (
    Engine,
    check_accounting,
    check_nothing_held,
    print_of,
)
from tests.scheduler.lines import lines_run_by

EMBED = Pool(PoolingParams(task="embed"))


def steps_until(engine: Engine, wanted: str) -> StepPlan:
    """Steps until a plan has something in this field."""
    for _ in range(100):
        plan = engine.step()
        check_accounting(engine)
        if getattr(plan, wanted):
            return plan
    raise AssertionError(f"no {wanted} in 100 steps")


# --- groups ---------------------------------------------------------------------------------------------------------


def test_the_prompt_of_a_group_is_computed_once_and_every_sequence_has_its_first_token_with_it() -> None:
    engine = make()
    answer = engine.add(request(1, 10, n=3))
    assert step(engine) == {1: 10}
    assert {index: len(tokens) for index, tokens in answer.tokens.items()} == {0: 1, 1: 1, 2: 1}
    assert step(engine) == {1: 3}
    assert engine.scheduler.stats().prefill_tokens == 10
    finish(engine)


@pytest.mark.parametrize("budget", [4, 5, 8, 9, 64])
def test_a_prompt_in_chunks_forks_with_its_last_one(budget: int) -> None:
    engine = make(max_num_seqs=4, max_num_batched_tokens=budget)
    answer = engine.add(request(1, 9, n=3, max_tokens=4))
    finish(engine)
    assert [len(answer.tokens[i]) for i in range(3)] == [4, 4, 4]


def test_the_sequences_that_a_group_may_still_run_count_against_max_num_seqs() -> None:
    engine = make(max_num_seqs=4, max_num_batched_tokens=8)
    for group_id, n in [(1, 3), (2, 2), (3, 1)]:
        engine.add(request(group_id, 12, n=n))
    step(engine)
    assert engine.queues == ([2, 3], [1], [])  # not forked yet, but it will be three
    step(engine)
    engine.stop(1, 2)
    step(engine)
    assert engine.queues == ([3], [1, 2], [])
    finish(engine)


def test_a_group_is_preempted_and_resumed_whole_by_swap() -> None:
    engine = make(blocks=8, host=8, preemption_mode="swap")
    engine.add(request(1, 13, max_tokens=8))
    engine.add(request(2, 5, max_tokens=10, n=3))
    plan = steps_until(engine, "blocks_to_swap_out")
    assert engine.queues[2] == [2]
    assert len(plan.forget) == 3
    group = engine.answers[2].group
    assert all(engine.blocks.is_swapped(seq.seq_id) for seq in group.seqs)
    plan = steps_until(engine, "blocks_to_swap_in")
    assert [new.seq_id for new in plan.new] == group.seq_ids
    assert all(new.num_computed == len(new.token_ids) - 1 > 0 for new in plan.new)
    assert engine.computed(plan)[2] == 3
    finish(engine)


def test_a_group_is_preempted_and_resumed_whole_by_recompute_and_shares_its_prompt_again() -> None:
    engine = make(blocks=10, preemption_mode="recompute", scheduling_policy="static")
    engine.add(request(2, 8, max_tokens=12, n=3, priority=1))
    step(engine)
    step(engine)
    assert engine.blocks.state.used == 2 + 3  # the prompt is shared
    engine.add(request(1, 19, max_tokens=8))
    steps_until(engine, "forget")
    assert engine.queues == ([2], [1], [])
    while engine.queues[1] != [2]:
        engine.step()
        check_accounting(engine)
    while engine.answers[2].group.prefilling:
        engine.step()
    tables = [engine.blocks.table(seq_id) for seq_id in engine.answers[2].group.seq_ids]
    assert len(tables) == 3
    assert len({tuple(table[:2]) for table in tables}) == 1
    finish(engine)


def test_finding_what_sequences_share_does_not_compare_their_tokens() -> None:
    engine = make(blocks=600, preemption_mode="recompute", max_num_seqs=16, max_num_batched_tokens=2048)
    engine.add(request(1, 2001, n=16))
    for _ in range(6):
        step(engine)
    group = engine.answers[1].group
    assert lines_run_by(lambda: engine.scheduler._preemption.preempt(group, Step(0.0, 0))) < 16 * 15 / 2 * 2001
    shared = [seq.shared_prefix for seq in group.seqs]
    assert shared == [None] + 15 * [(group.seqs[0], 500)]
    finish(engine)


def test_beams_share_again_what_they_shared_behind_the_prompt_before_a_preemption() -> None:
    engine = make(preemption_mode="recompute")
    engine.add(request(1, 6, beams=3, max_tokens=60))
    for _ in range(40):
        step(engine)
    group, blocks = engine.answers[1].group, engine.blocks
    used = blocks.state.used
    first, second, _ = map(blocks.table, group.seq_ids)
    assert sum(a == b for a, b in zip(first, second, strict=False)) > 2, "nothing is shared behind the prompt"
    engine.scheduler._preemption.preempt(group, Step(0.0, 0))
    step(engine)
    step(engine)
    assert group.status is SequenceStatus.RUNNING
    assert blocks.state.used == used
    finish(engine)


def test_a_group_that_is_cached_completely_is_resumed_too() -> None:
    engine = make(
        max_num_seqs=2,
        prefix_caching=True,
        preemption_mode="recompute",
        scheduling_policy="static",
        priority_preemption=True,
    )
    engine.add(request(1, 8, max_tokens=3, n=2, priority=1))
    step(engine)  # each sequence has two full blocks, shared, and one token to compute
    engine.add(request(2, 3, max_tokens=1))
    assert step(engine) == {2: 3}
    assert step(engine) == {1: 2}
    finish(engine)
    assert engine.answers[1].reasons == {0: "length", 1: "length"}


def test_a_group_whose_first_sequence_has_ended_resumes_with_its_own_tokens() -> None:
    engine = make(
        blocks=16,
        prefix_caching=True,
        preemption_mode="recompute",
        scheduling_policy="static",
        priority_preemption=True,
    )
    engine.add(request(1, 4, max_tokens=30, n=2, priority=1))
    for _ in range(10):
        step(engine)
    for group_id, prompt in [(2, 45), (3, 48)]:
        engine.add(request(group_id, prompt, max_tokens=2))
        step(engine)
        assert engine.queues == ([1], [group_id], [])
        while 1 not in engine.queues[1] or engine.answers[1].group.prefilling:
            step(engine)
        engine.stop(1, 0)
        for _ in range(6):
            step(engine)
    assert engine.answers[1].group.totals.num_recomputes == 2
    finish(engine)


def test_only_the_last_block_is_copied_on_write() -> None:
    engine = make()
    engine.add(request(1, 6, n=3))
    step(engine)
    first, last = engine.blocks.table(engine.answers[1].group.seqs[0].seq_id)
    assert engine.blocks.state.used == 2
    plan = engine.step()
    assert [source for source, _ in plan.blocks_to_copy] == [last, last]  # the third writes in place
    assert engine.blocks.state.used == 1 + 3
    assert all(engine.blocks.table(s.seq_id)[0] == first for s in engine.answers[1].group.seqs)
    assert engine.step().blocks_to_copy == []
    finish(engine)


def test_nothing_is_copied_when_the_prompt_fills_its_blocks() -> None:
    engine = make()
    engine.add(request(1, 8, n=3))
    step(engine)
    assert engine.step().blocks_to_copy == []
    assert engine.blocks.state.used == 2 + 3


def test_children_of_a_prompt_that_was_found_in_the_cache_have_its_blocks() -> None:
    engine = make(prefix_caching=True)
    prompt = list(range(10))
    engine.add(request(1, prompt, max_tokens=2))
    engine.run()
    engine.add(request(2, prompt, n=3, max_tokens=6))
    assert step(engine)[2] == 2  # two blocks were found
    assert engine.answers[2].group.totals.num_cached_tokens == 8
    finish(engine)


def test_the_blocks_of_beams_that_lose_return_at_once() -> None:
    engine = make(blocks=40)
    engine.add(request(1, 6, beams=4, max_tokens=20))
    freed = False
    while engine.scheduler.has_work:
        before = set(engine.scheduler.queues.sequences)
        plan = engine.step()
        after = set(engine.scheduler.queues.sequences)
        freed |= bool(before - after) and bool(after)
        assert len(after) in (0, 4)
        assert engine.blocks.num_tables == len(after)
        check_accounting(engine)
        assert len(plan.seq_ids) in (1, 4)
    assert freed
    finish(engine)


# --- preemption -----------------------------------------------------------------------------------------------------


def fill_blocks(engine: Engine, n: int = 1) -> None:
    """Two groups that outgrow the pool together, not alone; group 2 gives way."""
    engine.add(request(1, 9, max_tokens=10))
    engine.add(request(2, 9, max_tokens=10, n=n))


@pytest.mark.parametrize(
    ("mode", "n", "move_seconds", "swapped"),
    [
        ("recompute", 1, 1e-9, False),
        ("recompute", 2, 1e-9, False),
        ("swap", 1, 1e3, True),
        ("swap", 2, 1e3, True),
        ("auto", 1, None, False),
        ("auto", 1, 1e3, False),
        ("auto", 1, 1e-9, True),
        ("auto", 2, None, True),
        ("auto", 2, 1e3, True),
        ("by_sequences", 1, 1e-9, False),
        ("by_sequences", 2, 1e3, True),
    ],
)
def test_preemption_mode(mode: str, n: int, move_seconds: float | None, swapped: bool) -> None:
    engine = make(blocks=7 if n == 1 else 8, host=16, preemption_mode=mode)
    if move_seconds is not None:
        engine.scheduler.move_cost.observe_move(1, move_seconds)
    fill_blocks(engine, n)
    steps_until(engine, "forget")
    assert engine.queues == (([], [1], [2]) if swapped else ([2], [1], []))
    finish(engine)
    stats = engine.scheduler.stats()
    assert (stats.preemptions_by_swap > 0, stats.preemptions_by_recompute > 0) == (swapped, not swapped)


def test_blocks_that_sequences_share_are_swapped_once() -> None:
    engine = make(blocks=8, host=8, preemption_mode="swap")
    engine.add(request(1, 11, max_tokens=20))
    engine.add(request(2, 8, n=3))
    step(engine)
    step(engine)
    before = {b for s in engine.answers[2].group.seqs for b in engine.blocks.table(s.seq_id)}
    assert len(before) == 2 + 3
    plan = steps_until(engine, "blocks_to_swap_out")
    assert sorted(source for source, _ in plan.blocks_to_swap_out) == sorted(before)
    plan = steps_until(engine, "blocks_to_swap_in")
    assert len(plan.blocks_to_swap_in) == len(before)
    finish(engine)


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
def test_nothing_is_swapped_in_while_something_is_swapped_out(batching: str) -> None:
    engine = make(blocks=9, host=20, preemption_mode="swap", batching=batching)
    for group_id in range(1, 6):
        engine.add(request(group_id, 5, max_tokens=12, n=1 + group_id % 2))
    finish(engine)
    swapping = [p for p in engine.plans if p.blocks_to_swap_out]
    assert swapping
    assert not any(p.blocks_to_swap_in for p in swapping)


def test_without_host_blocks_a_group_is_computed_again() -> None:
    engine = make(blocks=7, host=2, preemption_mode="swap")
    fill_blocks(engine)
    steps_until(engine, "forget")
    assert engine.queues == ([2], [1], [])
    finish(engine)
    assert engine.answers[2].group.totals.num_recomputed_tokens > 0


@pytest.mark.parametrize(("victim", "gone"), [("last", 4), ("least_computed", 3), ("most_blocks", 2)])
def test_victims(victim: str, gone: int) -> None:
    engine = make(blocks=12, preemption_victim=victim, preemption_mode="recompute")
    for group_id, prompt in [(1, 11), (2, 17), (3, 2), (4, 10)]:
        engine.add(request(group_id, prompt, max_tokens=20))
    steps_until(engine, "forget")
    assert engine.queues[0] == [gone]
    finish(engine)


# --- admission ------------------------------------------------------------------------------------------------------


def test_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    engine = make(blocks=10, watermark=0.2)
    engine.add(request(1, 4, max_tokens=2))
    engine.add(request(2, 28, max_tokens=1))
    engine.add(request(3, 36, max_tokens=1))
    assert step(engine) == {1: 4, 2: 28}  # 8 of 10 blocks
    step(engine)
    assert step(engine) == {3: 36}
    engine.add(request(4, 4, max_tokens=3))
    engine.add(request(5, 29, max_tokens=1))
    assert step(engine) == {4: 4}  # 1 + 8 of 10 blocks: later
    finish(engine)


@pytest.mark.parametrize(
    ("options", "bad", "words"),
    [
        ({}, request(1, 36, n=3), "needs at least 12 KV cache blocks, but there are 10"),
        ({"max_num_seqs": 2}, request(1, 3, n=3), "3 sequences at once, but max_num_seqs is 2"),
        (
            {"batching": "prefill_first", "max_num_batched_tokens": 8},
            request(1, 9),
            "9 tokens, but with batching=prefill_first",
        ),
    ],
)
def test_a_request_that_can_never_run_is_ignored_with_a_reason(
    options: dict[str, Any], bad: EngineCoreRequest, words: str
) -> None:
    engine = make(blocks=10, **options)
    answer = engine.add(bad)
    engine.add(request(2, 3, max_tokens=2))
    finish(engine)
    assert answer.group_reason == "ignored"
    assert words in (answer.error or "")
    assert engine.answers[2].reasons == {0: "length"}


def test_a_prompt_that_does_not_fit_yet_is_not_overtaken() -> None:
    engine = make(blocks=8)
    for group_id, prompt in [(1, 17), (2, 20), (3, 1)]:
        engine.add(request(group_id, prompt, max_tokens=4))
    assert step(engine) == {1: 17}
    assert step(engine) == {1: 1}
    finish(engine)


def test_blocks_reserved_for_partly_computed_prompts_are_not_allocated() -> None:
    engine = make(blocks=8, max_num_batched_tokens=8)
    engine.add(request(1, 24, max_tokens=1))
    engine.add(request(2, 12, max_tokens=1))
    assert [step(engine) for _ in range(4)] == [{1: 8}, {1: 8}, {1: 8}, {2: 8}]


def test_a_prompt_as_long_as_the_pool_is_admitted_with_a_cached_prefix() -> None:
    engine = make(blocks=4, prefix_caching=True)
    engine.add(request(1, [1, 2, 3, 4, 5, 6, 7], max_tokens=4))
    engine.run()
    engine.add(request(2, [1, 2, 9, *range(20, 32)], max_tokens=1))
    assert step(engine) == {2: 13}
    finish(engine)
    assert engine.answers[2].reasons == {0: "length"}


# --- mixed ----------------------------------------------------------------------------------------------------------


def test_mixed_decodes_come_first_and_prompt_chunks_fill_the_budget() -> None:
    engine = make(max_num_batched_tokens=10)
    engine.add(request(1, 4))
    assert step(engine) == {1: 4}
    engine.add(request(2, 25))
    for count in (9, 9, 7, 1):
        computed = step(engine)
        assert list(computed.items()) == [(1, 1), (2, count)]


def test_without_chunking_a_prompt_waits_until_the_budget_takes_it_whole() -> None:
    engine = make(blocks=4, max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add(request(1, 2, max_tokens=2))
    engine.add(request(2, 15, max_tokens=1))
    assert [step(engine) for _ in range(3)] == [{1: 2}, {1: 1}, {2: 15}]


def test_mixed_admits_nothing_in_a_step_that_preempts() -> None:
    engine = make(blocks=7)
    fill_blocks(engine)
    steps_until(engine, "forget")
    engine.add(request(3, 1, max_tokens=1))
    assert engine.queues == ([2, 3], [1], [])
    finish(engine)


def test_partial_prefills_are_limited() -> None:
    engine = make(max_num_batched_tokens=12, max_num_partial_prefills=2)
    for group_id in (1, 2, 3):
        engine.add(request(group_id, 5))
    assert step(engine) == {1: 5, 2: 5}
    assert step(engine) == {1: 1, 2: 1, 3: 5}


def test_short_prompts_pass_long_ones() -> None:
    engine = make(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    for group_id, prompt in [(1, 24), (2, 24), (3, 6), (4, 4)]:
        engine.add(request(group_id, prompt))
    assert step(engine) == {1: 8, 3: 6, 4: 4}  # one long prompt at once, and of it a chunk of 8
    assert step(engine) == {1: 8, 3: 1, 4: 1}
    assert step(engine) == {1: 8, 3: 1, 4: 1}
    assert step(engine) == {1: 1, 2: 8, 3: 1, 4: 1}


def test_short_prompts_pass_a_long_one_only_until_it_has_waited_too_long() -> None:
    engine = make(max_num_batched_tokens=12, long_prefill_token_threshold=8, aging_limit=10.0)
    engine.add(request(1, 40))
    engine.add(request(2, 40))
    step(engine)
    engine.now = 5.0
    engine.add(request(3, 2, arrival=5.0))
    assert step(engine) == {1: 8, 3: 2}
    engine.now = 11.0
    engine.add(request(4, 2, arrival=11.0))
    assert 4 not in step(engine)
    finish(engine)


# --- prefill first --------------------------------------------------------------------------------------------------


def test_prefill_first_takes_as_many_whole_prompts_as_the_budget_and_then_no_decodes() -> None:
    engine = make(batching="prefill_first", max_num_batched_tokens=20)
    engine.add(request(1, 4))
    assert step(engine) == {1: 4}
    for group_id, prompt in [(2, 12), (3, 8), (4, 5)]:
        engine.add(request(group_id, prompt))
    assert [step(engine) for _ in range(3)] == [{2: 12, 3: 8}, {4: 5}, {1: 1, 2: 1, 3: 1, 4: 1}]


def test_prefill_first_resumes_swapped_groups_before_new_prompts_and_only_without_preemption() -> None:
    engine = make(blocks=7, host=8, batching="prefill_first", preemption_mode="swap")
    fill_blocks(engine)
    plan = steps_until(engine, "blocks_to_swap_out")
    assert engine.queues == ([], [1], [2])
    assert not plan.blocks_to_swap_in
    engine.add(request(3, 1, max_tokens=1))
    while 2 in engine.queues[2]:
        assert 3 not in step(engine)
    assert step(engine) == {3: 1}
    finish(engine)


def test_prefill_first_does_not_end_a_prompt_that_waits_for_a_group_that_outgrows_the_pool() -> None:
    engine = make(blocks=4, batching="prefill_first")
    engine.add(request(1, 5, n=2, max_tokens=None))
    step(engine)
    engine.add(request(2, 12, max_tokens=2))
    finish(engine)
    assert engine.answers[1].group_reason == "error"
    assert engine.answers[2].reasons == {0: "length"}


def test_the_delay_factor_lets_the_waiting_queue_fill() -> None:
    engine = make(batching="prefill_first", scheduler_delay_factor=2.0)

    def pass_time() -> None:
        engine.now += 1.0

    engine.add(request(1, 4))
    engine.step(pass_time)  # a prompt step takes a second
    engine.now = 100.0
    engine.add(request(2, 4, arrival=100.0))
    assert step(engine) == {1: 1}
    engine.now = 102.0
    engine.add(request(3, 4, arrival=102.0))
    assert step(engine) == {1: 1}
    engine.now = 102.1
    assert step(engine) == {2: 4, 3: 4}


@pytest.mark.parametrize("policy", ["fcfs", "lcfs", "sjf", "ldf", "static"])
def test_the_delay_is_that_of_the_earliest_arrival_under_every_policy(policy: str) -> None:
    engine = make(batching="prefill_first", scheduler_delay_factor=2.0, scheduling_policy=policy)

    def pass_time() -> None:
        engine.now += 1.0

    engine.add(request(1, 2, max_tokens=40))
    engine.step(pass_time)  # a prompt step takes a second
    for group_id in range(2, 30):  # each arrives before the one before it has waited for two
        engine.now += 1.0
        engine.add(request(group_id, 2, max_tokens=2, arrival=engine.now, priority=-group_id))
        step(engine)
    assert len(engine.queues[0]) <= 3


def test_the_delay_ends_when_nothing_runs() -> None:
    engine = make(batching="prefill_first", scheduler_delay_factor=1e6)
    engine.add(request(1, 4, max_tokens=1))
    engine.step()
    engine.add(request(2, 4))
    assert step(engine) == {2: 4}


# --- policies -------------------------------------------------------------------------------------------------------


class LongestPromptFirst(Policy):
    """A policy of a user's own."""

    def key(self, group: SequenceGroup) -> int:
        return -len(group.request.prompt_token_ids)


ORDERS = [
    ("fcfs", [1, 2, 3]),
    ("static", [2, 3, 1]),
    ("sjf", [3, 1, 2]),
    ("ldf", [2, 1, 3]),
    ("lcfs", [3, 2, 1]),
    (f"{__name__}:LongestPromptFirst", [2, 1, 3]),
]
#: Group id, prompt, max_tokens, priority.
TRAFFIC = [(1, 6, 12, 5), (2, 8, 14, 1), (3, 5, 10, 3)]


def traffic(engine: Engine, group_id: int) -> EngineCoreRequest:
    _, prompt, max_tokens, priority = TRAFFIC[group_id - 1]
    return request(group_id, prompt, max_tokens, priority=priority, arrival=engine.now)


@pytest.mark.parametrize(("policy", "order"), ORDERS)
def test_policies_order_admission(policy: str, order: list[int]) -> None:
    engine = make(max_num_seqs=1, scheduling_policy=policy)
    for group_id in (1, 2, 3):
        engine.add(traffic(engine, group_id))
    seen: list[int] = []
    while engine.scheduler.has_work:
        seen += [g for g in step(engine) if g not in seen]
    assert seen == order


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("policy", "order"), ORDERS)
def test_policies_order_preemption_and_resumption(batching: str, mode: str, policy: str, order: list[int]) -> None:
    engine = make(blocks=7, host=8, scheduling_policy=policy, preemption_mode=mode, batching=batching)
    for group_id in (1, 2, 3):
        engine.add(traffic(engine, group_id))
    step(engine)
    assert engine.queues[1] == order
    gone: list[int] = []
    back: list[int] = []
    while engine.scheduler.has_work:
        before = engine.queues[1]
        step(engine)
        after = engine.queues[1]
        gone += [g for g in before[::-1] if g not in after and not engine.answers[g].finished]
        back += [g for g in after if g not in before]
    assert gone[0] == order[-1]
    assert len(gone) < 2 or gone[1] in order[1:]
    assert [g for g in order if g in back] == back[: len(set(back))]
    finish(engine)


def test_ldf_keeps_the_group_with_the_most_tokens() -> None:
    engine = make(blocks=8, scheduling_policy="ldf", preemption_mode="recompute")
    engine.add(request(1, 5, max_tokens=15))
    engine.add(request(2, 17, max_tokens=12))
    step(engine)
    steps_until(engine, "forget")
    assert engine.queues == ([1], [2], [])
    finish(engine)


def test_ldf_counts_tokens_of_prompt_and_output_wherever_the_group_is() -> None:
    engine = make(blocks=9, host=8, scheduling_policy="ldf", preemption_mode="recompute", max_num_seqs=2)
    engine.add(request(1, 13, max_tokens=20))
    engine.add(request(2, 11, max_tokens=20))
    steps_until(engine, "forget")
    assert engine.queues == ([2], [1], [])
    held = len(engine.answers[2].group.seqs[0].token_ids)
    engine.add(request(3, held - 1, max_tokens=2))
    engine.add(request(4, held + 1, max_tokens=2))
    order: list[int] = []
    while engine.scheduler.has_work:
        order += [g for g in step(engine) if g not in order]
    assert order == [1, 4, 2, 3]
    finish(engine)


def test_ldf_counts_a_shared_prompt_once() -> None:
    engine = make(scheduling_policy="ldf")
    engine.add(request(1, 8, n=4))
    engine.add(request(2, 20))
    step(engine)
    step(engine)
    assert engine.queues[1] == [2, 1]


def test_requests_are_ordered_by_their_arrival_times() -> None:
    for policy, expected in [("fcfs", [2, 1, 3]), ("lcfs", [3, 1, 2])]:
        engine = make(max_num_seqs=1, scheduling_policy=policy)
        engine.now = 10.0
        for group_id, arrival in [(1, 5.0), (2, 4.0), (3, 5.0)]:
            engine.add(request(group_id, 4, max_tokens=1, arrival=arrival))
        assert [g for _ in range(3) for g in step(engine)] == expected


def test_a_policy_that_does_not_exist_is_refused() -> None:
    for name, words in [
        ("fifo", "known: fcfs, static, sjf, ldf, lcfs"),
        ("no.such:Policy", "cannot be imported"),
        ("octavo.core.errors:ConfigError", "not a class derived from"),
        ("octavo.core.errors:Nothing", "cannot be imported"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_policy(name)


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_preemption_needs_a_policy_that_looks_at_priorities(policy: str) -> None:
    options = {"scheduling_policy": policy, "priority_preemption": True}
    if POLICIES[policy].uses_priority:
        make(**options)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match="looks at priorities"):
            make(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
def test_priority_preemption(batching: str) -> None:
    options = {"blocks": 8, "scheduling_policy": "static", "preemption_mode": "recompute", "batching": batching}
    for allowed in (False, True):
        engine = make(**options, priority_preemption=allowed)  # type: ignore[arg-type]
        engine.add(request(1, 13, priority=3, max_tokens=8))
        engine.add(request(2, 9, priority=4, max_tokens=8))
        step(engine)
        engine.add(request(3, 13, priority=4, max_tokens=2))
        step(engine)
        assert engine.queues[0] == [3]  # of equal priority: it waits
        engine.add(request(4, 13, priority=1, max_tokens=2))
        computed = step(engine)
        assert (4 in computed) == allowed
        assert engine.queues[0] == ([2, 3] if allowed else [3, 4])
        finish(engine)


# --- ageing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lcfs", "sjf", "ldf", "static"])
def test_after_the_ageing_limit_no_later_arrival_is_admitted_first(policy: str) -> None:
    for limit, expected in [(None, False), (10.0, True)]:
        engine = make(max_num_seqs=1, scheduling_policy=policy, aging_limit=limit)
        engine.add(request(1, 1, max_tokens=30, priority=9))
        for group_id in range(2, 40):
            engine.now += 1.0
            engine.add(request(group_id, 2, max_tokens=1, arrival=engine.now))
            step(engine)
        assert (1 in engine.queues[1] or engine.answers[1].finished) == expected
        finish(engine)


def test_an_aged_group_is_kept_running_and_resumed_before_later_ones() -> None:
    engine = make(blocks=7, host=8, scheduling_policy="lcfs", preemption_mode="swap", aging_limit=5.0)
    engine.add(request(1, 9, max_tokens=14))
    engine.add(request(2, 9, max_tokens=14))
    steps_until(engine, "blocks_to_swap_out")
    assert engine.queues == ([], [2], [1])  # the latest goes first
    engine.now = 6.0
    engine.add(request(3, 1, arrival=6.0, max_tokens=12))
    while 1 not in engine.queues[1]:
        computed = step(engine)
        assert 3 not in computed or 1 in computed
    while engine.scheduler.has_work:
        step(engine)
        assert engine.answers[1].finished or 1 in engine.queues[1]
    finish(engine)


def test_prefill_first_admits_an_aged_prompt_before_later_groups_resume() -> None:
    engine = make(
        blocks=8, host=8, batching="prefill_first", scheduling_policy="static", preemption_mode="swap", aging_limit=5.0
    )
    engine.add(request(1, 22, priority=9, max_tokens=2))
    engine.add(request(2, 9, max_tokens=14))
    engine.add(request(3, 9, max_tokens=14))
    steps_until(engine, "blocks_to_swap_out")
    assert engine.queues == ([1], [2], [3])
    engine.now = 6.0
    while 1 in engine.queues[0]:
        assert engine.queues[2] == [3]
        step(engine)
    finish(engine)


def test_a_queue_drops_entries_of_groups_removed_from_its_middle() -> None:
    policy = load_policy("sjf")
    queue = GroupQueue(policy, 60.0, lambda group: [], lambda group: (policy.key(group),))
    groups = [SequenceGroup(request(i, 3, max_tokens=1 + i), i, i, 1000) for i in range(500)]
    for group in groups:
        queue.push(group)
    before = sys.getrefcount(groups[300])
    for group in groups[1:]:
        queue.remove(group)
    assert sys.getrefcount(groups[300]) < before
    assert len(queue) == 1
    assert queue.peek(0.0) is groups[0]


# --- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_prefix_that_was_computed_is_found_counted_and_separated_by_salt() -> None:
    engine = make(prefix_caching=True)
    prompt = list(range(14))
    for group_id, salt, found in [(1, "", 0), (2, "", 13), (3, "x", 0), (4, "x", 13), (5, "", 13)]:
        engine.add(request(group_id, prompt, max_tokens=3, salt=salt))
        engine.run()
        assert engine.answers[group_id].group.totals.num_cached_tokens == found
    stats = engine.scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (5 * 14, 3 * 13)
    assert stats.blocks_cached > 0
    finish(engine)


def test_equal_placeholders_of_different_features_or_adapters_share_nothing() -> None:
    engine = make(prefix_caching=True, adapters=adapter_options(1))
    prompt = [1, 2, *[7] * 9, 3, 4, 5]

    def found(**what: Any) -> int:
        source = request(len(engine.answers), prompt, max_tokens=3)
        engine.add(msgspec.structs.replace(source, **what))
        engine.run()
        return engine.answers[source.group_id].group.totals.num_cached_tokens

    adapter = AdapterRef("a", "a", "a", 0)
    cat, dog, late = Feature(2, 9, b"cat"), Feature(2, 9, b"dog"), Feature(6, 5, b"cat")
    assert found() == 0
    assert found(features=[cat]) == 2, "the tokens before it"
    assert found(features=[dog]) == 2
    assert found(features=[cat]) == 13
    assert found(features=[Feature(2, 9, b"dog", image="a dog")]) == 13, "the key names the content"
    assert found(features=[late]) == 6, "the tokens before it, as of the first request"
    assert found(adapter=adapter, features=[dog]) == 0
    assert found(adapter=adapter, options=RequestOptions(cache_salt="x"), features=[dog]) == 0
    assert found(adapter=adapter, features=[dog]) == found() == 13


def test_salts_and_adapters_have_one_name_for_each_pair() -> None:
    texts = ["", "a", "/", "/a", "1:a", "0:", "\ud800", "a/a", "1:a/a"]
    adapters = [None, *(AdapterRef(text, "a", "a", 8) for text in texts)]
    pairs = [(salt, adapter) for salt in texts for adapter in adapters]
    plain = request(1, 1)
    requests = [msgspec.structs.replace(plain, options=RequestOptions(cache_salt=s), adapter=a) for s, a in pairs]
    contexts = {request.cache_context for request in requests}
    assert len(contexts) == len(pairs)


@pytest.mark.parametrize("length", [1, 4, 9, 10, 40])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_task_without_sampling_ends_when_its_prompt_is_computed(depth: int, length: int) -> None:
    engine = make(blocks=10, max_num_seqs=4, max_num_batched_tokens=5, depth=depth)
    tasks: list[AnyTask] = [Generate(SamplingParams(n=3, max_tokens=0), 0), EMBED]
    for group_id, task in enumerate(tasks, start=1):
        source = request(group_id, length)
        source.task = task
        answer = engine.add(source)
        computed = 0
        while engine.scheduler.has_work:
            assert not answer.finished
            computed += sum(engine.computed(engine.step()).values())
            check_accounting(engine)
        assert computed == length, "every token once, and none after them"
        assert (answer.group_reason, answer.tokens, answer.error) == ("length", {}, None)
    assert answer.pooled == b"%d" % print_of(answer.request.prompt_token_ids)
    check_nothing_held(engine)


def test_prompts_alone_among_others_short_of_blocks() -> None:
    engine = make(blocks=10, host=8, depth=2, max_num_batched_tokens=12, prefix_caching=True)
    for group_id in range(1, 9):
        source = request(group_id, 3 + 3 * group_id, max_tokens=0 if group_id % 3 else 9)
        if group_id % 3 == 1:
            source.task = EMBED
        engine.add(source)
    finish(engine)
    assert [a.group_reason for a in engine.answers.values()] == ["length", "length", None] * 2 + ["length"] * 2
    for group_id in (1, 4, 7):
        answer = engine.answers[group_id]
        assert answer.pooled == b"%d" % print_of(answer.request.prompt_token_ids)


def test_with_prompt_logprobs_the_whole_prompt_is_computed() -> None:
    engine = make(prefix_caching=True)
    for group_id in (1, 2):
        engine.add(request(group_id, list(range(9)), max_tokens=2, prompt_logprobs=1))
        assert step(engine) == {group_id: 9}
        engine.run()


def test_preempted_groups_find_their_blocks_again() -> None:
    engine = make(blocks=7, prefix_caching=True, preemption_mode="recompute")
    fill_blocks(engine)
    steps_until(engine, "forget")
    finish(engine)
    computed = sum(p.total_tokens for p in engine.plans)
    assert computed < 2 * (9 + 9) + engine.answers[2].group.totals.num_recomputed_tokens


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("during", [False, True])
def test_aborts_in_any_state_free_everything_at_once(during: bool) -> None:
    engine = make(blocks=10, host=10, preemption_mode="swap", max_num_batched_tokens=12)
    engine.add(request(1, 6, max_tokens=30))
    engine.add(request(2, 6, max_tokens=30, n=3))
    steps_until(engine, "blocks_to_swap_out")
    engine.add(request(3, 13))
    engine.add(request(4, 3))
    assert engine.queues == ([3, 4], [1], [2])

    def abort_all() -> None:
        for group_id in (1, 2, 3, 4):
            engine.abort(group_id)
            engine.abort(group_id)
        check_accounting(engine)
        assert engine.blocks.state.used == engine.blocks.state.host_used == 0

    if during:
        engine.step(abort_all)
    else:
        abort_all()
    assert not engine.scheduler.has_work
    check_nothing_held(engine)


def test_an_abort_while_the_prompt_forks() -> None:
    engine = make()
    engine.add(request(1, 6, n=3))
    engine.step(lambda: engine.abort(1))
    check_nothing_held(engine)
    engine.add(request(2, 6, n=3, max_tokens=4))
    engine.step()
    engine.step(lambda: engine.stop(2, 0))
    check_accounting(engine)
    finish(engine)


def test_a_group_that_outgrows_the_pool_alone_ends_with_an_error_and_the_others_go_on() -> None:
    engine = make(blocks=6, host=6)
    answer = engine.add(request(1, 5, n=4, max_tokens=None))
    engine.add(request(2, 9, max_tokens=4))
    finish(engine)
    assert answer.group_reason == "error"
    assert "4 sequences of 9 to 9 tokens have outgrown the KV cache of 6 blocks of 4 tokens" in (answer.error or "")
    assert engine.answers[2].reasons == {0: "length"}


def test_after_a_failed_step_groups_whose_blocks_it_moved_are_computed_again() -> None:
    engine = make(blocks=7, host=8, preemption_mode="swap")
    fill_blocks(engine)
    engine.add(request(3, 6, max_tokens=2))
    step(engine)
    while len(engine.answers[1].group.seqs[0].token_ids) < 13:
        step(engine)
    engine.step(fail="before moving")
    assert engine.answers[2].group.totals.num_swaps == 1 and not engine.blocks.num_tables
    finish(engine)
    assert all(engine.answers[i].reasons == {0: "length"} for i in (1, 2, 3))
