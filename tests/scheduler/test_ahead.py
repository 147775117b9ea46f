"""Planning ahead: the next step is planned and submitted while the tokens of one in flight are not known yet."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.plan import StepPlan
from octavo.core.request import Beam, EngineCoreRequest, Generate, SequenceStatus
from octavo.core.sampling_params import BeamSearchParams
from tests.scheduler import builders
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, hypotheses_alone, tokens_alone

BLOCK = builders.BLOCK


def make(blocks: int = 64, host: int = 0, *, depth: int = 2, caching: bool = False, **options: Any) -> Engine:
    return builders.make(blocks, host, depth=depth, prefix_caching=caching, **options)


def request(group_id: int, prompt: int, max_tokens: int | None = 8, n: int = 1, **params: Any) -> EngineCoreRequest:
    return builders.request(group_id, prompt, max_tokens, n, **params)


def in_flight(engine: Engine) -> list[StepPlan]:
    """Plans that the worker has, before the loop waits for the first."""
    seen: list[StepPlan] = []
    engine.step(lambda: seen.extend(engine.plans[-1:] + [s.plan for s in engine.worker.in_flight]))
    return seen


def finish(engine: Engine) -> None:
    while engine.loop.has_work:
        engine.step()
        check_accounting(engine)
    check_nothing_held(engine)
    limit = engine.max_model_len
    for answer in engine.answers.values():
        for index, tokens in answer.tokens.items():
            alone = tokens_alone(answer.request, index, limit)
            assert tokens == (alone if answer.reasons.get(index) in ("stop", "length") else alone[: len(tokens)])


def computed(engine: Engine) -> int:
    return sum(p.total_tokens for p in engine.plans)


def test_the_next_step_is_submitted_before_the_result_of_the_first() -> None:
    engine = make()
    answer = engine.add(request(1, 6))
    first, second = in_flight(engine)
    assert (first.num_tokens, second.num_tokens) == ([6], [1])
    assert answer.tokens == {0: tokens_alone(answer.request, 0, 256)[:1]}
    second, third = in_flight(engine)
    assert (second.num_tokens, third.num_tokens) == ([1], [1])
    finish(engine)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_computes_what_the_limit_rules_out(depth: int) -> None:
    engine = make(depth=depth)
    engine.add(request(1, 6, max_tokens=8))
    engine.add(request(2, 5, max_tokens=1, n=3))
    engine.add(request(3, 5, max_tokens=20))
    finish(engine)
    assert computed(engine) == (6 + 7) + 5 + (5 + 19)
    assert all(p.seq_ids for p in engine.plans[:-1]), "an empty step"


def test_a_stop_token_is_seen_one_step_late_and_what_was_computed_after_it_is_dropped() -> None:
    engine = make(caching=True)
    source = request(1, 6, max_tokens=40)
    alone = tokens_alone(source, 0, 256)
    end = next(i for i in range(5, 40) if alone[i] not in alone[:i] and (6 + i) % BLOCK == BLOCK - 1)
    assert isinstance(source.task, Generate)
    # It is the last of its block, and its own KV entry is computed by mistake.
    source.task.stop_token_ids = [alone[end]]
    answer = engine.add(source)
    finish(engine)
    assert answer.tokens == {0: alone[: end + 1]} and answer.reasons == {0: "stop"}
    assert computed(engine) == 6 + end + 1
    assert engine.blocks.state.cached == (6 + end) // BLOCK, "a block with the dropped entry is known"


def test_several_sequences_run_ahead_from_their_fork_on() -> None:
    engine = make()
    engine.add(request(1, 6, n=3))
    first, second = in_flight(engine)
    assert (first.num_tokens, second.num_tokens) == ([6], [1, 1, 1])
    finish(engine)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"min_tokens": 3},
        {"logit_bias": {5: 2.0}},
        {"allowed_token_ids": [1, 2]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"bad_words": ["x"]},
    ],
)
def test_sampling_that_looks_at_tokens_is_planned_ahead_too(params: dict[str, Any]) -> None:
    """The worker waits for the tokens where it needs them, when the forward is queued."""
    engine = make()
    engine.add(request(1, 6, **params))
    assert len(in_flight(engine)) == 2
    finish(engine)


def test_a_beam_search_alone_waits_for_its_results() -> None:
    engine = make()
    engine.add(request(2, 6, max_tokens=30))
    assert len(in_flight(engine)) == 2
    search = request(1, 6)
    search.task = Beam(BeamSearchParams(beam_width=2, max_tokens=8))
    group = engine.add(search).group
    while group.status is not SequenceStatus.RUNNING:
        engine.step()
    with_beams = 0
    while group.status is SequenceStatus.RUNNING:
        first, second = in_flight(engine)
        owners = [set(engine.computed(plan)) for plan in (first, second)]
        assert 2 in owners[0] and 2 in owners[1], "the other group is not held up"
        assert not (1 in owners[0] and 1 in owners[1]), "beams were computed before they were chosen"
        with_beams += 1 in owners[0]
    assert with_beams >= 8
    finish(engine)
    assert engine.answers[1].hypotheses == hypotheses_alone(search, 256)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_beams_and_others_short_of_blocks_with_steps_in_flight(mode: str, depth: int) -> None:
    engine = make(blocks=10, host=12, depth=depth, preemption_mode=mode)
    searches = {}
    for group_id in (1, 3):
        search = searches[group_id] = request(group_id, 5)
        search.task = Beam(BeamSearchParams(beam_width=2, max_tokens=9))
        engine.add(search)
        engine.add(request(group_id + 1, 7, max_tokens=12))
    while engine.scheduler.has_work:
        engine.step()
        check_accounting(engine)
    check_nothing_held(engine)
    assert sum(answer.num_preemptions for answer in engine.answers.values()) > 0
    for group_id, search in searches.items():
        assert engine.answers[group_id].hypotheses == hypotheses_alone(search, 40)
        assert engine.answers[group_id + 1].tokens[0] == tokens_alone(engine.answers[group_id + 1].request, 0, 40)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_sequence_preempted_with_a_token_in_flight_resumes_with_it(mode: str, depth: int) -> None:
    engine = make(blocks=6, host=6, depth=depth, preemption_mode=mode)
    engine.add(request(1, 7, max_tokens=12))
    engine.add(request(2, 7, max_tokens=12))
    awaited = False
    while not awaited:
        known = {i: len(a.tokens.get(0, ())) for i, a in engine.answers.items()}
        engine.step()
        group = engine.answers[2].group
        awaited = group.totals.num_recomputes + group.totals.num_swaps > 0
    assert group.status is not SequenceStatus.RUNNING
    if depth == 2:
        assert len(engine.answers[2].tokens[0]) == known[2] + 1, "it was preempted after the result of its last step"
    finish(engine)
    assert engine.answers[2].reasons == {0: "length"}


def test_nothing_is_preempted_for_blocks_that_a_sequence_at_its_limit_is_about_to_free() -> None:
    engine = make(blocks=6, host=6, preemption_mode="swap")
    engine.add(request(1, 7, max_tokens=6))
    engine.add(request(2, 7, max_tokens=12))
    finish(engine)
    assert engine.scheduler.stats().preemptions_by_swap == 0


def test_a_group_alone_is_not_ended_before_its_tokens_are_known() -> None:
    engine = make(blocks=6)
    # A common block and four of their own hold 8 tokens each. All end with the ninth, which needs no place.
    source = next(r for r in (request(1 + i, 6, None, n=4) for i in range(1000)) if ends_with_the_third(r))
    answer = engine.add(source)
    finish(engine)
    assert answer.error is None and set(answer.reasons.values()) == {"stop"}
    assert all(len(tokens) == 3 for tokens in answer.tokens.values())


def ends_with_the_third(source: EngineCoreRequest) -> bool:
    """Makes the third token of each sequence a stop token; whether none comes before."""
    first = [tokens_alone(source, index, 24)[:3] for index in range(4)]
    assert isinstance(source.task, Generate)
    source.task.stop_token_ids = [tokens[2] for tokens in first]
    return not any(token in source.task.stop_token_ids for tokens in first for token in tokens[:2])


def test_what_was_computed_ahead_of_a_failed_step_is_computed_again() -> None:
    engine = make()
    answers = [engine.add(request(1, 6)), engine.add(request(2, 6))]
    engine.step()
    engine.step(fail="before computing")  # as it will turn out when it is waited for
    answers += [engine.add(request(3, 70)), engine.add(request(4, 70))]
    known = [len(a.tokens[0]) for a in answers[:2]]
    engine.step()  # the next one is in flight, with a part of the third prompt
    assert [len(a.tokens[0]) for a in answers[:2]] == known and not engine.worker.in_flight
    check_accounting(engine)
    finish(engine)
    assert all(a.reasons == {0: "length"} for a in answers)


def test_when_a_step_cannot_be_submitted_the_one_before_it_counts() -> None:
    engine = make()
    answer = engine.add(request(1, 6))
    engine.step()
    known = len(answer.tokens[0])
    engine.step(fail="before moving")
    assert len(answer.tokens[0]) == known + 1
    finish(engine)
    assert answer.reasons == {0: "length"}


def test_an_abort_of_all_leaves_nothing_in_flight() -> None:
    engine = make()
    engine.add(request(1, 6))
    engine.step()
    assert engine.worker.in_flight
    engine.abort(1)
    assert not engine.worker.in_flight
    check_nothing_held(engine)


def test_a_sequence_stopped_while_its_next_token_is_awaited_gets_none() -> None:
    engine = make()
    answer = engine.add(request(1, 6, n=2))
    engine.step()
    engine.stop(1, 0)
    engine.step()
    assert [len(answer.tokens[i]) for i in (0, 1)] == [1, 2]
    finish(engine)


def test_no_step_is_planned_that_no_group_can_run_ahead_with() -> None:
    scheduler = make().scheduler
    scheduler.add(request(1, 6, max_tokens=3))
    for _ in range(3):
        assert not scheduler._in_flight or scheduler.can_run_ahead
        scheduler.schedule()
    assert not scheduler.can_run_ahead
    with pytest.raises(RuntimeError, match="step 1 is in flight and its result is needed first"):
        scheduler.schedule()
