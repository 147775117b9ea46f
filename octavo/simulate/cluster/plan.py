"""How many replicas a given traffic needs to keep limits of latency."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.simulate.cluster.figures import ClusterFigures
from octavo.simulate.cluster.run import simulate_cluster
from octavo.simulate.cluster.spec import MOST_REPLICAS, ClusterSpec, Limits, stated_limits
from octavo.simulate.engine import SimulatedEngine
from octavo.simulate.profile import StepProfile
from octavo.workloads.items import WorkItem

#: Requests that are tried alone where no number of replicas suffices.
_MOST_ALONE = 2000


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


def plan_replicas(
    spec: ClusterSpec,
    options: EngineConfig,
    items: Iterable[WorkItem],
    *,
    share: float = 0.99,
    most: int = 1024,
    on_tried: Callable[[Tried], None] = lambda tried: None,
) -> Plan:
    """Finds the least number of replicas with which at least ``share`` of the requests meet ``spec.limits``.

    Doubles the number until it is enough, then bisects: the number before the answer was tried, and is not enough.
    That more replicas are not worse is assumed for the others.

    Args:
        spec: the cluster, with the profile of its first replica for all.
        options: see ``simulate_cluster``.
        items: each iteration gives the same.
        share: of all requests, those that fail included.
        most: replicas to try at most.
        on_tried: called with each number that was tried.

    Raises:
        ConfigError: a value is wrong, there are neither limits nor targets, or an item is not valid.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of requests that meet the limits must be above 0 and at most 1, not {share:g}")
    if not 1 <= most <= MOST_REPLICAS:
        raise ConfigError(f"the most replicas must be from 1 to {MOST_REPLICAS}, not {most}")
    if spec.limits == Limits() and not any(i.ttft_target or i.tpot_target for i in items):
        raise ConfigError("nothing limits the number of replicas: give ttft_limit, tpot_limit, or targets of requests")
    profile = spec.replicas[0][1]
    tried: dict[int, Tried] = {}

    def enough(count: int) -> bool:
        figures = simulate_cluster(replace(spec, replicas=((count, profile),)), options, items)
        tried[count] = _tried(count, figures, share)
        on_tried(tried[count])
        return tried[count].enough

    misses, count = 0, 1
    while not enough(count):
        misses, count = count, min(2 * count, most)
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
