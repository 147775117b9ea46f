"""KV groups with an attention window, under the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.kv_spec import GroupBlocks, window_blocks
from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import common_prefix
from octavo.scheduler.step import Step
from tests.scheduler.fake_worker import Answer, Engine, check_accounting, check_nothing_held, tokens_alone

WINDOW, SIZE = 8, 2
ONE = window_blocks(WINDOW, SIZE)


def make_engine(*groups: tuple[int, int | None], budget: int = 16, max_model_len: int = 500, **settings: Any) -> Engine:
    """Groups by their blocks and windows."""
    caching = settings.pop("prefix_caching", False)
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=budget, **settings)
    blocks = BlockManager(
        [GroupBlocks(count, 200, window) for count, window in groups],
        SIZE,
        max_num_batched_tokens=budget,
        cuts_prompts=options.cuts_prompts,
        prefix_caching=caching,
    )
    return Engine(blocks, options, max_model_len)


def add(engine: Engine, group_id: int, prompt: int, max_tokens: int, n: int = 1) -> Answer:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
    tokens = [1 + (group_id * i) % 7 for i in range(prompt)]
    return engine.add(EngineCoreRequest(group_id=group_id, prompt_token_ids=tokens, task=Generate(params, group_id)))


def check_answers(engine: Engine, *answers: Answer) -> None:
    for answer in answers:
        for index in range(answer.request.task.num_sequences):
            assert answer.tokens[index] == tokens_alone(answer.request, index, engine.max_model_len)
    check_nothing_held(engine)


@pytest.mark.parametrize("blocks", [ONE + 1, ONE + 3, ONE + 8, 2 * ONE])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_prompt_far_longer_than_the_blocks_is_computed_in_chunks(blocks: int, prefix_caching: bool) -> None:
    engine = make_engine((blocks, WINDOW), prefix_caching=prefix_caching)
    answer = add(engine, 3, 400, 60)
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
    assert answer.num_preemptions == 0
    check_answers(engine, answer)


def test_a_long_prompt_is_admitted_beside_many_short_ones_if_its_window_fits() -> None:
    """Its window and a chunk are free, though not the windows of as many sequences as run."""
    engine = make_engine((400, None), (3 * ONE + 8, WINDOW))
    assert engine.blocks.groups[1].max_window_seqs == 3
    short = [add(engine, i, 2, 2) for i in range(1, 6)]
    long = add(engine, 7, 200, 9)
    engine.step()
    assert 7 in engine.queues[1], "admitted with the others"
    engine.run()
    assert sum(answer.num_preemptions for answer in (*short, long)) == 0
    check_answers(engine, *short, long)


def test_no_more_long_sequences_run_than_have_windows_and_a_chunk() -> None:
    engine = make_engine((1000, None), (3 * ONE + 8, WINDOW))
    answers = [add(engine, i, 60 + 9 * i, 40) for i in range(1, 7)]
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
        most = max(most, len(engine.queues[1]))
    assert 3 <= most < 6
    assert sum(answer.num_preemptions for answer in answers) == 0
    check_answers(engine, *answers)


def test_what_a_chunk_leaves_behind_the_window_is_no_reason_to_preempt() -> None:
    """Each of three has just computed a chunk of 8 blocks; each then needs a block that only these can give."""
    engine = make_engine((1000, None), (3 * ONE + 8, WINDOW), budget=16)
    answers = [add(engine, i, 16, 30) for i in (1, 2, 3)]
    engine.run()
    assert sum(answer.num_preemptions for answer in answers) == 0
    check_answers(engine, *answers)


def test_a_swapped_group_needs_what_it_held() -> None:
    """It comes back beside others when its window fits, not its length."""
    engine = make_engine((200, None), (2 * ONE + 8, WINDOW), preemption_mode="swap", max_model_len=200)
    first, second = add(engine, 1, 100, 30), add(engine, 2, 100, 30)
    for _ in range(16):
        engine.step()
    engine.scheduler._preemption.preempt(second.group, Step(0.0, 0))
    assert engine.blocks.blocks_to_swap_in(second.group.seq_ids)[1] <= ONE
    engine.step()
    engine.step()
    assert 2 in engine.queues[1]
    engine.run()
    assert second.group.totals.num_swaps == 1
    check_answers(engine, first, second)


def test_the_cost_of_swapping_counts_all_groups() -> None:
    blocks = BlockManager(
        [GroupBlocks(40, 40, None, 1), GroupBlocks(40, 40, WINDOW, 1000)], SIZE, max_num_batched_tokens=64
    )
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=64, preemption_mode="auto")
    engine = Engine(blocks, options, max_model_len=60)
    cost = engine.scheduler.move_cost
    cost.observe_move(1001, 1001.0)
    answer = add(engine, 1, 20, 9)
    engine.step()
    engine.step()
    held = 11 + 1000 * 5
    for seconds_a_token, cheaper in ((2.01 * held / 21, True), (1.99 * held / 21, False)):
        cost.seconds_per_token = seconds_a_token
        assert engine.scheduler._preemption._wants_swap(answer.group) == cheaper
    engine.run()
    check_answers(engine, answer)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_group_is_refused_only_if_its_prompt_cannot_be_computed(samples: int) -> None:
    """Samples share the window at the prompt's end, and each has a block of its own."""
    blocks = ONE + samples
    engine = make_engine((1000, None), (blocks, WINDOW))
    answer = add(engine, 1, 101, 1, n=samples)
    engine.run()
    assert answer.error is None
    check_answers(engine, answer)
    smaller = make_engine((1000, None), (blocks - 1, WINDOW), max_model_len=2 * blocks - 2)
    refused = add(smaller, 1, 2 * blocks - 3, 1, n=samples + 1)
    smaller.run()
    assert refused.group_reason == "ignored"


