"""The simulated engine: the real scheduler's steps, at the profile's times, the same each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.lab.simulate.engine import SimulatedEngine, run
from octavo.lab.simulate.figures import RunFigures
from octavo.lab.simulate.run import Recorder, simulate
from octavo.lab.workloads.arrivals import parse_arrivals
from octavo.lab.workloads.lengths import Constant, Uniform
from octavo.lab.workloads.sharing import Conversations, parse_class, parse_users
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload
from tests.lab.simulate.test_profile import profile


def item(at: float, input_len: int, output_len: int, **more: Any) -> WorkItem:
    return WorkItem(at=at, input_len=input_len, output_len=output_len, **more)


def simulated(items: Any, options: dict[str, Any] | None = None, changes: Any = None, **settings: Any) -> RunFigures:
    return simulate(profile(**(changes or {})), make_config(model="none", **(options or {})), items, **settings)


#: Seconds of a step: 1 and nothing else.
UNIT = {"products": [[1, 0], [2, 0]], "fixed": 1} | dict.fromkeys(("sampled", "context", "pairs", "chunk", "moved"), 0)
LOAD = Workload(
    requests=60,
    arrivals=parse_arrivals("poisson", 5, None),
    inputs=Uniform(1, 300),
    outputs=Uniform(1, 60),
    seed=3,
)


def test_times_of_requests_are_those_of_their_steps() -> None:
    # The second arrives in the first step, waits for its end, and is computed in two chunks beside the decode.
    items = [item(0, 10, 4), item(0.5, 20, 2)]
    found = simulated(items, {"max_num_batched_tokens": 16}, UNIT)
    assert found.seconds == 4 and found.steps == 4
    assert found.ttft is not None and (found.ttft.mean, found.ttft.max) == (1.75, 2.5)
    assert found.e2e is not None and (found.e2e.mean, found.e2e.max) == (3.75, 4.0)
    assert found.itl is not None and found.itl.mean == found.itl.max == 1.0
    assert found.output_tokens == 6


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    found = simulated([item(0, 5, 1), item(7.25, 5, 3)], None, UNIT)
    assert found.seconds == 10.25 and found.steps == 4


def test_a_sequence_ends_at_its_length_whatever_limit_it_states() -> None:
    exact, none = simulated(LOAD), simulated(LOAD, max_tokens=lambda item: None)
    assert exact == none
    assert exact.output_tokens == sum(item.output_len for item in LOAD)
    # Where the next step is planned before the last token is known, one more is computed and dropped.
    ahead = simulated(LOAD, {"async_scheduling": True}, max_tokens=lambda item: None)
    assert ahead.output_tokens == exact.output_tokens and ahead.seconds > 0


def test_overheads_of_a_server_delay_requests_and_answers() -> None:
    server = {"request": 0.25, "step": 0.5, "answer": 2.0, "arrival": 4.0}
    found = simulated([item(0, 5, 2)], None, {**UNIT, "server": server}, mode="server")
    assert found.ttft is not None and found.ttft.mean == 4.0 + 0.25 + 1.5 + 2.0
    assert found.e2e is not None and found.e2e.mean == found.ttft.mean + 1.5


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_few_blocks_preempt_and_nothing_is_lost(mode: str) -> None:
    options = {"num_gpu_blocks_override": 40, "preemption_mode": mode, "num_host_blocks_override": 200}
    load = [item(0, 40, 100) for _ in range(30)]
    engine, recorder = SimulatedEngine(profile(), make_config(model="none", **options)), Recorder()
    run(engine, load, recorder.ended, recorder.sample)
    found = recorder.figures(engine)
    assert found.requests == 30 and found.output_tokens == 3000
    assert found.preemptions_by_recompute + found.preemptions_by_swap > 0
    assert (found.preemptions_by_swap > 0) == (mode != "recompute")
    assert engine.blocks.state.used == engine.blocks.state.host_used == 0
    assert max(found.series["blocks_used"]) <= 40


@pytest.mark.parametrize(
    ("policy", "ahead"),
    [
        ("fair", True),
        ("deadline", False),
        ("mlfq", False),
        *(
            pytest.param(policy, ahead, marks=pytest.mark.slow)
            for policy in ("sjf", "lcfs", "srpt", "fair", "mlfq", "deadline")
            for ahead in (False, True)
            if (policy, ahead) not in (("fair", True), ("deadline", False), ("mlfq", False))
        ),
    ],
)
def test_equal_seeds_give_equal_figures(policy: str, ahead: bool) -> None:
    options = {"num_gpu_blocks_override": 60, "async_scheduling": ahead}
    classes = (parse_class("0.5,ttft:300,tpot:30"), parse_class("0.5"))
    load = replace(LOAD, users=parse_users("zipf:3,1"), classes=classes)
    first, second = (simulated(load, {**options, "scheduling_policy": policy}) for _ in range(2))
    assert first == second
    assert first.requests == 60
    assert first.e2e != simulated(load, options).e2e


def test_the_next_turn_of_a_conversation_finds_the_answer_in_the_prefix_cache() -> None:
    load = Workload(
        requests=6,
        arrivals=parse_arrivals("fixed", 0.01, None),
        inputs=Constant(32),
        outputs=Constant(64),
        conversations=Conversations(Constant(3), think=1000.0),
    )
    found = simulated(load)
    assert sorted(item.input_len for item in load) == [32, 32, 128, 128, 224, 224]
    # Of 32 + 64 tokens before the second turn and 192 before the third, all but the last were computed: whole blocks.
    assert found.prefix_hit_tokens == 2 * (80 + 176)
    assert simulated(load, {"enable_prefix_caching": False}).prefix_hit_tokens == 0


def test_its_steps_are_those_of_the_real_engine(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 24,
        "preemption_mode": "recompute",
        "max_num_batched_tokens": 48,
        "max_num_seqs": 12,
        "max_model_len": 120,
    }
    drawn = Workload(requests=25, inputs=Uniform(2, 60), outputs=Uniform(1, 40), seed=1)
    # Prompts differ in their first token, so that no chance decides what the prefix cache finds.
    load = [structs.replace(one, prompt=(5 + i, *[3] * (one.input_len - 1))) for i, one in enumerate(drawn)]
    plans: list[list[tuple[Any, ...]]] = []

    def watch(executor: Any) -> None:
        submit = executor.submit
        seen: list[tuple[Any, ...]] = []
        plans.append(seen)

        def watched(plan: StepPlan) -> Any:
            changes = [(c.seq_id, c.index, c.blocks) for c in plan.table_changes]
            seen.append((plan.seq_ids, plan.num_tokens, plan.forget, changes))
            return submit(plan)

        monkeypatch.setattr(executor, "submit", watched, raising=False)

    from octavo.engine.llm import LLM
    from octavo.lab.bench.timed_run import run_timed

    llm = LLM(str(tiny_model), **options)
    watch(llm.llm_engine.core.executor)
    done = run_timed(llm.llm_engine, load)
    engine, recorder = SimulatedEngine(profile(), make_config(model="none", **options)), Recorder()
    watch(engine._workers)
    run(engine, load, recorder.ended, recorder.sample)
    assert recorder.figures(engine).preemptions_by_recompute > 0
    assert plans[0] == plans[1]
    assert list(done.number) == list(recorder.done.number)


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        ([item(0, 5, 5), item(-1, 5, 5)], {}, "before"),
        ([item(2, 5, 5), item(1, 5, 5)], {}, "before"),
        ([item(float("nan"), 5, 5)], {}, "before"),
        ([item(0, 0, 5)], {}, "empty prompt"),
        ([item(0, 90, 20)], {"max_model_len": 100}, "max_model_len"),
        ([], {"max_model_len": 5000}, "context length of the profile"),
        ([], {"tensor_parallel_size": 2}, "one worker"),
    ],
)
def test_what_cannot_be_simulated_is_refused(items: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(items, options)
