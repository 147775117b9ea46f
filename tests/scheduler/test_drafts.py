"""Drafts: a step computes several tokens of a sequence, and what is not the very token sampled there never was."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.failures import NO_TOKEN_LEFT, SequenceFailure
from octavo.core.plan import SequenceOutput, SequenceResult, StepResult
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.groups import Sequence
from octavo.speculation.drafter import DraftedSequence, Drafter, DraftsOnWorkers
from octavo.speculation.speculator import Waiting
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


class Failing(Guesses):
    """Fails now and then, also at the end of a sequence."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        if self._rng.random() < 0.2:
            raise RuntimeError("no idea")
        return super().propose(sequence, num_tokens)

    def on_end(self, sequence: DraftedSequence) -> None:
        raise RuntimeError("it has ended")


def make(drafter: Drafter | None, depth: int, blocks: int = 64, adaptive: bool = False, **options: Any) -> Engine:
    manager = BlockManager(blocks, BLOCK, num_host_blocks=12, prefix_caching=True)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "aging_limit": None}
    return Engine(
        manager,
        SchedulerOptions(**{**defaults, **options}),
        60,
        max_in_flight=depth,
        drafter=drafter,
        adaptive=adaptive,
    )


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
        if engine.worker.max_in_flight == 1:
            check_blocks_are_given_back(engine)
    check_nothing_held(engine)
    for answer in engine.answers.values():
        for index, tokens in answer.tokens.items():
            assert tokens == tokens_alone(answer.request, index, 60)


def check_blocks_are_given_back(engine: Engine) -> None:
    """Decoding sequences hold the blocks of what they have computed, and none behind them."""
    for group in engine.scheduler.queues.running:
        for seq in group.seqs:
            held = len(engine.blocks.table(seq.seq_id))
            assert group.prefilling or held == engine.blocks.blocks_for(seq.num_computed)


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


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_drafter_that_fails_is_logged_once_and_its_requests_go_on(
    batching: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Failing(4, 0.8)
    engine = make(drafter, depth, batching=batching)
    for group_id in range(1, 7):
        engine.add(request(group_id, 4 + group_id, 20, n=1 + group_id % 2))
    run(engine)
    assert drafter.proposed > 0
    assert [r.message for r in caplog.records] == ["drafter Failing failed; such requests go on without drafts"]
    stats = engine.scheduler.stats().speculation
    assert stats is not None and 0 < stats.failures <= 9


@pytest.mark.parametrize("depth", [1, 2])
def test_adaptive_lengths_change_no_answer(depth: int) -> None:
    for seed in range(4):
        engine = make(Guesses(seed, 0.5), depth, adaptive=True, blocks=24)
        for group_id in range(1, 9):
            engine.add(request(group_id, 3 + 2 * group_id, 22, n=1 + group_id % 3))
        run(engine)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_steps_run_ahead_where_drafts_bring_nothing(depth: int, right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[bool] = []
    observe = Waiting.observe

    def counted(self: Waiting, waited: bool, accepted: float, idle: float) -> None:
        ahead.append(not waited)
        observe(self, waited, accepted, idle)

    monkeypatch.setattr(Waiting, "observe", counted)
    drafter = Guesses(1, right)
    engine = make(drafter, depth, adaptive=True, blocks=200, max_num_batched_tokens=60)
    engine.worker.seconds_per_step = 10.0
    for group_id in range(1, 5):
        engine.add(request(group_id, 5, 54, n=1 + group_id % 3))
    run(engine)
    assert drafter.proposed > 0
    if right:
        assert sum(ahead) < 0.3 * len(ahead)
    else:
        assert sum(ahead) > 0.3 * len(ahead)


def test_chunks_of_prompts_leave_room_to_drafts() -> None:
    drafter = Guesses(1, 1.0)
    engine = make(drafter, 1, adaptive=True, blocks=200, max_num_batched_tokens=48)
    engine.worker.seconds_per_step = 10.0
    for group_id in range(1, 3):
        engine.add(request(group_id, 5, 54))
    for _ in range(12):
        engine.step()
    for group_id in range(3, 8):
        engine.add(request(group_id, 57, 2))
    beside = 0
    while engine.scheduler.has_work:
        prefilling = bool(engine.scheduler.queues.prefilling)
        plan = engine.step()
        assert plan.total_tokens <= 48
        beside += bool(prefilling and plan.drafts)
    assert beside > 2


def test_no_step_that_preempts_has_drafts() -> None:
    preempted = drafted = 0
    for seed in range(6):
        engine = make(Guesses(seed, 0.6), 1, blocks=20)
        for group_id in range(1, 6):
            engine.add(request(group_id, 5 + group_id, 24))
        while engine.scheduler.has_work:
            before = engine.scheduler.counts().preemptions_by_recompute
            plan = engine.step()
            if engine.scheduler.counts().preemptions_by_recompute > before:
                preempted += 1
                assert not plan.drafts
            drafted += len(plan.drafts)
    assert preempted and drafted


def test_the_prefix_cache_holds_what_it_holds_without_drafts() -> None:
    cached = []
    for drafter in (None, Guesses(5, 0.7), Guesses(5, 1.0)):
        engine = make(drafter, 1)
        for group_id in range(1, 5):
            engine.add(request(group_id, 6, 10 + 5 * group_id))
        run(engine)
        cached.append(engine.blocks.state.cached)
    assert cached[0] == cached[1] == cached[2] > 20


def test_what_is_counted_is_what_was_accepted() -> None:
    engine = make(Guesses(7, 0.7), 1)
    engine.add(request(1, 6, 40))
    steps = engine.run()
    stats, plans = engine.scheduler.stats().speculation, engine.plans
    assert stats is not None
    drafts = [tokens for plan in plans for tokens in plan.drafts.values()]
    assert (stats.drafts, stats.draft_tokens) == (len(drafts), sum(map(len, drafts)))
    assert stats.accepted_tokens == 40 - steps == sum(stats.accepted_per_position)
    assert engine.scheduler.stats().decode_tokens == 39


def test_drafts_leave_rows_to_forked_children() -> None:
    for seed in range(4):
        engine = make(Guesses(seed, 1.0), 1, blocks=200, max_num_batched_tokens=10)
        for group_id in range(1, 7):
            engine.add(request(group_id, 4 + 3 * group_id, 20, n=1 + group_id % 4))
        run(engine)  # the worker counts its rows of logits


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap"},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"batching": "prefill_first"})),
    ],
    ids=str,
)
def test_workers_draft_fewer_tokens_than_asked_for_or_fail(depth: int, adaptive: bool, options: dict[str, Any]) -> None:
    drafts = failures = 0
    for seed in range(4):
        drafter = DraftsOnWorkers()
        engine = make(drafter, depth, blocks=24, adaptive=adaptive, **options)
        engine.worker.drafting.seed(seed)
        for group_id in range(1, 9):
            engine.add(request(group_id, 3 + 2 * group_id, 22, n=1 + group_id % 3))
        run(engine)
        stats = engine.scheduler.stats().speculation
        assert stats is not None and stats.accepted_tokens <= stats.draft_tokens
        drafts, failures = drafts + stats.drafts, failures + stats.failures
        assert not drafter._covered
    assert drafts > 0 and (adaptive or failures > 0)


