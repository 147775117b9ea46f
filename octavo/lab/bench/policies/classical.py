"""The classical scenarios: dense and sparse arrivals of short and long requests, as this comparison was published.

Memory never binds in them and lengths hardly vary. One addition: a request has one of three priorities at random, or
``static`` would be ``fcfs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.workloads.arrivals import Ticks
from octavo.lab.workloads.lengths import Poisson
from octavo.lab.workloads.sharing import RequestClass
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload

#: Random priorities, equally likely.
_CLASSES = tuple(RequestClass(priority=priority) for priority in range(3))


def _make(count: int, tokens: int, capacity: float, seed: int) -> Iterable[WorkItem]:
    """As many requests a second as there are requests; lengths of inputs and outputs Poisson around ``tokens``."""
    return Workload(
        requests=count,
        arrivals=Ticks(count),
        inputs=Poisson(tokens),
        outputs=Poisson(tokens),
        classes=_CLASSES,
        seed=seed,
    )


def _scenario(density: str, length: str, count: int, tokens: int) -> Scenario:
    about = (
        f"{count} requests at {count} a second, gaps of Poisson distributed milliseconds; inputs and outputs Poisson "
        f"around {tokens} tokens"
    )
    return Scenario(f"{density}-{length}", about, {}, partial(_make, count, tokens))


CLASSICAL: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _scenario("dense", "short", 1000, 20),
        _scenario("dense", "long", 1000, 80),
        _scenario("sparse", "short", 100, 20),
        _scenario("sparse", "long", 100, 80),
    )
}
