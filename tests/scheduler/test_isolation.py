"""Steps that fail at some requests: these end with an error, each costs few failures, and the others lose nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import EngineDeadError
from octavo.core.plan import StepPlan
from octavo.engine.blame import LastSteps
from tests.scheduler.builders import finish, make, request
from tests.scheduler.fake_worker import Answer, Engine, check_nothing_held, tokens_alone

#: Of the hypothesis tests, which take milliseconds an example.
FEW = settings(max_examples=40, deadline=None)
MODES = st.sampled_from(["recompute", "swap"])


def busy_engine(count: int, depth: int, mode: str) -> Engine:
    engine = make(blocks=40, host=40, depth=depth, preemption_mode=mode, prefix_caching=True, max_num_seqs=16)
    for group_id in range(1, count + 1):
        engine.add(request(group_id, 3 + group_id % 5, max_tokens=12, n=1 + (group_id % 4 == 0)))
    return engine


def generated(engine: Engine, plan: StepPlan) -> dict[int, int]:
    """Tokens of output so far, by group, of what a plan computes; -1: only a part of a prompt is."""
    sequences = engine.scheduler.queues.sequences
    return {
        sequences[seq_id].group.group_id: len(sequences[seq_id].token_ids) - sequences[seq_id].num_prompt_tokens
        for seq_id in plan.seq_ids
    }


def check_whole(answer: Answer, max_model_len: int) -> None:
    assert answer.error is None and set(answer.reasons.values()) <= {"stop", "length"}
    for index, tokens in answer.tokens.items():
        assert tokens == tokens_alone(answer.request, index, max_model_len)


@FEW
@given(
    count=st.integers(1, 16),
    guilty=st.sets(st.integers(1, 16), max_size=4),
    at=st.integers(0, 9),
    depth=st.integers(1, 3),
    mode=MODES,
)
def test_any_guilty_requests_end_and_no_other_loses_a_token(
    count: int, guilty: set[int], at: int, depth: int, mode: str
) -> None:
    guilty = {group_id for group_id in guilty if group_id <= count}
    engine = busy_engine(count, depth, mode)
    failures = 0

    def fails(plan: StepPlan) -> bool:
        nonlocal failures
        failed = any(done >= at for group_id, done in generated(engine, plan).items() if group_id in guilty)
        failures += failed
        return failed

    engine.worker.fails_at = fails
    while engine.loop.has_work:
        engine.step()
    check_nothing_held(engine)
    ended = {group_id for group_id, answer in engine.answers.items() if answer.group_reason == "error"}
    # One that stops by itself before the token at which it fails is not guilty.
    assert ended <= guilty
    for group_id, answer in engine.answers.items():
        if group_id in ended:
            assert "InjectedFailure" in str(answer.error)
            alone = {index: tokens_alone(answer.request, index, engine.max_model_len) for index in answer.tokens}
            assert all(tokens == alone[index][: len(tokens)] for index, tokens in answer.tokens.items())
            assert all(len(tokens) < at + depth + 1 for tokens in answer.tokens.values())
        else:
            check_whole(answer, engine.max_model_len)
    # The first failure, and log2 n + 1 further ones; steps in flight behind a failed one may be counted too.
    assert failures <= len(guilty) * (math.ceil(math.log2(count)) + 2) * depth


@FEW
@given(count=st.integers(2, 12), most=st.integers(1, 4), depth=st.integers(1, 2))
def test_requests_that_fail_only_in_company_all_come_to_their_end(count: int, most: int, depth: int) -> None:
    engine = busy_engine(count, depth, "recompute")
    engine.worker.fails_at = lambda plan: len(generated(engine, plan)) > most
    while engine.loop.has_work:
        engine.step()
    check_nothing_held(engine)
    for answer in engine.answers.values():
        check_whole(answer, engine.max_model_len)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_whose_every_step_fails_says_so_and_ends_no_request(depth: int) -> None:
    engine, last_steps = busy_engine(8, depth, "recompute"), LastSteps(depth)
    engine.loop.record_to(last_steps)
    engine.step()
    failing = engine.queues[1]
    engine.worker.fails_at = lambda plan: bool(plan.seq_ids)
    with pytest.raises(EngineDeadError, match="every step fails, also one without any request: InjectedFailure"):
        for _ in range(10):
            engine.step()
    assert all(answer.group_reason is None for answer in engine.answers.values())
    assert last_steps.groups == set(failing)  # so that, if they have broken the engine, it is found out


def test_a_step_that_fails_once_costs_no_request() -> None:
    engine = busy_engine(8, 2, "swap")
    engine.step()
    engine.step(fail="before moving")
    finish(engine)
    for answer in engine.answers.values():
        check_whole(answer, engine.max_model_len)


def test_requests_that_are_kept_back_can_be_aborted_and_stopped() -> None:
    engine = busy_engine(8, 1, "recompute")
    engine.step()
    engine.step(fail="before computing")
    engine.add(request(20, 4, max_tokens=3))
    engine.abort(1)
    engine.stop(4, 0)
    engine.abort(20)
    while engine.loop.has_work:
        engine.step()
    check_nothing_held(engine)
    assert [engine.answers[i].group_reason for i in (1, 20)] == ["abort", "abort"]
    assert engine.answers[4].reasons.keys() == {0, 1}
