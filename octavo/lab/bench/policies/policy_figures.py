"""The figures of one run of a scenario, and their averages over repeats."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.lab.bench.policies.kendall import kendall_tau
from octavo.lab.simulate.figures import Completions, has_target, meets_targets
from octavo.lab.workloads.work_items import WorkItem


class PlaceOutcome(msgspec.Struct, frozen=True):
    """What a place gives back of a run; ``done`` numbers requests in order of arrival."""

    done: Completions
    preemptions: int
    #: Kendall's tau of predicted and true lengths, of policies that predict and places that let it be read.
    tau: float | None = None


class PolicyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or averages of several; times in seconds, latencies from arrival to the last token."""

    requests: float
    #: Requests that did not end as they should.
    failed: float
    #: From the first arrival to the last token.
    seconds: float
    requests_per_s: float
    mean_latency: float
    p50_latency: float
    p99_latency: float
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    preemptions: float
    #: Of scenarios with targets: requests that met their own, as a share of those that have any, and a second.
    goodput_share: float | None = None
    goodput_per_s: float | None = None
    #: Of policies that predict lengths: Kendall's tau of their ranking, and that of an oracle for the same lengths.
    tau: float | None = None
    oracle_tau: float | None = None
    #: Mean latency of each user's requests.
    user_latency: dict[str, float] = {}


def figures(items: Sequence[WorkItem], outcome: PlaceOutcome) -> PolicyFigures:
    """Of a run of these items, as they were before a policy refused their targets; at least one ended as it should."""
    done = outcome.done
    latency, ttft = done.e2e, done.ttft
    ended = [items[number] for number in done.number]
    seconds = max(done.last) - items[0].at
    of_users: dict[str, list[float]] = defaultdict(list)
    for item, took in zip(ended, latency.tolist(), strict=True):
        if item.user is not None:
            of_users[item.user].append(took)
    targeted = sum(has_target(item) for item in items)
    good = _within_targets(ended, done) if targeted else 0
    lengths = list(done.outputs)
    return PolicyFigures(
        requests=len(items),
        failed=sum(done.failed.values()),
        seconds=seconds,
        requests_per_s=len(ended) / seconds,
        mean_latency=float(np.mean(latency)),
        p50_latency=float(np.percentile(latency, 50)),
        p99_latency=float(np.percentile(latency, 99)),
        mean_ttft=float(np.mean(ttft)),
        p50_ttft=float(np.percentile(ttft, 50)),
        p99_ttft=float(np.percentile(ttft, 99)),
        preemptions=outcome.preemptions,
        goodput_share=good / targeted if targeted else None,
        goodput_per_s=good / seconds if targeted else None,
        tau=outcome.tau,
        oracle_tau=None if outcome.tau is None else kendall_tau(lengths, lengths),
        user_latency={user: statistics.fmean(took) for user, took in sorted(of_users.items())},
    )


def _within_targets(ended: Sequence[WorkItem], done: Completions) -> int:
    """Requests with targets that met all of theirs."""
    times = zip(ended, done.sent, done.first, done.last, done.outputs, strict=True)
    return sum(
        meets_targets(item, first - sent, (last - first) / max(tokens - 1, 1))
        for item, sent, first, last, tokens in times
        if has_target(item)
    )


def medians(runs: Sequence[PolicyFigures]) -> PolicyFigures:
    """Medians over repeats, figure by figure."""
    columns = [msgspec.to_builtins(run) for run in runs]
    found: dict[str, Any] = {}
    for name in PolicyFigures.__struct_fields__:
        values = [column[name] for column in columns]
        if name == "user_latency":
            users = sorted(set().union(*values))
            found[name] = {u: statistics.median([value[u] for value in values if u in value]) for u in users}
        else:
            found[name] = None if None in values else statistics.median(values)
    return PolicyFigures(**found)


def averages(runs: Sequence[PolicyFigures]) -> tuple[PolicyFigures, PolicyFigures]:
    """Means over repeats, and standard deviations (of a sample; 0 of a single run), figure by figure."""
    columns = [msgspec.to_builtins(run) for run in runs]
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in PolicyFigures.__struct_fields__:
        values = [column[name] for column in columns]
        if name == "user_latency":
            users = {user: [value[user] for value in values if user in value] for user in sorted(set().union(*values))}
            spread = {user: _mean_and_deviation(of_user) for user, of_user in users.items()}
            pairs[name] = ({u: mean for u, (mean, _) in spread.items()}, {u: std for u, (_, std) in spread.items()})
        else:
            pairs[name] = (None, None) if None in values else _mean_and_deviation(values)
    means, deviations = ({name: pair[i] for name, pair in pairs.items()} for i in range(2))
    return PolicyFigures(**means), PolicyFigures(**deviations)


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
