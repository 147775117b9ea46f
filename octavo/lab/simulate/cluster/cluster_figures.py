"""The figures of a simulated cluster: those of a run, and of each replica."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from octavo.lab.simulate.cluster.cluster import Cluster
from octavo.lab.simulate.cluster.replica import Role, Totals
from octavo.lab.simulate.figures import Completions, Gaps, RunFigures, rates
from octavo.lab.simulate.run import mean_over_time


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica did."""

    number: int
    role: Role
    profile: str
    #: Requests given to it, again ones included; those that ended here as they should, and the good ones of them.
    given: int
    requests: int
    good: int
    #: Tokens of the prompts and outputs of those.
    tokens: int
    steps: int
    prefix_hit_tokens: int
    preemptions: int
    failures: int
    #: Seconds in use, from its start to its end; of steps; and their share.
    seconds: float
    busy: float
    utilisation: float


class ClusterFigures(RunFigures, frozen=True, kw_only=True):
    """The figures of a run on a cluster; times in seconds. Blocks and queues are those of all replicas together."""

    router: str
    replicas: list[ReplicaFigures]
    #: Requests that met the limits; of them a second; and a second of one replica in use.
    good: int
    goodput: float
    goodput_per_replica: float
    #: Share of the requests that met the limits, failed ones included.
    good_share: float
    #: Sum over replicas of the seconds in use.
    replica_seconds: float
    #: Most tokens of requests given to one replica over the mean, of those that do the same; 1: all alike.
    imbalance: float
    #: Share of the prompts' tokens, as often as they were admitted, that were found in a prefix cache.
    prefix_hit_share: float
    #: Times that a request went on elsewhere after a failure, and tokens whose keys and values were lost.
    resumed: int
    lost_tokens: int
    #: KV caches sent from replica to replica, their bytes, and the mean time of one, waiting included.
    transfers: int
    transferred_bytes: int
    mean_transfer: float
    #: By autoscaling.
    started: int
    drained: int


@dataclass
class CellResult:
    """What is left of replicas that were simulated together; can be sent to another process."""

    replicas: list[_ReplicaResult]
    lost: Completions
    columns: dict[str, list[float]]
    counts: dict[str, float]


@dataclass
class _ReplicaResult:
    number: int
    role: Role
    profile: str
    done: Completions
    gaps: Gaps
    totals: Totals
    given: int
    given_tokens: int
    good: int
    failures: int
    seconds: float
    since: float | None
    num_blocks: int


_COUNTS = ("resumed", "lost_tokens", "transfers", "transferred_bytes", "transfer_seconds", "starts", "drained")


def result_of(cluster: Cluster) -> CellResult:
    """What a cluster that has run leaves."""
    replicas = [
        _ReplicaResult(
            r.number, r.role, f"{r.profile.model} on {r.profile.device}", r.done, r.gaps, r.totals, r.given,
            r.given_tokens, r.good, r.failures, r.seconds, r.since, r.kv_blocks,
        )
        for r in cluster.replicas.values()
    ]  # fmt: skip
    return CellResult(
        replicas, cluster.lost, cluster.series.columns(), {name: getattr(cluster, name) for name in _COUNTS}
    )


def figures_of(cells: list[CellResult], router: str) -> tuple[ClusterFigures, Completions]:
    """The figures of cells that ran side by side, and the times of all requests, by replica."""
    replicas = sorted(itertools.chain.from_iterable(cell.replicas for cell in cells), key=lambda r: r.number)
    done, gaps, totals = Completions(), Gaps(), Totals()
    for replica in replicas:
        done.merge(replica.done)
        gaps.merge(replica.gaps)
        totals.merge(replica.totals)
    for cell in cells:
        done.merge(cell.lost)
    counts = {name: sum(cell.counts[name] for cell in cells) for name in _COUNTS}
    columns = _sum_columns([cell.columns for cell in cells])
    base = rates(done, gaps)
    good = sum(replica.good for replica in replicas)
    asked = base["requests"] + sum(done.failed.values())
    seconds = [_seconds_in_use(replica, base["seconds"]) for replica in replicas]
    used = sum(seconds)
    figures = ClusterFigures(
        **base,
        steps=totals.steps,
        preemptions_by_recompute=totals.preemptions_by_recompute,
        preemptions_by_swap=totals.preemptions_by_swap,
        recomputed_tokens=totals.recomputed_tokens,
        prefix_queried_tokens=totals.prefix_queried_tokens,
        prefix_hit_tokens=totals.prefix_hit_tokens,
        stores=totals.stores,
        num_blocks=sum(replica.num_blocks for replica in replicas),
        mean_running=mean_over_time(columns["seconds"], columns["running"]),
        mean_blocks_used=mean_over_time(columns["seconds"], columns["blocks_used"]),
        series=columns,
        router=router,
        replicas=[_figures_of(replica, span) for replica, span in zip(replicas, seconds, strict=True)],
        good=good,
        goodput=good / base["seconds"] if base["seconds"] else 0.0,
        goodput_per_replica=good / used if used else 0.0,
        good_share=good / asked if asked else 0.0,
        replica_seconds=used,
        imbalance=_imbalance(replicas),
        prefix_hit_share=totals.prefix_hit_tokens / max(1, totals.prefix_queried_tokens),
        resumed=int(counts["resumed"]),
        lost_tokens=int(counts["lost_tokens"]),
        transfers=int(counts["transfers"]),
        transferred_bytes=int(counts["transferred_bytes"]),
        mean_transfer=counts["transfer_seconds"] / counts["transfers"] if counts["transfers"] else 0.0,
        started=int(counts["starts"]),
        drained=int(counts["drained"]),
    )
    return figures, done


def _figures_of(r: _ReplicaResult, seconds: float) -> ReplicaFigures:
    return ReplicaFigures(
        number=r.number,
        role=r.role,
        profile=r.profile,
        given=r.given,
        requests=len(r.done.sent),
        good=r.good,
        tokens=sum(r.done.inputs) + sum(r.done.outputs),
        steps=r.totals.steps,
        prefix_hit_tokens=r.totals.prefix_hit_tokens,
        preemptions=r.totals.preemptions_by_recompute + r.totals.preemptions_by_swap,
        failures=r.failures,
        seconds=seconds,
        busy=r.totals.busy,
        utilisation=r.totals.busy / seconds if seconds else 0.0,
    )


def _seconds_in_use(replica: _ReplicaResult, end: float) -> float:
    """What it is in use for when the last token comes counts; what comes after does not."""
    return replica.seconds + (max(0.0, end - replica.since) if replica.since is not None else 0.0)


def _imbalance(replicas: list[_ReplicaResult]) -> float:
    """The largest over the roles: an idle role does not count."""
    found = [1.0]
    for role in {replica.role for replica in replicas}:
        given = [replica.given_tokens for replica in replicas if replica.role == role]
        if sum(given):
            found.append(max(given) * len(given) / sum(given))
    return max(found)


def _sum_columns(cells: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Sums over cells, each of which keeps its values until its next sample; at the times of the first cell."""
    if len(cells) == 1:
        return cells[0]
    times = cells[0]["seconds"]
    columns: dict[str, list[float]] = {"seconds": times}
    for name in cells[0]:
        if name != "seconds":
            columns[name] = [sum(values) for values in zip(*(_at(times, cell, name) for cell in cells), strict=True)]
    return columns


def _at(times: list[float], cell: dict[str, list[float]], name: str) -> list[float]:
    values, position, found = cell[name], 0, []
    for time in times:
        while position < len(values) and cell["seconds"][position] <= time:
            position += 1
        found.append(values[position - 1] if position else 0.0)
    return found
