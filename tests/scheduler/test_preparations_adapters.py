"""Adapters: slots, host memory, passing over, ageing, preemption, failed loads."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.errors import AdapterError
from octavo.core.failures import ADAPTER, SequenceFailure
from octavo.core.plan import StepResult
from octavo.core.request import AdapterRef
from octavo.core.stats import AdapterStats, SchedulerStats, sum_stats
from octavo.executor.executor import WorkerReports
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.preparations import PreparationState
from tests.scheduler.builders import BLOCK, finish_all, make, request
from tests.scheduler.fake_preparations import FakePreparations, adapter_options, limits_for, load, lora, prompt_adapter
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, tokens_alone

A, B, C, D = map(lora, "ABCD")
BATCHINGS = pytest.mark.parametrize("batching", ["mixed", "prefill_first"])


def engine_with(max_loras: int, max_cpu_loras: int | None = None, **options: Any) -> Engine:
    return make(adapters=adapter_options(max_loras, max_cpu_loras), **options)


def stats(engine: Engine) -> AdapterStats:
    found = engine.scheduler.counts().adapters
    assert found is not None
    return found


def loaded_keys(engine: Engine) -> set[str]:
    return engine.worker.preparations.keys("lora") | engine.worker.preparations.keys("prompt_adapter")


@BATCHINGS
def test_requests_of_different_adapters_and_none_share_steps(batching: str) -> None:
    engine = engine_with(3, batching=batching)
    for number, adapter in enumerate([A, B, None, C, A]):
        engine.add(request(number, 5, 6, adapter=adapter))
    engine.run()
    assert any(len(engine.computed(plan)) == 5 for plan in engine.plans)
    finish_all(engine)
    assert (stats(engine).in_slots, stats(engine).in_host, stats(engine).loading) == (3, 3, 0)
    assert (stats(engine).loads, stats(engine).slot_misses, stats(engine).slot_hits) == (3, 3, 1)


@BATCHINGS
def test_the_first_step_waits_for_its_adapter(batching: str) -> None:
    engine = engine_with(1, batching=batching, steps_per_preparation=100)
    engine.add(request(1, 5, 4, adapter=A))
    first = engine.step()
    assert first.awaits_prepared and first.prepare == [load(A)] and not first.seq_ids
    second = engine.step()
    assert second.place == [(0, "A")] and second.new[0].adapter == "A" and not second.awaits_prepared
    finish_all(engine)
    assert engine.worker.preparations.num_waits == 1


def test_others_go_on_while_an_adapter_is_loaded() -> None:
    engine = engine_with(2, steps_per_preparation=5)
    engine.add(request(1, 5, 40))
    engine.step()
    engine.add(request(2, 5, 4, adapter=A))
    engine.add(request(3, 5, 4))
    for _ in range(5):
        plan = engine.step()
        assert not plan.awaits_prepared and set(engine.computed(plan)) <= {1, 3} and 1 in engine.computed(plan)
    assert engine.answers[3].finished
    finish_all(engine)
    assert engine.worker.preparations.num_waits == 0


@BATCHINGS
def test_a_group_without_a_slot_is_passed_over_and_keeps_its_place(batching: str) -> None:
    engine = engine_with(1, 3, batching=batching, max_num_seqs=3)
    engine.add(request(1, 5, 20, adapter=A))
    engine.step()
    engine.step()
    for number, adapter in [(2, B), (3, C), (4, B), (5, A), (6, None)]:
        engine.add(request(number, 5, 4, adapter=adapter))
    engine.step()
    engine.step()
    assert engine.queues == ([2, 3, 4], [1, 5, 6], [])
    assert loaded_keys(engine) == {"A", "B", "C"} and stats(engine).loads == 3, "loaded ahead"
    engine.abort(1)
    seen: list[int] = []
    while engine.scheduler.has_work:
        seen += [group for group in engine.computed(engine.step()) if group not in seen]
    assert [group for group in seen if group in (2, 3, 4)] == [2, 4, 3], "B first, then both of it, then C"
    finish_all(engine)


def test_slots_and_host_memory_go_to_those_used_last() -> None:
    engine = engine_with(2, 3)

    def serve(number: int, adapter: AdapterRef) -> None:
        engine.add(request(number, 5, 3, adapter=adapter))
        engine.run()

    serve(1, A)
    serve(2, B)
    serve(3, A)
    serve(4, C)  # takes the slot of B
    assert set(engine.worker.preparations.slots.values()) == {"A", "C"} and loaded_keys(engine) == {"A", "B", "C"}
    serve(5, B)  # takes the slot of A, from host memory
    assert set(engine.worker.preparations.slots.values()) == {"B", "C"} and stats(engine).loads == 3
    serve(6, D)  # A goes from host memory
    assert loaded_keys(engine) == {"B", "C", "D"}
    assert (stats(engine).host_evictions, stats(engine).slot_evictions, stats(engine).slot_hits) == (1, 3, 1)


def test_what_is_loaded_ahead_does_not_displace_what_is_needed_sooner() -> None:
    engine = engine_with(1, 2)
    for number, adapter in enumerate([A, B, C, D, A]):
        engine.add(request(number, 5, 8, adapter=adapter))
    engine.step()
    engine.step()
    engine.step()
    assert loaded_keys(engine) == {"A", "B"} and stats(engine).loading == 0
    finish_all(engine)
    assert stats(engine).loads == 4, "none twice: the last request runs with the first"


@BATCHINGS
def test_an_urgent_group_lets_slots_drain(batching: str) -> None:
    """Requests of A come without end; B is older than the ageing limit at some time, and then A comes to an end."""
    engine = engine_with(1, 2, batching=batching, aging_limit=10.0, max_num_seqs=2)
    answer = None
    for now in range(60):
        engine.now = float(now)
        engine.add(request(now, 5, 4 + 3 * (now % 2), adapter=A, arrival=engine.now))
        if now == 3:
            answer = engine.add(request(1000, 5, 4, adapter=B, arrival=engine.now))
        if batching == "mixed":  # prefill_first would compute nothing but these prompts
            engine.add(request(2000 + now, 5, 1, arrival=engine.now))
        engine.step()
        check_accounting(engine)
        if answer is not None and answer.tokens:
            break
    assert answer is not None
    assert answer.group.totals.first_scheduled_time is not None and 13 < answer.group.totals.first_scheduled_time < 25
    finish_all(engine)


@BATCHINGS
@pytest.mark.parametrize("policy", ["fcfs", "static", "sjf", "lcfs", "fair"])
@pytest.mark.parametrize("limit", [None, 0.0, 5.0])
def test_every_request_ends_under_every_policy(policy: str, batching: str, limit: float | None) -> None:
    rng = random.Random(7)
    engine = engine_with(
        2,
        3,
        blocks=20,
        host=8,
        batching=batching,
        scheduling_policy=policy,
        aging_limit=limit,
        preemption_mode="by_sequences",
        steps_per_preparation=1,
        max_num_seqs=4,
    )
    for number in range(30):
        adapter = rng.choice([None, *map(lora, "ABCDEFG"), prompt_adapter("P"), prompt_adapter("Q")])
        engine.add(request(number, rng.randint(1, 9), rng.randint(1, 20), n=rng.choice([1, 1, 2]), adapter=adapter))
        engine.now += 1
        engine.step()
        check_accounting(engine)
    finish_all(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
@BATCHINGS
def test_a_preempted_group_gives_its_slot_up_and_gets_one_again(batching: str, depth: int, mode: str) -> None:
    engine = engine_with(
        2, 2, blocks=8, host=8, batching=batching, depth=depth, preemption_mode=mode, max_num_batched_tokens=64
    )
    first = engine.add(request(1, 8, 20, adapter=A))
    second = engine.add(request(2, 8, 20, adapter=B))
    while not second.num_preemptions:
        engine.step()
    adapter = engine.scheduler.preparations.by_key["B"]
    assert adapter.num_running == 0 and [*adapter.waiting] == [2]
    third = engine.add(request(3, 2, 2, adapter=C))
    finish_all(engine)
    assert first.finished and second.finished and third.finished


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@BATCHINGS
def test_a_preempted_group_whose_slot_is_lost_is_passed_over(batching: str, mode: str) -> None:
    """B is preempted for A; when blocks are free again, C has taken the only other slot."""
    engine = engine_with(1, 1, blocks=8, host=8, batching=batching, preemption_mode=mode)
    a = engine.add(request(1, 8, 18))
    b = engine.add(request(2, 8, 20, adapter=B))
    while not b.num_preemptions:
        engine.step()
    assert engine.scheduler.preparations.pools["lora"].can_place
    finish_all(engine)
    assert a.finished and b.finished


def test_a_load_that_fails_ends_its_own_requests_alone() -> None:
    engine = engine_with(2, 2, depth=2)
    engine.worker.preparations.failing = {"B": "adapter 'name of B' has no config"}
    engine.add(request(1, 5, 12, adapter=A))
    engine.add(request(2, 5, 12, adapter=B))
    engine.add(request(3, 5, 12, n=2, adapter=B))
    engine.add(request(4, 5, 12))
    engine.run()
    for number in (2, 3):
        assert engine.answers[number].group_reason == "error"
        assert engine.answers[number].error == "adapter 'name of B' has no config"
    assert len(engine.answers[1].tokens[0]) == len(engine.answers[4].tokens[0]) == 12
    engine.worker.preparations.failing = {}
    engine.add(request(5, 5, 12, adapter=B))
    finish_all(engine)
    assert len(engine.answers[5].tokens[0]) == 12, "a later request tries again"
    assert stats(engine).failed_loads == 1


@pytest.mark.parametrize("where", ["before moving", "before computing"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_loses_no_adapter(where: str, depth: int) -> None:
    engine = engine_with(2, 2, depth=depth, steps_per_preparation=1)
    number = 0
    for _ in range(12):
        for adapter in (A, B, C, None):
            number += 1
            engine.add(request(number, 3, 3, adapter=adapter))
        for step in range(3):
            if engine.loop.has_work and not engine.loop._isolation.is_probing:
                engine.step(fail=where if step == number // 4 % 3 else "")
    finish_all(engine)
    assert engine.worker.has_failed
    reasons = [answer.group_reason for answer in engine.answers.values()]
    assert reasons.count(None) >= 2 * len(reasons) // 3  # a second failure may come when one is computed alone


def test_an_aborted_request_lets_its_load_end() -> None:
    engine = engine_with(1, 1, steps_per_preparation=3)
    engine.add(request(1, 5, 9))
    engine.add(request(2, 5, 4, adapter=A))
    engine.step()
    engine.abort(2)
    engine.run()
    assert stats(engine).in_host == 1
    engine.add(request(3, 5, 4, adapter=A))
    finish_all(engine)
    assert stats(engine).loads == 1


def test_pinned_adapters_stay() -> None:
    engine = engine_with(2, 2)
    adapters = engine.scheduler.preparations
    adapters.pin(load(A), A.name)
    adapters.pin(load(A), A.name)
    with pytest.raises(AdapterError, match="'name of B' cannot be pinned: 1 adapters are"):
        adapters.pin(load(B), B.name)
    engine.add(request(1, 5, 3))
    engine.run()
    assert loaded_keys(engine) == {"A"}, "loaded beside other requests"
    for number, adapter in enumerate([B, C, D, B, C], start=2):
        engine.add(request(number, 5, 3, adapter=adapter))
        engine.run()
    assert "A" in engine.worker.preparations.slots.values() and "A" in loaded_keys(engine)
    adapters.unpin("A")
    for number, adapter in enumerate([B, C], start=10):
        engine.add(request(number, 5, 3, adapter=adapter))
        engine.run()
    assert "A" not in loaded_keys(engine)
    finish_all(engine)


def test_a_pin_whose_load_fails_ends() -> None:
    engine = engine_with(2, 2)
    adapters = engine.scheduler.preparations
    engine.worker.preparations.failing = {"A": "gone"}
    adapters.pin(load(A), A.name)
    engine.add(request(1, 5, 9))
    finish_all(engine)
    assert not adapters.by_key
    adapters.pin(load(B), B.name)


def test_prompt_adapters_need_no_slot() -> None:
    engine = engine_with(1, 1)
    engine.add(request(1, 5, 9, adapter=prompt_adapter("P")))
    engine.add(request(2, 5, 9, adapter=prompt_adapter("Q")))
    engine.add(request(3, 5, 9, adapter=A))
    engine.run()
    assert any(len(engine.computed(plan)) == 3 for plan in engine.plans)
    assert (stats(engine).in_slots, stats(engine).in_host) == (1, 3)
    engine.add(request(4, 5, 9, adapter=prompt_adapter("R")))
    finish_all(engine)
    assert loaded_keys(engine) == {"A", "Q", "R"}


def test_adapters_of_a_kind_that_is_off_are_refused() -> None:
    engine = make()
    assert engine.add(request(1, 5, adapter=A)) and not engine.scheduler.queues.groups
    options = adapter_options(1).model_copy(update={"enable_prompt_adapter": False})
    other = make(adapters=options)
    other.add(request(1, 5, adapter=prompt_adapter("P")))
    for refusing, named in ((engine, "enable_lora"), (other, "enable_prompt_adapter")):
        refusing.run()
        answer = refusing.answers[1]
        assert answer.group_reason == "ignored" and named in (answer.error or "")


def test_a_load_is_done_when_all_workers_have_reported_it() -> None:
    loads = WorkerReports(3)

    def combine(own: StepResult, *others: tuple[int, StepResult]) -> StepResult:
        loads.combine(own, others, 2)
        return own

    def done(*keys: str, **errors: str) -> StepResult:
        failures = {key: SequenceFailure(text, ADAPTER) for key, text in errors.items()}
        return StepResult(1, prepared=list(keys), prepare_errors=failures)

    assert combine(done("a", "b"), (0, done("b"))) == done()
    assert combine(done(), (1, done("a", "b"))) == done("b")
    assert combine(done("c"), (0, done("a", c="gone")), (1, done())) == done("a")
    assert combine(done(), (1, done("c"))) == done(c="gone")


def test_statistics_of_replicas_are_added() -> None:
    one, two = (
        AdapterStats(1, 2, 3, seconds=1.0, longest_seconds=0.5),
        AdapterStats(1, seconds=2.0, longest_seconds=2.0),
    )
    total = sum_stats([SchedulerStats(adapters=one), SchedulerStats(adapters=two), SchedulerStats()])
    assert total.adapters == AdapterStats(2, 2, 3, seconds=3.0, longest_seconds=2.0)
    assert sum_stats([SchedulerStats()]).adapters is None


def test_plans_and_results_with_adapters_go_through_messages() -> None:
    engine = engine_with(1)
    engine.add(request(1, 5, 3, adapter=A))
    plan = engine.step()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=type(plan)) == plan
    finish_all(engine)
    assert engine.scheduler.preparations.by_key["A"].state is PreparationState.READY


# A thousand adapters, a few of which are asked for most of the time: nothing is lost, and figures of how it goes.


@dataclass(frozen=True)
class Traffic:
    """Requests for adapters whose frequency falls as 1 / rank ** exponent, and what there is for them."""

    num_adapters: int = 1000
    exponent: float = 1.0
    max_loras: int = 16
    max_cpu_loras: int = 128
    requests: int = 5000
    #: Mean of the requests that arrive in a step.
    rate: float = 1.0
    #: Share of requests without adapter.
    base: float = 0.1
    steps_per_load: int = 3
    max_num_seqs: int = 32
    max_tokens: int = 16
    #: Seconds that a step takes on the clock of the ageing limit, and that limit.
    step_seconds: float = 0.05
    aging_limit: float | None = 60.0


@dataclass(frozen=True)
class Figures:
    """What became of the traffic."""

    stats: AdapterStats
    #: Admissions whose adapter was in host memory when its request arrived.
    host_hits: int
    steps: int
    waits: int
    #: Steps between arrival and first token of requests: median, of 99 in 100, and most.
    median_wait: int
    p99_wait: int
    longest_wait: int
    #: Sequences in a step, on average.
    mean_batch: float

    def __str__(self) -> str:
        s = self.stats
        admissions = s.slot_hits + s.slot_misses
        return (
            f"{self.steps} steps of {self.mean_batch:.1f} sequences; {admissions} admissions with an adapter: "
            f"{s.slot_hits / admissions:.1%} found it in a slot, {self.host_hits / admissions:.1%} in host memory or a "
            f"slot when they arrived; {s.loads} loads, {s.slot_evictions} slots and {s.host_evictions} places in host "
            f"memory went to others; {self.waits} steps waited for a load; first token after {self.median_wait} steps "
            f"(median), {self.p99_wait} (p99), {self.longest_wait} (most)"
        )


def simulate(traffic: Traffic, seed: int = 0) -> Figures:
    """Serves the traffic; every request gets the tokens that it gets alone."""
    rng = random.Random(seed)
    options = SchedulerOptions(
        max_num_seqs=traffic.max_num_seqs, max_num_batched_tokens=256, aging_limit=traffic.aging_limit
    )
    kept = adapter_options(traffic.max_loras, traffic.max_cpu_loras)
    worker = FakePreparations(limits_for(kept), traffic.steps_per_load)
    manager = BlockManager(1000, BLOCK, num_host_blocks=100)
    engine = Engine(manager, options, 100, preparations=worker)
    refs = [lora(f"adapter {i}") for i in range(traffic.num_adapters)]
    weights = list(itertools.accumulate(1 / (i + 1) ** traffic.exponent for i in range(traffic.num_adapters)))
    arrived: dict[int, int] = {}
    waits: list[int] = []
    started: set[int] = set()
    steps = host_hits = batch = 0
    while len(arrived) < traffic.requests or engine.scheduler.has_work:
        count = int(rng.expovariate(1 / (traffic.rate + 0.5))) if len(arrived) < traffic.requests else 0
        for _ in range(count):
            number = len(arrived)
            adapter = None if rng.random() < traffic.base else rng.choices(refs, cum_weights=weights)[0]
            host_hits += adapter is not None and adapter.key in worker.prepared
            max_tokens = rng.randint(1, 2 * traffic.max_tokens)
            engine.add(request(number, rng.randint(4, 24), max_tokens, arrival=engine.now, adapter=adapter))
            arrived[number] = steps
        if engine.scheduler.has_work:
            plan = engine.step()
            batch += len(plan.seq_ids)
            for group in engine.computed(plan):
                if group not in started:
                    started.add(group)
                    waits.append(steps - arrived[group])
        steps += 1
        engine.now += traffic.step_seconds
        if steps % 50 == 0:
            check_accounting(engine)
    check_nothing_held(engine)
    for answer in engine.answers.values():
        assert answer.reasons == {0: "length"}
        assert answer.tokens[0] == tokens_alone(answer.request, 0, engine.max_model_len)
    waits.sort()
    stats = engine.scheduler.counts().adapters
    assert stats is not None
    return Figures(
        stats,
        host_hits,
        steps,
        worker.num_waits,
        waits[len(waits) // 2],
        waits[len(waits) * 99 // 100],
        waits[-1],
        batch / steps,
    )


def test_many_adapters_small() -> None:
    figures = simulate(Traffic(num_adapters=100, max_loras=4, max_cpu_loras=12, requests=300, max_num_seqs=12))
    assert figures.stats.slot_hits + figures.stats.slot_misses > 200
    assert figures.stats.host_evictions and figures.stats.slot_evictions


@pytest.mark.slow
@pytest.mark.parametrize("aging_limit", [None, 5.0, 60.0])
@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_a_thousand_adapters(exponent: float, rate: float, aging_limit: float | None) -> None:
    traffic = Traffic(exponent=exponent, rate=rate, aging_limit=aging_limit)
    print(f"\n{traffic}\n{simulate(traffic)}")