def test_whole_prompts_need_blocks_for_all_their_tokens() -> None:
    engine = make_engine((40, WINDOW), budget=200, max_model_len=80, batching="prefill_first")
    fits, too_long = add(engine, 1, 76, 3), add(engine, 2, 79, 1)
    engine.run()
    check_answers(engine, fits, too_long)
    with pytest.raises(ValueError, match="max_model_len 82 does not fit 40 blocks"):
        make_engine((40, WINDOW), budget=200, max_model_len=82, batching="prefill_first")


def test_a_refusal_names_the_states_that_are_too_few() -> None:
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=8)
    blocks = BlockManager([GroupBlocks(400), GroupBlocks(6, window=2, state_tokens=4)], 2, max_num_batched_tokens=8)
    engine = Engine(blocks, options, max_model_len=20)
    answer = add(engine, 1, 12, 4, n=5)
    engine.run()
    assert answer.group_reason == "ignored"
    assert "needs at least 8 recurrent states at once, but the KV cache has 6" in (answer.error or "")


@pytest.mark.parametrize(("prompt", "shared"), [(21, 20), (20, 20), (3, 0)])
def test_recomputed_sequences_share_up_to_a_checkpoint_of_their_states(prompt: int, shared: int) -> None:
    """A state is known only there: what follows is computed for each of them."""
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=8, preemption_mode="recompute")
    blocks = BlockManager([GroupBlocks(80), GroupBlocks(40, window=2, state_tokens=4)], 1, max_num_batched_tokens=8)
    engine = Engine(blocks, options, max_model_len=40)
    answer = add(engine, 1, prompt, 12, n=2)
    while len(answer.group.seqs) < 2:
        engine.step()
    first, second = answer.group.seqs
    assert first.num_computed == prompt
    engine.scheduler._preemption.preempt(answer.group, Step(0.0, 0))
    assert second.shared_prefix == ((first, shared) if shared else None)
    before = len(engine.plans)
    engine.run()
    computed = sum(plan.total_tokens for plan in engine.plans[before:])
    assert computed == (prompt + 12 - 1) * 2 - shared
    check_answers(engine, answer)
    check_nothing_held(engine)


def test_recomputed_sequences_share_only_blocks_of_equal_tokens_though_the_window_has_passed_them() -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=8, preemption_mode="recompute")
    blocks = BlockManager([GroupBlocks(40, window=2)], 1, max_num_batched_tokens=8)
    engine = Engine(blocks, options, max_model_len=40)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    request = EngineCoreRequest(group_id=1, prompt_token_ids=[1, 2, 3, 4], task=Generate(params, 3))
    answer = engine.add(request)
    for _ in range(12):
        engine.step()
    first, second = answer.group.seqs
    alike = common_prefix(first.token_ids, second.token_ids)
    assert alike < first.num_computed - 4, "they differ before the window"
    engine.scheduler._preemption.preempt(answer.group, Step(0.0, 0))
    assert second.shared_prefix == (first, alike)
    engine.run()
    assert answer.tokens == {index: tokens_alone(request, index, 40) for index in (0, 1)}
    assert answer.reasons == {0: "length", 1: "length"}
    check_nothing_held(engine)
