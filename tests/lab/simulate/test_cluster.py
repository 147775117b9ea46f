"""Clusters in the simulator: every request ends once, equal calls give equal figures, one replica is one engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.cluster.cluster import Cluster
from octavo.lab.simulate.cluster.cluster_figures import ClusterFigures
from octavo.lab.simulate.cluster.cluster_run import record_cluster, simulate_cluster
from octavo.lab.simulate.cluster.spec import (
    Autoscale,
    ClusterSpec,
    LatencyLimits,
    Outage,
    RandomOutages,
    Transfer,
    parse_autoscale,
    parse_outages,
    parse_replicas,
)
from octavo.lab.simulate.run import simulate
from octavo.lab.workloads.arrivals import parse_arrivals
from octavo.lab.workloads.lengths import Constant, Uniform
from octavo.lab.workloads.sharing import Conversations
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload
from tests.lab.simulate.test_profile import profile
from tests.lab.simulate.test_simulated_engine import UNIT, item

LOAD = Workload(
    requests=80, arrivals=parse_arrivals("poisson", 12, None), inputs=Uniform(1, 300), outputs=Uniform(1, 60), seed=5
)
TALK = replace(LOAD, conversations=Conversations(Constant(3), think=2.0), inputs=Uniform(8, 80), outputs=Uniform(8, 40))


def on_cluster(
    items: Iterable[WorkItem], count: int = 3, prefill: int = 0, changes: Any = None, options: Any = None, **spec: Any
) -> ClusterFigures:
    one = profile(**(changes or {}))
    made = ClusterSpec(((count, one),), ((prefill, one),) if prefill else (), **spec)
    return simulate_cluster(made, make_config(model="none", **(options or {})), items)


@pytest.mark.parametrize(
    ("router", "mode", "ahead"),
    [
        ("least_loaded", "offline", True),
        ("prefix", "server", False),
        *(
            pytest.param(router, *how, marks=pytest.mark.slow)
            for router in ("round_robin", "power_of_two", "session")
            for how in (("offline", True), ("server", False))
        ),
    ],
)
def test_a_cluster_of_one_replica_is_one_engine(router: str, mode: Any, ahead: bool) -> None:
    server = {"request": 0.002, "step": 0.001, "answer": 0.003, "arrival": 0.004}
    options = make_config(model="none", num_gpu_blocks_override=60, async_scheduling=ahead)
    one = profile(server=server)
    alone = simulate(one, options, TALK, mode=mode)
    found = simulate_cluster(ClusterSpec(((1, one),), router=router, mode=mode), options, TALK)
    assert alone.preemptions_by_recompute + alone.preemptions_by_swap > 0
    for name in alone.__struct_fields__:
        if name != "series":
            assert getattr(found, name) == getattr(alone, name), name
    assert {**found.series, "replicas": None} == {**alone.series, "replicas": None}
    assert found.replicas[0].utilisation <= 1.0 and found.imbalance == 1.0


@pytest.mark.parametrize(
    ("router", "prefill"), [("power_of_two", 0), pytest.param("prefix", 2, marks=pytest.mark.slow), ("session", 2)]
)
def test_equal_seeds_give_equal_figures(router: str, prefill: int) -> None:
    spec: dict[str, Any] = {"router": router, "decode_router": router, "random_outages": RandomOutages(3, 1)}
    first, second = (on_cluster(TALK, 3, prefill, **spec) for _ in range(2))
    assert first == second
    assert first.requests + sum(first.failed.values()) == 80
    assert first != on_cluster(TALK, 3, prefill, **spec, seed=1)


_outages = st.lists(
    st.builds(
        Outage,
        replica=st.integers(0, 3),
        at=st.floats(0, 8),
        seconds=st.one_of(st.floats(0.01, 5), st.just(math.inf)),
    ),
    max_size=12,
)


@given(
    outages=_outages,
    prefill=st.sampled_from([0, 2]),
    router=st.sampled_from(["least_loaded", "session", "round_robin"]),
    scaled=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_every_request_ends_once_whatever_fails(outages: list[Outage], prefill: int, router: str, scaled: bool) -> None:
    load = replace(LOAD, requests=40)
    one = profile()
    spec = ClusterSpec(
        ((4 - prefill, one),),
        ((prefill, one),) if prefill else (),
        router=router,
        outages=tuple(outages),
        autoscale=Autoscale(1, 6, 4, start=0.5, every=0.25, calm=0.5) if scaled and not prefill else None,
    )
    ended: list[int] = []
    cluster = Cluster(spec, make_config(model="none", num_gpu_blocks_override=60))
    cluster.run(enumerate(load))
    for replica in cluster.replicas.values():
        ended += replica.done.number
        assert not replica.jobs and replica.outstanding == 0
        assert replica.engine.blocks.state.used == 0 or replica.state in ("down", "stopped")
    assert len(ended) == len(set(ended))
    assert len(ended) + cluster.lost.failed["no replica"] == 40
    if (scaled and not prefill) or all(outage.seconds < math.inf for outage in outages):
        assert len(ended) == 40, "there always is a replica, sooner or later"
    lengths = [one.output_len for one in load]
    for replica in cluster.replicas.values():
        assert all(n == lengths[k] for k, n in zip(replica.done.number, replica.done.outputs, strict=True))
    assert cluster.num_open == 0 and not cluster.jobs_without_replica


def test_a_lost_request_goes_on_with_the_tokens_that_were_sent() -> None:
    # Steps of 1 s. Both go to other replicas; the one on replica 0 is lost after 2.5 s with two of its 4 tokens.
    found = on_cluster([item(0, 10, 4), item(0, 10, 4)], 2, changes=UNIT, outages=(Outage(0, 2.5, 100),))
    # Replica 1 is in its third step: the request that was lost goes on with the fourth, and ends with the fifth.
    assert found.requests == 2 and found.resumed == 1
    assert found.ttft is not None and (found.ttft.mean, found.ttft.max) == (1, 1)
    assert found.e2e is not None and found.e2e.max == 5
    assert found.itl is not None and found.itl.max == 2
    assert found.lost_tokens == 10 + 2, "the prompt and two decodes; the third step was not done"
    assert found.replicas[0].seconds == 2.5 and found.replica_seconds == 2.5 + 5
    waited = on_cluster([item(0, 10, 4)], 1, changes=UNIT, outages=(Outage(0, 2.5, 1),))
    assert waited.e2e is not None and waited.e2e.max == 3.5 + 2
    never = on_cluster([item(0, 10, 4), item(5, 10, 4)], 1, changes=UNIT, outages=(Outage(0, 2.5),))
    assert never.failed == {"no replica": 2}


def test_what_goes_on_is_computed_before_what_came_later() -> None:
    """Of two replicas for one request at a time, the one that is left takes the earlier request first."""
    items = [item(0, 10, 4), item(0, 10, 2), item(1.2, 10, 4)]
    found, done = record_cluster(
        ClusterSpec(((2, profile(**UNIT)),), outages=(Outage(0, 1.5),)),
        make_config(model="none", max_num_seqs=1),
        items,
    )
    assert found.resumed == 1
    # The second ends at 2 s; the first has one token, and its other three at 3 to 5 s; then comes the third.
    assert dict(zip(done.number, done.last, strict=True)) == {1: 2, 0: 5, 2: 9}


def test_a_prompt_computed_elsewhere_continues_with_its_kv_cache() -> None:
    # Steps of 1 s; 100 bytes a token at 400 bytes/s. The prompt ends at 1 s, is sent until 3.5 s and is there at 4 s;
    # 3 more tokens follow. The second prompt is computed from 1 s to 2 s, and its 10 tokens wait for the first's.
    changes = {**UNIT, "kv_bytes_per_token": 100}
    items = [item(0, 10, 4), item(0.5, 10, 2)]
    options = {"num_host_blocks_override": 100}
    found = on_cluster(items, 1, 1, changes, options, transfer=Transfer(400, 0.5))
    assert found.ttft is not None and (found.ttft.mean, found.ttft.max) == (1.25, 1.5)
    assert found.transfers == 2 and found.transferred_bytes == 2000 and found.mean_transfer == ((4 - 1) + (6.5 - 2)) / 2
    # The first has its last token at 7 s. The second arrives in the step from 6 s to 7 s, and ends with the next.
    assert found.e2e is not None and (found.e2e.max, found.seconds) == (7.5, 8)
    assert found.e2e.mean == (7 + 7.5) / 2
    assert found.output_tokens == 6 and [r.steps for r in found.replicas] == [2, 4]
    assert found.itl is not None and found.itl.max == 8 - 2
    assert found.preemptions_by_swap == 0 and found.recomputed_tokens == 0


def test_what_arrives_waits_for_host_blocks_and_one_that_never_fits_is_refused() -> None:
    load = [item(0, 64, 20) for _ in range(12)]
    few = on_cluster(load, 1, 1, options={"num_host_blocks_override": 4, "num_gpu_blocks_override": 12})
    assert few.requests == 12 and few.output_tokens == 240
    with pytest.raises(ConfigError, match="swap_space"):
        on_cluster([item(0, 100, 5)], 1, 1, options={"num_host_blocks_override": 4})
    with pytest.raises(ConfigError, match="host blocks"):
        on_cluster(load, 1, 1, options={"num_host_blocks_override": 0})


def test_autoscaling_follows_the_load_and_drains_when_it_is_gone() -> None:
    wave = [item(at / 10, 50, 40) for at in range(200)] + [item(60 + at, 50, 40) for at in range(30)]
    scale = Autoscale(1, 6, 5, start=2, every=1, calm=4)
    found = on_cluster(wave, 1, changes={"fixed": 0.1}, autoscale=scale)
    assert found.requests == 230 and found.started >= 3 and found.drained >= 3
    assert max(found.series["replicas"]) > 2 and found.series["replicas"][-1] == 1
    fixed = on_cluster(wave, len(found.replicas), changes={"fixed": 0.1})
    assert found.replica_seconds < 0.7 * fixed.replica_seconds
    assert found.e2e is not None and fixed.e2e is not None and found.e2e.mean >= fixed.e2e.mean


def test_goodput_counts_requests_within_their_own_targets_or_the_limits() -> None:
    slow = item(0, 10, 4, ttft_target=0.5)
    items = [slow, item(10, 10, 4), item(20, 10, 4, ttft_target=3.0, tpot_target=0.9)]
    found = on_cluster(items, 1, changes=UNIT, limits=LatencyLimits(ttft=2.0, tpot=1.0))
    assert found.good == 1 and found.good_share == 1 / 3
    assert found.goodput == 1 / 24 and found.goodput_per_replica == 1 / 24


@pytest.mark.parametrize("router", ["session", pytest.param("round_robin", marks=pytest.mark.slow)])
def test_shares_of_the_replicas_in_processes_give_the_figures_of_one(router: str) -> None:
    spec = ClusterSpec(((4, profile()),), router=router)
    options = make_config(model="none")
    one, two = (simulate_cluster(spec, options, TALK, processes=n) for n in (1, 2))
    for name in one.__struct_fields__:
        if name not in ("series", "mean_running", "mean_blocks_used"):  # sampled
            assert getattr(one, name) == getattr(two, name), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_replicas("x", "y"), "COUNT"),
        (lambda: parse_replicas("0", "smollm2-135m-2-cores"), ""),
        (lambda: parse_outages(["3"]), "REPLICA@AT"),
        (lambda: parse_outages(["mtbf:3"]), "mttr"),
        (lambda: parse_autoscale("1,2"), "MIN,MAX"),
        (lambda: parse_autoscale("3,2,requests:4"), "MIN,MAX"),
        (lambda: ClusterSpec(()), "at least one"),
        (lambda: ClusterSpec(((2, profile()),), outages=(Outage(2, 1),)), "no replica 2"),
        (lambda: on_cluster(LOAD, 2, router="nearest"), "unknown router"),
        (lambda: on_cluster(LOAD, 2, router="json:JSONDecoder"), "not a class derived"),
        (lambda: on_cluster([item(3, 5, 5), item(1, 5, 5)]), "before"),
    ],
)
def test_wrong_values_are_refused(make: Any, message: str) -> None:
    if message:
        with pytest.raises(ConfigError, match=message):
            make()
    else:
        with pytest.raises(ConfigError, match="from 1"):
            ClusterSpec(make())
