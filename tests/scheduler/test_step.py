"""Steady decodes, and the blocks for the next tokens of running sequences."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.plan import StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import Write
from octavo.scheduler.scheduler import Scheduler
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, tokens_alone
from tests.scheduler.lines import lines_run_by


def request(
    number: int, prompt: int, max_tokens: int | None = None, stops: list[int] | None = None
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=not stops)
    tokens = [1 + (number + position) % 11 for position in range(prompt)]
    task = Generate(params, seed=number, stop_token_ids=stops or [])
    return EngineCoreRequest(group_id=number, prompt_token_ids=tokens, task=task)


def engine_for(
    sequences: int, block_size: int, length: int, *, num_blocks: int | None = None, depth: int = 1
) -> Engine:
    blocks = BlockManager(num_blocks or sequences * (1 + -(-length // block_size)), block_size, prefix_caching=True)
    options = SchedulerOptions(max_num_seqs=sequences, max_num_batched_tokens=sequences * length)
    return Engine(blocks, options, length, max_in_flight=depth)


def check_answers(engine: Engine) -> None:
    check_nothing_held(engine)
    for answer in engine.answers.values():
        assert answer.tokens == {0: tokens_alone(answer.request, 0, engine.max_model_len)}


def lines_of_a_decode(running: int) -> int:
    """Lines of Python that a step runs in which each of so many sequences computes a token, and none fills a block."""
    blocks = BlockManager(4 * running, 16, prefix_caching=True)
    options = SchedulerOptions(max_num_seqs=running, max_num_batched_tokens=8 * running)
    scheduler = Scheduler(blocks, options, 48)
    for number in range(running):
        scheduler.add(request(number, 8, stops=[0]))
    lines = 0

    def step() -> None:
        plan = scheduler.schedule()
        assert len(plan.seq_ids) == running
        scheduler.update(plan, StepResult(plan.step, list(plan.seq_ids), [5] * running))

    for _ in range(4):
        lines = lines_run_by(step)
    return lines


def test_a_decode_without_a_new_block_costs_four_lines() -> None:
    """It is counted as computed, and its token is appended: nothing is asked for features that no request uses."""
    assert lines_of_a_decode(80) - lines_of_a_decode(16) <= 4 * 64 + 4


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_with_more_slots_than_a_byte_can_say(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(3, 300, 700, depth=depth)
    for number in range(3):
        engine.add(request(number, 1 + number, max_tokens=620 + number))
    engine.step()
    writes: list[Write] = []
    grow = engine.blocks.grow

    def recording(new: list[Write], *others: Any) -> object:
        writes.extend(new)
        return grow(new, *others)

    monkeypatch.setattr(engine.blocks, "grow", recording)
    while engine.scheduler.has_work:
        engine.step()
    assert sorted(computed for _, computed, _ in writes) == 3 * [300] + 3 * [600]
    check_answers(engine)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_that_ends_one_sequence_is_like_any_other_for_the_rest(depth: int) -> None:
    engine = engine_for(12, 4, 60, depth=depth)
    for number in range(12):
        stops = [[0], [3, 4], [], [0, number]][number % 4]
        engine.add(request(number, 3 + number, max_tokens=[None, 7, 30][number % 3], stops=stops))
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
    reasons = {reason for answer in engine.answers.values() for reason in answer.reasons.values()}
    assert reasons == {"stop", "length"}
    check_answers(engine)


def test_steady_sequences_preempt_one_another_where_blocks_are_short() -> None:
    engine = engine_for(6, 4, 24, num_blocks=14)
    for number in range(6):
        engine.add(request(number, 3, max_tokens=16))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
        most = max(most, engine.scheduler.queues.steady.num_groups)
    assert most >= 3 and engine.scheduler.stats().preemptions_by_recompute > 0
    check_answers(engine)


# When running sequences get the blocks for their next tokens.

BLOCK = 4
SEQUENCES = 6


@pytest.mark.parametrize(("num_blocks", "at_once"), [(64, True), (15, False)])
def test_blocks_of_a_step_are_taken_at_once_where_there_are_enough(
    num_blocks: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = BlockManager(num_blocks, BLOCK)
    engine = Engine(blocks, SchedulerOptions(max_num_seqs=SEQUENCES, max_num_batched_tokens=64), 24)
    requests = [
        EngineCoreRequest(
            group_id=i,
            prompt_token_ids=[1 + i, 2, 3],
            task=Generate(SamplingParams(max_tokens=16, ignore_eos=True), seed=i),
        )
        for i in range(SEQUENCES)
    ]
    calls: list[int] = []
    grow = blocks.grow

    def counting(writes: list[Write], *others: Any) -> object:
        calls.append(len(writes))
        return grow(writes, *others)

    answers = [engine.add(request) for request in requests]
    engine.step()  # the prompts
    monkeypatch.setattr(blocks, "grow", counting)
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        check_accounting(engine)
    if at_once:  # all prompts are equally long, so that all sequences reach the end of a block in the same step
        assert set(calls) == {SEQUENCES} and len(calls) <= -(-steps // BLOCK) + 1
    else:
        assert engine.scheduler.stats().preemptions_by_recompute > 0
    check_nothing_held(engine)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == {0: tokens_alone(request, 0, 24)}
