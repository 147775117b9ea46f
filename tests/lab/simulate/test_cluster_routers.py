"""Routers of simulated clusters, each for what it is made for; and the number of replicas for a traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.cluster.capacity_plan import plan_replicas, plan_traffic
from octavo.lab.simulate.cluster.cluster import Cluster
from octavo.lab.simulate.cluster.cluster_figures import ClusterFigures
from octavo.lab.simulate.cluster.cluster_run import simulate_cluster
from octavo.lab.simulate.cluster.replica import Replica
from octavo.lab.simulate.cluster.routers import RouterSettings, SimulatedRouter
from octavo.lab.simulate.cluster.spec import ClusterSpec, LatencyLimits
from octavo.lab.workloads.arrivals import parse_arrivals
from octavo.lab.workloads.lengths import Constant, Uniform
from octavo.lab.workloads.sharing import Conversations
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload
from tests.lab.simulate.test_profile import profile
from tests.lab.simulate.test_simulated_engine import item

OPTIONS = make_config(model="none")
TALK = Workload(
    requests=150,
    arrivals=parse_arrivals("poisson", 4, None),
    inputs=Uniform(40, 120),
    outputs=Uniform(8, 40),
    conversations=Conversations(Constant(4), think=3.0),
    seed=2,
)


class Anywhere(SimulatedRouter):
    """At random."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._random = random.Random(settings.seed)

    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        return replicas[int(self._random.random() * len(replicas))]


class Nowhere(SimulatedRouter):
    """A replica that takes no requests."""

    def route(self, item: WorkItem, replicas: Sequence[Replica]) -> Replica:
        chosen = replicas[0]
        chosen.state = "draining"
        return chosen


def on(load: Workload | list[WorkItem], count: int, router: str, **spec: object) -> ClusterFigures:
    return simulate_cluster(ClusterSpec(((count, profile()),), router=router, **spec), OPTIONS, load)  # type: ignore[arg-type]


def test_the_better_of_two_beats_any_at_the_99th_percentile() -> None:
    load = Workload(
        requests=400,
        arrivals=parse_arrivals("poisson", 90, None),
        inputs=Uniform(10, 200),
        outputs=Uniform(1, 60),
        seed=1,
    )
    drawn, chosen = on(load, 8, f"{__name__}:Anywhere"), on(load, 8, "power_of_two")
    assert drawn.ttft is not None and chosen.ttft is not None and drawn.e2e is not None and chosen.e2e is not None
    assert chosen.ttft.p99 < drawn.ttft.p99 and chosen.e2e.p99 < drawn.e2e.p99
    assert chosen.imbalance < drawn.imbalance


@pytest.mark.parametrize("router", ["prefix", "session"])
def test_conversations_find_their_prefixes_where_they_were(router: str) -> None:
    sticky, turns = on(TALK, 4, router), on(TALK, 4, "round_robin")
    assert sticky.prefix_hit_tokens > 1.5 * turns.prefix_hit_tokens > 0
    assert sticky.prefix_hit_share > 1.5 * turns.prefix_hit_share


def test_the_least_loaded_gets_the_next_one_when_lengths_vary() -> None:
    load = [item(i / 100, 400 if i % 3 == 0 else 10, 100 if i % 3 == 0 else 2) for i in range(120)]
    turns, least = on(load, 3, "round_robin"), on(load, 3, "least_loaded")
    assert [r.given for r in turns.replicas] == [40, 40, 40]
    assert turns.imbalance > 2.5 and least.imbalance < 1.2


def test_a_session_stays_and_comes_back_to_its_replica_after_a_failure() -> None:
    cluster = Cluster(ClusterSpec(((4, profile()),), router="session"), OPTIONS)
    router, replicas = cluster._routers["both"], list(cluster.replicas.values())
    items = [item(0, 5, 5, session=f"s{i}") for i in range(300)]
    before = [router.route(one, replicas).number for one in items]
    assert {before.count(number) > 40 for number in range(4)} == {True}
    router.left(replicas[2])
    rest = [replicas[0], replicas[1], replicas[3]]
    away = [router.route(one, rest).number for one in items]
    assert all(now == then or then == 2 for now, then in zip(away, before, strict=True)) and 2 not in away
    router.joined(replicas[2])
    assert [router.route(one, replicas).number for one in items] == before


