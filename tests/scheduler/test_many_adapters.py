"""A thousand adapters, a few of which are asked for most of the time: nothing is lost, and figures of how it goes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from octavo.config.options import SchedulerOptions
from octavo.core.stats import AdapterStats
from octavo.memory.block_manager import BlockManager
from tests.scheduler.fake_preparations import FakePreparations, adapter_options, limits_for, lora
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, tokens_alone
from tests.scheduler.test_scenarios import BLOCK, request


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