def test_a_sequence_has_one_output_a_step_with_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(Guesses(1, 0.9), 1, adaptive=False)
    engine.add(request(0, 5, 30))
    engine.add(request(1, 9, 30, n=3))
    outputs: list[SequenceOutput] = []
    apply = engine._apply_sequence_output

    def recording(update: SequenceOutput) -> None:
        outputs.append(update)
        apply(update)

    monkeypatch.setattr(engine, "_apply_sequence_output", recording)
    most = 0
    while engine.scheduler.has_work:
        outputs.clear()
        engine.step()
        assert len({(update.group_id, update.index) for update in outputs}) == len(outputs)
        most = max([most, *(len(update.token_ids) for update in outputs)])
    assert most > 2
    check_nothing_held(engine)


class Counting(Drafter):
    """Proposes three tokens, whatever comes."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        return [1, 2, 3][:num_tokens]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_is_accepted_before_a_sequence_fails_is_part_of_its_answer(before: int) -> None:
    engine = make(Counting(), 1)
    engine.add(request(0, 5, 30))
    engine.step()
    scheduler, (seq_id,) = engine.scheduler, engine.scheduler.queues.sequences
    plan = scheduler.schedule()
    assert plan.drafts == {seq_id: [1, 2, 3]}
    tokens = [1, 2, 3][:before]
    failure = SequenceFailure("no token", NO_TOKEN_LEFT)
    extras = {seq_id: SequenceResult(error=failure)}
    result = StepResult(plan.step, [seq_id], [*tokens, 0], [before + 1], extras=extras)
    (update,) = scheduler.update(plan, result).each_sequence()
    assert update.token_ids == tokens and update.finish_reason == "error"
    assert update.extra is not None and update.extra.error == failure
    assert not scheduler.has_work and engine.blocks.state.used == 0