def test_a_router_that_chooses_what_takes_no_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no requests"):
        on(TALK, 2, f"{__name__}:Nowhere")


def test_the_plan_is_the_least_number_that_keeps_the_limits() -> None:
    load = Workload(
        requests=60,
        arrivals=parse_arrivals("poisson", 60, None),
        inputs=Uniform(10, 200),
        outputs=Uniform(2, 30),
        seed=4,
    )
    spec = ClusterSpec(((1, profile()),), limits=LatencyLimits(ttft=0.3, tpot=0.05))
    plan = plan_replicas(spec, OPTIONS, load, share=0.95)
    assert plan.replicas is not None and plan.replicas > 1
    enough, fewer = (on(load, plan.replicas - less, "least_loaded", limits=spec.limits) for less in (0, 1))
    assert enough.good_share >= 0.95 > fewer.good_share
    by_number = {tried.replicas: tried for tried in plan.tried}
    assert list(by_number) == sorted(by_number)
    assert by_number[plan.replicas].goodput == enough.goodput
    assert not by_number[plan.replicas - 1].enough
    assert plan == plan_replicas(spec, OPTIONS, load, share=0.95)


@pytest.mark.slow
def test_wherever_it_starts_the_plan_is_the_same_number() -> None:
    load = Workload(requests=40, arrivals=parse_arrivals("poisson", 60, None), inputs=Uniform(10, 200), seed=4)
    spec = ClusterSpec(((1, profile()),), limits=LatencyLimits(ttft=0.3))
    plans = [plan_replicas(spec, OPTIONS, load, start=start) for start in (1, 3, 12)]
    assert len({plan.replicas for plan in plans}) == 1
    for plan in plans:
        tried = {t.replicas: t.enough for t in plan.tried}
        assert plan.replicas is not None and tried[plan.replicas] and not tried[plan.replicas - 1]


def test_requests_double_until_no_more_replicas_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.simulate.cluster.capacity_plan._FIRST", 20)
    load = Workload(
        requests=20, arrivals=parse_arrivals("poisson", 40, None), inputs=Constant(100), outputs=Constant(40)
    )
    spec = ClusterSpec(((1, profile()),), limits=LatencyLimits(ttft=0.5))
    begun: list[tuple[int, int]] = []
    found = plan_traffic(spec, OPTIONS, load, settle=True, on_plan=lambda *of: begun.append(of))
    assert found.settled and found.requests > 20 and found.seeds == [0, 1, 2]
    assert begun[-3:] == [(found.requests, seed) for seed in range(3)]
    assert [count for count, seed in begun if seed == 0] == [20 << i for i in range(len(begun) - 2)]
    assert found.replicas == max(plan.replicas or 0 for plan in found.plans)
    short = plan_replicas(spec, OPTIONS, load)
    assert short.replicas is not None and short.replicas <= found.replicas, "a queue has no time to grow in so few"


def test_arrivals_that_vary_are_planned_for_over_whole_periods() -> None:
    spec = ClusterSpec(((1, profile()),), limits=LatencyLimits(ttft=10.0))
    load = Workload(requests=9, arrivals=parse_arrivals("steps:5,20,180"), inputs=Constant(1), outputs=Constant(1))
    begun: list[int] = []
    plan_traffic(spec, OPTIONS, load, settle=True, repeats=1, on_plan=lambda count, _: begun.append(count))
    assert begun == [2000, 4000]
    day = replace(load, arrivals=parse_arrivals("day:1,9"))
    with pytest.raises(ConfigError, match="864000 requests: say how many"):
        plan_traffic(spec, OPTIONS, day, settle=True)


def test_a_limit_that_one_request_alone_misses_has_no_plan() -> None:
    load = replace(TALK, requests=20, conversations=None)
    spec = ClusterSpec(((1, profile()),), limits=LatencyLimits(ttft=1e-6))
    plan = plan_replicas(spec, OPTIONS, load, most=3)
    assert plan.replicas is None and plan.good_alone == 0.0 and [t.replicas for t in plan.tried] == [1, 2, 3]
    with pytest.raises(ConfigError, match="nothing limits"):
        plan_replicas(replace(spec, limits=LatencyLimits()), OPTIONS, load)
    with pytest.raises(ConfigError, match="share"):
        plan_replicas(spec, OPTIONS, load, share=0)
