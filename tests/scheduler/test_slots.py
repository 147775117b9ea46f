"""When running sequences get the blocks for their next tokens."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.memory.kv_group import Write
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, tokens_alone

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
