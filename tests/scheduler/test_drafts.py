"""Drafts: a step computes several tokens of a sequence, and what is not the very token sampled there never was."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.config import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence
from octavo.speculation.drafter import DraftedSequence, Drafter
from tests.scheduler.fake_worker import (
    VOCABULARY,
    Engine,
    check_accounting,
    check_nothing_held,
    extend_print,
    print_of,
    sample,
    tokens_alone,
)

BLOCK = 4


class Guesses(Drafter):
    """Guesses right with some probability, and now and then nothing."""

    def __init__(self, seed: int, right: float) -> None:
        self._rng, self._right = random.Random(seed), right
        self.proposed = 0

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        assert isinstance(sequence, Sequence)
        context, guesses = print_of(sequence.token_ids), []
        task = sequence.group.request.task
        seed = task.sequence_seed(sequence.index) if isinstance(task, Generate) else 0
        for _ in range(min(num_tokens, self._rng.randrange(6))):
            token = sample(context, seed)
            if self._rng.random() >= self._right:
                token = (token + 1) % VOCABULARY
            guesses.append(token)
            context = extend_print(context, token)
        self.proposed += len(guesses)
        return guesses


def make(drafter: Guesses, depth: int, blocks: int = 64, **options: Any) -> Engine:
    manager = BlockManager(blocks, BLOCK, num_host_blocks=12, prefix_caching=True)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "aging_limit": None}
    return Engine(manager, SchedulerOptions(**{**defaults, **options}), 60, max_in_flight=depth, drafter=drafter)


def request(group_id: int, prompt: int, max_tokens: int, n: int = 1, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        group_id=group_id,
        prompt_token_ids=[100 * group_id + i for i in range(prompt)],
        task=Generate(SamplingParams(n=n, max_tokens=max_tokens, **params), 10 * group_id),
    )


def run(engine: Engine) -> None:
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
    check_nothing_held(engine)
    for answer in engine.answers.values():
        for index, tokens in answer.tokens.items():
            assert tokens == tokens_alone(answer.request, index, 60)


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_tokens_are_those_without_drafts(depth: int, right: float) -> None:
    for seed in range(8):
        drafter = Guesses(seed, right)
        engine = make(drafter, depth)
        sources = [request(1, 6, 30), request(2, 9, 25, n=3), request(3, 17, 20, logprobs=2), request(4, 3, 1)]
        for source in sources:
            assert isinstance(source.task, Generate)
            source.task.stop_token_ids = [3] if seed % 2 else []
            engine.add(source)
        run(engine)
        assert drafter.proposed > 0


def test_accepted_drafts_take_fewer_steps() -> None:
    steps = {}
    for right in (0.0, 1.0):
        engine = make(Guesses(1, right), 1)
        engine.add(request(1, 6, 40))
        steps[right] = engine.run()
    assert steps[1.0] < steps[0.0] == 40


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_short_of_blocks(mode: str, depth: int) -> None:
    for seed in range(8):
        engine = make(Guesses(seed, 0.6), depth, blocks=16, preemption_mode=mode)
        for group_id in range(1, 6):
            engine.add(request(group_id, 5 + group_id, 24))
        run(engine)
        assert sum(answer.num_preemptions for answer in engine.answers.values()) > 0


def test_drafts_preempt_nothing_and_fit_the_budget() -> None:
    engine = make(Guesses(2, 1.0), 1, max_num_batched_tokens=9)
    for group_id in range(1, 9):
        engine.add(request(group_id, 1, 20))
    run(engine)  # the worker checks the budget
    assert all(answer.num_preemptions == 0 for answer in engine.answers.values())


def test_an_abort_while_drafts_are_verified() -> None:
    engine = make(Guesses(3, 0.5), 2)
    engine.add(request(1, 6, 30))
    engine.add(request(2, 6, 30))
    for _ in range(3):
        engine.step()
    engine.step(lambda: engine.abort(1))
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
    check_nothing_held(engine)
