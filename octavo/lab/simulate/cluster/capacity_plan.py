"""How many replicas a given traffic needs to keep limits of latency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.simulate.cluster.cluster_figures import ClusterFigures
from octavo.lab.simulate.cluster.cluster_run import simulate_cluster
from octavo.lab.simulate.cluster.spec import MOST_REPLICAS, ClusterSpec, LatencyLimits, stated_limits
from octavo.lab.simulate.engine import SimulatedEngine
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import Day, Steps
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload

#: Requests that are tried alone where no number of replicas suffices.
_MOST_ALONE = 2000
#: Requests of a plan that may choose how many: at first, and up to which they double; and of two periods of arrivals.
_FIRST, _MOST, _MOST_OF_PERIODS = 1000, 16_000, 256_000


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A number of replicas that was tried; times in seconds."""

    replicas: int
    good_share: float
    goodput: float
    goodput_per_replica: float
    ttft_p99: float
    tpot_p99: float
    utilisation: float
    enough: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the least number that is enough, and what was tried for it, in order of the numbers."""

    #: None: none of at most ``most`` is.
    replicas: int | None
    share: float
    most: int
    tried: list[Tried]
    #: Where there is no answer: the share of requests (of the first 2,000) that meet the limits alone on a replica.
    good_alone: float | None = None

    @property
    def good_share(self) -> float:
        """Of the requests with the least number that is enough; 0 where none is."""
        return next((tried.good_share for tried in self.tried if tried.replicas == self.replicas), 0.0)


class TrafficPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a traffic: the most that any seed needs."""

    #: None: for some seed none of at most ``most`` is enough.
    replicas: int | None
    #: Requests of each simulation of ``plans``, one for each seed.
    requests: int
    seeds: list[int]
    plans: list[Plan]
    #: Whether longer runs would have the same answer, as far as two lengths tell; None if their length was given.
    settled: bool | None


def plan_traffic(
    spec: ClusterSpec,
    options: EngineConfig,
    load: Workload,
    *,
    repeats: int = 3,
    settle: bool = False,
    share: float = 0.99,
    most: int = 1024,
    on_plan: Callable[[int, int], None] = lambda requests, seed: None,
    on_tried: Callable[[Tried], None] = lambda tried: None,
) -> TrafficPlan:
    """Finds the least number of replicas for a load under several seeds; see ``plan_replicas``.

    A run begins and ends with empty replicas, and a queue that grows shows only after a while, so a short run needs too
    few. With ``settle`` the number of requests is doubled, from at least two periods of arrivals that vary, until the
    number of replicas stays and the share of good requests does too: what the ends of a run add is inversely
    proportional to its length, so as much again as the last doubling took away is all that longer runs still take.

    Args:
        spec: see ``plan_replicas``; ``options``, ``share``, ``most`` and ``on_tried`` too.
        options: see there.
        load: the traffic; its seed and those after it count.
        repeats: how many seeds.
        settle: whether requests are as many as it takes, whatever ``load`` has; it must have arrivals with a rate.
        share: see there.
        most: see there.
        on_plan: called before each plan with its number of requests and its seed.
        on_tried: see there.

    Raises:
        ConfigError: see there; or two periods of the arrivals have too many requests.
    """

    def plan(requests: int, seed: int, start: int) -> Plan:
        on_plan(requests, seed)
        items = replace(load, requests=requests, seed=seed)
        return plan_replicas(spec, options, items, share=share, most=most, start=start, on_tried=on_tried)

    count, settled = (first_requests(load), False) if settle else (len(load), None)
    found = plan(count, load.seed, 1)
    while settle and found.replicas is not None and not settled and 2 * count <= _MOST:
        before, count = found, 2 * count
        found = plan(count, load.seed, found.replicas)
        settled = found.replicas == before.replicas and 2 * found.good_share - before.good_share >= share
    plans, seeds = [found], [load.seed]
    while found.replicas is not None and len(plans) < repeats:
        seeds.append(seeds[-1] + 1)
        found = plan(count, seeds[-1], found.replicas)
        plans.append(found)
    needed = [p.replicas for p in plans if p.replicas is not None]
    enough = max(needed) if len(needed) == len(plans) else None
    return TrafficPlan(replicas=enough, requests=count, seeds=seeds, plans=plans, settled=settled)


