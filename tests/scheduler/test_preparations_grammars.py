"""What the scheduler does with grammars: waiting for them, keeping them, failures, and tokens that they force."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.failures import GRAMMAR, SequenceFailure
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import EngineCoreRequest, Generate, Limits
from octavo.executor.executor import WorkerReports, reports_of
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.preparations import Preparations
from tests.scheduler.builders import finish_all, make, request
from tests.scheduler.fake_preparations import compilation, grammar
from tests.scheduler.fake_worker import Engine, check_accounting, tokens_alone

BATCHINGS = pytest.mark.parametrize("batching", ["mixed", "prefill_first"])


def bound(number: int, prompt: int, max_tokens: int, key: str = "A", **options: Any) -> EngineCoreRequest:
    """A request with a grammar."""
    found = request(number, prompt, max_tokens, **options)
    assert isinstance(found.task, Generate)
    found.task.grammar = grammar(key)
    return found


def engine_with(steps: int = 0, **options: Any) -> Engine:
    return make(steps_per_preparation=steps, **options)


@BATCHINGS
def test_the_first_step_waits_for_a_grammar_and_later_requests_with_it_for_nothing(batching: str) -> None:
    engine = engine_with(100, batching=batching)
    engine.add(bound(1, 5, 4))
    first = engine.step()
    assert first.awaits_prepared and first.prepare == [compilation("A")] and not first.seq_ids
    second = engine.step()
    assert not second.awaits_prepared and len(second.new) == 1
    assert isinstance(second.new[0].task, Generate) and second.new[0].task.grammar is not None
    assert second.new[0].task.grammar.source == "", "it is not sent with every sequence"
    engine.add(bound(2, 5, 4))
    third = engine.step()
    assert not third.prepare and len(third.new) == 1
    finish_all(engine)
    assert engine.worker.preparations.num_begun == engine.worker.preparations.num_waits == 1


@BATCHINGS
def test_others_go_on_while_a_grammar_is_compiled_and_it_holds_no_block(batching: str) -> None:
    engine = engine_with(6, batching=batching)
    engine.add(request(1, 5, 40))
    engine.step()
    answer = engine.add(bound(2, 5, 4))
    engine.add(request(3, 5, 4))
    for _ in range(5):
        plan = engine.step()
        assert not plan.awaits_prepared and 2 not in engine.computed(plan) and engine.computed(plan)
        assert engine.queues[0] == [2] and engine.scheduler.stats().num_waiting == 1
        assert not engine.blocks.table(answer.group.seqs[0].seq_id)
        check_accounting(engine)
    assert engine.answers[3].finished
    finish_all(engine)


@pytest.mark.parametrize("limit", [None, 0.0, 5.0])
@pytest.mark.parametrize("policy", ["fcfs", "static", "sjf", "lcfs", "fair"])
@BATCHINGS
def test_compiled_it_has_the_place_of_its_arrival(policy: str, batching: str, limit: float | None) -> None:
    engine = engine_with(3, batching=batching, scheduling_policy=policy, max_num_seqs=1, aging_limit=limit)
    engine.add(request(0, 5, 20, arrival=0.0))
    engine.step()
    waiting = engine.add(bound(1, 5, 4, arrival=1.0))
    engine.add(request(2, 5, 4, arrival=2.0))
    engine.now = 50.0  # beyond the limit
    order = []
    while engine.scheduler.has_work:
        order += [group for group in engine.computed(engine.step()) if group not in order]
        check_accounting(engine)
    later_first = limit is None and policy == "lcfs"
    assert order == ([0, 2, 1] if later_first else [0, 1, 2])
    assert waiting.finished
    finish_all(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_while_it_waits(depth: int) -> None:
    engine = engine_with(4, depth=depth)
    engine.add(request(1, 5, 30))
    engine.add(bound(2, 5, 4))
    engine.add(bound(3, 5, 4))
    engine.step()
    engine.abort(2)
    check_accounting(engine)
    finish_all(engine)
    assert engine.answers[3].finished and engine.answers[2].group_reason == "abort"
    engine.add(bound(4, 5, 4))
    engine.abort(4)
    assert not engine.scheduler.has_work
    check_accounting(engine)


def test_a_grammar_that_fails_ends_its_requests_alone() -> None:
    engine = engine_with()
    engine.worker.preparations.failing = {"grammar A": "unusable"}
    for number, key in enumerate("ABA"):
        engine.add(bound(number, 5, 4, key))
    engine.add(request(3, 5, 4))
    finish_all(engine)
    assert [engine.answers[i].error for i in range(4)] == ["unusable", None, "unusable", None]
    assert engine.answers[0].group_reason == "error"
    engine.worker.preparations.failing = {}
    again = engine.add(bound(4, 5, 4))
    finish_all(engine)
    assert again.error is None and not engine.worker.preparations.failed, "it is tried again"


def test_the_last_grammars_used_are_kept_beside_those_in_use() -> None:
    engine = engine_with(max_num_seqs=8)
    engine.add(bound(0, 5, 60, "U"))
    for number, key in enumerate("ABCAD", 1):
        answer = engine.add(bound(number, 5, 1, key))
        while not answer.finished:
            engine.step()
    engine.step()
    assert engine.worker.preparations.keys("grammar") == {"grammar U", "grammar A", "grammar D"}
    assert engine.worker.preparations.num_begun == 5 + 1, "A was dropped for C, B for A, C for D"
    finish_all(engine)


@pytest.mark.parametrize("where", ["before moving", "before computing"])
@pytest.mark.parametrize("steps", [0, 2])
def test_after_a_step_that_failed_the_workers_are_told_again(where: str, steps: int) -> None:
    engine = engine_with(steps)
    engine.add(request(0, 5, 30))
    engine.step()
    waiting = engine.add(bound(1, 5, 4))
    engine.step(fail=where)
    finish_all(engine)
    assert waiting.reasons == engine.answers[0].reasons == {0: "length"}


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_tokens_are_computed_together_and_survive_preemption(batching: str, mode: str) -> None:
    engine = engine_with(blocks=14, host=20, batching=batching, preemption_mode=mode, max_num_batched_tokens=56)
    for number in range(5):
        engine.add(bound(number, 5 + number, 25))
    preempted_with_forced = 0
    chunks = []
    while engine.scheduler.has_work:
        before = {seq.seq_id for seq, _ in engine.scheduler.queues.unsent_tokens}
        plan = engine.step()
        chunks += [n for n in plan.num_tokens if n > 1]
        preempted_with_forced += len(before.intersection(plan.forget))
        check_accounting(engine)
    assert sum(answer.num_preemptions for answer in engine.answers.values()) > 2 and preempted_with_forced
    assert len(chunks) > 15
    finish_all(engine)


def test_forced_tokens_have_their_part_of_the_budget_before_prompts() -> None:
    engine = engine_with(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(bound(0, 3, 40))
    engine.step()
    engine.step()
    engine.add(request(1, 150, 1))
    longest = 0
    for _ in range(12):
        plan = engine.step()
        assert plan.total_tokens <= 8
        longest = max(longest, engine.computed(plan).get(0, 0))
    assert longest > 1 and not engine.answers[1].finished
    finish_all(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 9])
def test_a_limit_and_a_stop_token_within_forced_tokens(max_tokens: int) -> None:
    for prompt in range(1, 30):
        engine = engine_with()
        wanted = bound(0, prompt, max_tokens)
        assert isinstance(wanted.task, Generate)
        wanted.task.stop_token_ids = [0]
        answer = engine.add(wanted)
        finish_all(engine)
        assert answer.reasons[0] == ("stop" if answer.tokens[0][-1] == 0 else "length")


def test_groups_of_several_sequences_sample_all_their_tokens() -> None:
    engine = engine_with()
    answer = engine.add(bound(0, 5, 20, n=3))
    engine.run()
    assert [answer.tokens[i] for i in range(3)] == [tokens_alone(answer.request, i, 256) for i in range(3)]


def test_what_several_workers_report() -> None:
    reports = WorkerReports(2)
    failure = SequenceFailure("no", GRAMMAR)
    early = StepResult(1, prepared=["A"], prepare_errors={"B": failure})
    reports.combine(early, [], 0)
    assert (early.prepared, early.prepare_errors) == ([], {})
    late = StepResult(2)
    other = reports_of(StepResult(2, prepared=["A", "B"]))
    assert other is not None
    reports.combine(late, [(1, other)], 0)
    assert (late.prepared, late.prepare_errors) == (["A"], {"B": failure})
    assert reports_of(StepResult(3)) is None


def test_a_drop_and_a_new_compilation_in_one_plan() -> None:
    preparations = Preparations({"grammar": Limits(idle=0)})
    first, second = (SequenceGroup(bound(number, 3, 3), number, number, 99) for number in range(2))
    preparations.add_waiting(first)
    preparations.begin(0.0)
    preparations.add_to(StepPlan(1))
    assert not preparations.update(StepPlan(1), StepResult(1, prepared=["grammar A"]))
    preparations.remove_waiting(first)
    preparations.add_waiting(second)
    preparations.begin(0.0)
    plan = StepPlan(2)
    preparations.add_to(plan)
    assert plan.drop == ["grammar A"] and plan.prepare == [compilation("A")]
    preparations.repeat(plan)
    again = StepPlan(3)
    preparations.add_to(again)
    assert again.drop == [] and again.prepare == [compilation("A")]


def test_a_grammar_that_its_groups_have_left_is_not_compiled() -> None:
    engine = engine_with(1000)
    engine.add(request(1, 5, 60))
    engine.step()
    engine.add(bound(2, 5, 4, "A"))
    engine.abort(2)
    assert not engine.step().prepare, "it was not sent yet"
    for number in range(10):
        engine.add(bound(10 + number, 5, 4, f"B{number}"))
    engine.step()
    assert len(engine.worker.preparations.preparing) == 4, "a few at a time: those in front of the rest are soon done"
    for number in range(10):
        engine.abort(10 + number)
    engine.step()
    assert len(engine.worker.preparations.preparing) == 4
    late = engine.add(bound(30, 5, 4, "B0"))
    engine.worker.preparations.steps = 0
    finish_all(engine)
    assert late.finished and engine.worker.preparations.num_begun == 4, "what has begun is kept, the rest never begins"
