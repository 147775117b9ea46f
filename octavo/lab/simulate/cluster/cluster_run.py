"""A workload on a simulated cluster, in one process or in several, and its figures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.simulate.cluster.cluster import Cluster
from octavo.lab.simulate.cluster.cluster_figures import CellResult, ClusterFigures, figures_of, result_of
from octavo.lab.simulate.cluster.routers import SessionSticky, home, ring, router_class
from octavo.lab.simulate.cluster.spec import ClusterSpec
from octavo.lab.simulate.figures import Completions
from octavo.lab.workloads.work_items import WorkItem

#: Most processes.
_MOST_PROCESSES = 256


def simulate_cluster(
    spec: ClusterSpec, options: EngineConfig, items: Iterable[WorkItem], *, processes: int = 1
) -> ClusterFigures:
    """The figures of ``record_cluster``, which see."""
    return record_cluster(spec, options, items, processes=processes)[0]


def record_cluster(
    spec: ClusterSpec, options: EngineConfig, items: Iterable[WorkItem], *, processes: int = 1
) -> tuple[ClusterFigures, Completions]:
    """Runs items, in the order of their arrival, on a cluster; its figures, and the times of all requests.

    With several processes each simulates a cell: a share of the replicas with a router of its own, to which it is
    decided beforehand which requests go. With ``round_robin`` (where the cells have as many replicas each) and
    ``session``, a request goes to the same replica as with one router; with other routers this is a deployment of
    several router instances that get requests in turn. A request is retried within its cell.

    Args:
        spec: the cluster.
        options: those of scheduler and KV cache count, for every replica.
        items: each iteration gives the same; with several processes they are sent to others.
        processes: how many.

    Raises:
        ConfigError: a value or an item is not valid.
    """
    if not 1 <= processes <= _MOST_PROCESSES:
        raise ConfigError(f"processes must be from 1 to {_MOST_PROCESSES}, not {processes}")
    if processes == 1:
        cluster = Cluster(spec, options)
        cluster.run(enumerate(items))
        return figures_of([result_of(cluster)], spec.router)
    if options.kv_store is not None:
        raise ConfigError("replicas with a shared KV store are simulated in one process: leave processes at 1")
    members = _cells(spec, processes)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(_run_cell, spec, members, cell, options, items) for cell in range(processes)]
        return figures_of([run.result() for run in runs], spec.router)


def _cells(spec: ClusterSpec, count: int) -> dict[int, int]:
    """By replica: its cell; the replicas of a role are dealt to the cells in turn."""
    if spec.autoscale is not None:
        raise ConfigError("autoscaling looks at all replicas: leave processes at 1")
    members, dealt = {}, dict.fromkeys(("prefill", "decode", "both"), 0)
    for number, role, _ in spec.members():
        members[number] = dealt[role] % count
        dealt[role] += 1
    least = min(number for number in dealt.values() if number)
    if least < count:
        raise ConfigError(f"processes ({count}) must not be more than replicas ({least} that do the same)")
    return members


def _run_cell(
    spec: ClusterSpec, members: dict[int, int], cell: int, options: EngineConfig, items: Iterable[WorkItem]
) -> CellResult:
    own = [(number, role, profile) for number, role, profile in spec.members() if members[number] == cell]
    cluster = Cluster(
        replace(
            spec,
            prefill=tuple((1, profile) for _, role, profile in own if role == "prefill"),
            replicas=tuple((1, profile) for _, role, profile in own if role != "prefill"),
            numbers=tuple(number for number, _, _ in own),
            outages=tuple(outage for outage in spec.outages if members[outage.replica] == cell),
        ),
        options,
    )
    cluster.run(_share(spec, members, cell, items))
    return result_of(cluster)


def _share(
    spec: ClusterSpec, members: dict[int, int], cell: int, items: Iterable[WorkItem]
) -> Iterator[tuple[int, WorkItem]]:
    """The requests of a cell, with their numbers among all."""
    if issubclass(router_class(spec.router), SessionSticky):
        points = ring([number for number, role, _ in spec.members() if role != "decode"])
        return ((n, item) for n, item in enumerate(items) if members[home(points, item)] == cell)
    count = 1 + max(members.values())
    return ((n, item) for n, item in enumerate(items) if n % count == cell)