def first_requests(load: Workload) -> int:
    """Requests to begin with where their number is to be found: at least two periods of arrivals that vary."""
    arrivals = load.arrivals
    period = arrivals.period if isinstance(arrivals, Day) else 0.0
    if isinstance(arrivals, Steps):
        period = arrivals.seconds * len(arrivals.rates)
    rate = arrivals.mean_rate if arrivals is not None else math.inf
    count = max(_FIRST, math.ceil(2 * period * rate)) if period else _FIRST
    if count > _MOST_OF_PERIODS:
        raise ConfigError(f"two periods of these arrivals have {count} requests: say how many with num_requests")
    return count


def plan_replicas(
    spec: ClusterSpec,
    options: EngineConfig,
    items: Iterable[WorkItem],
    *,
    share: float = 0.99,
    most: int = 1024,
    start: int = 1,
    on_tried: Callable[[Tried], None] = lambda tried: None,
) -> Plan:
    """Finds the least number of replicas with which at least ``share`` of the requests meet ``spec.limits``.

    Moves away from ``start`` in steps that double until one number is enough and another is not, then bisects: the
    number before the answer was tried, and is not enough. That more replicas are not worse is assumed for the others.

    Args:
        spec: the cluster, with the profile of its first replica for all.
        options: see ``simulate_cluster``.
        items: each iteration gives the same.
        share: of all requests, those that fail included.
        most: replicas to try at most.
        start: to try first: near the answer it saves simulations.
        on_tried: called with each number that was tried.

    Raises:
        ConfigError: a value is wrong, there are neither limits nor targets, or an item is not valid.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of requests that meet the limits must be above 0 and at most 1, not {share:g}")
    if not 1 <= most <= MOST_REPLICAS:
        raise ConfigError(f"the most replicas must be from 1 to {MOST_REPLICAS}, not {most}")
    if spec.limits == LatencyLimits() and not any(i.ttft_target or i.tpot_target for i in items):
        raise ConfigError("nothing limits the number of replicas: give ttft_limit, tpot_limit, or targets of requests")
    profile = spec.replicas[0][1]
    tried: dict[int, Tried] = {}

    def enough(count: int) -> bool:
        figures = simulate_cluster(replace(spec, replicas=((count, profile),)), options, items)
        tried[count] = _tried(count, figures, share)
        on_tried(tried[count])
        return tried[count].enough

    misses, count, step = 0, min(start, most), 1
    if enough(count):
        while count - step > 0 and enough(count - step):
            count, step = count - step, 2 * step
        misses = max(0, count - step)
    else:
        misses = count
        while misses < most and not enough(count := min(misses + step, most)):
            misses, step = count, 2 * step
        if misses == most:
            alone = _good_alone(spec, profile, options, items)
            return Plan(replicas=None, share=share, most=most, tried=_in_order(tried), good_alone=alone)
    while count - misses > 1:
        middle = (count + misses) // 2
        if enough(middle):
            count = middle
        else:
            misses = middle
    return Plan(replicas=count, share=share, most=most, tried=_in_order(tried))


def _tried(count: int, f: ClusterFigures, share: float) -> Tried:
    busy = sum(replica.busy for replica in f.replicas)
    return Tried(
        replicas=count,
        good_share=f.good_share,
        goodput=f.goodput,
        goodput_per_replica=f.goodput_per_replica,
        ttft_p99=f.ttft.p99 if f.ttft is not None else 0.0,
        tpot_p99=f.tpot.p99 if f.tpot is not None else 0.0,
        utilisation=busy / f.replica_seconds if f.replica_seconds else 0.0,
        enough=f.good_share >= share,
    )


def _in_order(tried: dict[int, Tried]) -> list[Tried]:
    return [tried[count] for count in sorted(tried)]


def _good_alone(spec: ClusterSpec, profile: StepProfile, options: EngineConfig, items: Iterable[WorkItem]) -> float:
    """The share of the first requests that meet the limits each alone, with nothing in the prefix cache."""
    good = count = 0
    options = options.model_copy(update={"enable_prefix_caching": False})
    engine = SimulatedEngine(profile, options, mode=spec.mode, max_tokens=stated_limits(spec.max_tokens))
    for item in itertools.islice(items, _MOST_ALONE):
        engine.wait_until(item.at)
        sent = engine.now
        engine.wait_until(sent + engine.overhead.arrival)
        request = engine.add(count, item)
        while engine.has_work:
            engine.step()
        each = (request.last - request.first) / (request.tokens - 1) if request.tokens > 1 else 0.0
        good += request.finish_reason in ("stop", "length") and spec.limits.met(item, request.first - sent, each)
        count += 1
    return good / count if count else 0.0
