"""Figures of a run, simulated or measured: rates, latencies, and queues and blocks over time; bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from octavo.core.stats import StoreTierStats
from octavo.lab.workloads.work_items import WorkItem

#: Bins of a histogram of gaps per factor of e: each is half a percent wide.
_BINS = 200
_LEAST_GAP = 1e-9


class Latency(msgspec.Struct, frozen=True):
    """A distribution in seconds; percentiles are interpolated linearly, as numpy's."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: np.ndarray) -> Latency | None:
        """Of values in seconds; None if there are none."""
        if not len(seconds):
            return None
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
        return cls(*map(float, (math.fsum(seconds) / len(seconds), p50, p90, p99, seconds.max())))


class Gaps:
    """The seconds between tokens of a request, over all tokens: exact mean and maximum, percentiles within 0.5 %."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._sum = self._max = 0.0
        self._count = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """``count`` tokens came so long after the one before."""
        self._bins[math.floor(math.log(max(seconds, _LEAST_GAP)) * _BINS)] += count
        self._sum += seconds * count
        self._count += count
        self._max = max(self._max, seconds)

    def merge(self, other: Gaps) -> None:
        """Adds all of another one's."""
        self._bins.update(other._bins)
        self._sum += other._sum
        self._count += other._count
        self._max = max(self._max, other._max)

    def latency(self) -> Latency | None:
        """The distribution; None without a gap."""
        if not self._count:
            return None
        p50, p90, p99 = map(self._percentile, (0.5, 0.9, 0.99))
        return Latency(self._sum / self._count, p50, p90, p99, self._max)

    def _percentile(self, share: float) -> float:
        left = share * self._count
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return min(math.exp((index + 0.5) / _BINS), self._max)
        return self._max


class Series:
    """Samples over time, thinned out as they become many: each is at least ``interval`` seconds after the one before.

    Invariant: never more than ``most`` samples; the interval doubles when they are.
    """

    def __init__(self, names: tuple[str, ...], most: int = 2048) -> None:
        self.names = names
        self.most = most
        self.samples: list[tuple[float, ...]] = []
        self.next = 0.0
        self._interval = 0.0

    def add(self, now: float, *values: float) -> None:
        """A sample; callers look at ``next`` first, which says from when on one is wanted."""
        if now < self.next:
            return
        self.samples.append((now, *values))
        if len(self.samples) >= self.most:
            del self.samples[1::2]
            self._interval = max(2 * self._interval, (now - self.samples[0][0]) / (self.most / 2))
        self.next = now + self._interval

    def columns(self) -> dict[str, list[float]]:
        """By name: ``seconds``, and each of ``names``."""
        columns = zip(*self.samples, strict=True) if self.samples else ((),) * (len(self.names) + 1)
        return dict(zip(("seconds", *self.names), map(list, columns), strict=True))


class Completions:
    """The times of all requests that ended as they should, 48 bytes each; and how many of all met their targets."""

    def __init__(self) -> None:
        self.sent, self.first, self.last = array("d"), array("d"), array("d")
        self.number, self.inputs, self.outputs = array("q"), array("q"), array("q")
        #: By finish reason, of those that did not.
        self.failed: Counter[str] = Counter()
        #: Requests that have a target, failed ones included, and those of them that met all of theirs.
        self.with_targets = self.met_targets = 0

    def add(self, number: int, item: WorkItem, sent: float, first: float, last: float, outputs: int) -> None:
        """A request was sent, had its first and its last token, in seconds; ``outputs`` tokens."""
        self.sent.append(sent)
        self.first.append(first)
        self.last.append(last)
        self.number.append(number)
        self.inputs.append(item.input_len)
        self.outputs.append(outputs)
        if has_target(item):
            self.with_targets += 1
            self.met_targets += meets_targets(item, first - sent, (last - first) / max(outputs - 1, 1))

    def fail(self, item: WorkItem, reason: str) -> None:
        """A request ended otherwise; it misses its targets, if it has any."""
        self.failed[reason] += 1
        self.with_targets += has_target(item)

    def merge(self, other: Completions) -> None:
        """Adds all of another one's."""
        for name in ("sent", "first", "last", "number", "inputs", "outputs"):
            getattr(self, name).extend(getattr(other, name))
        self.failed += other.failed
        self.with_targets += other.with_targets
        self.met_targets += other.met_targets

    @property
    def ttft(self) -> np.ndarray:
        """Seconds to the first token."""
        return np.asarray(self.first) - np.asarray(self.sent)

    @property
    def e2e(self) -> np.ndarray:
        """Seconds to the last token."""
        return np.asarray(self.last) - np.asarray(self.sent)

    @property
    def tpot(self) -> np.ndarray:
        """Seconds a token after the first, of requests that have any."""
        several = np.asarray(self.outputs) > 1
        return (np.asarray(self.last) - np.asarray(self.first))[several] / (np.asarray(self.outputs)[several] - 1)


def has_target(item: WorkItem) -> bool:
    """Whether the request has a target of latency."""
    return item.ttft_target is not None or item.tpot_target is not None


def meets_targets(item: WorkItem, ttft: float, tpot: float) -> bool:
    """Whether latencies in seconds are within the request's own targets; ``tpot`` is 0 for an output of one token."""
    return (item.ttft_target is None or ttft <= item.ttft_target) and (
        item.tpot_target is None or tpot <= item.tpot_target
    )


class ServiceByUser(msgspec.Struct, frozen=True):
    """Service of users at sampled moments: tokens (of prompts once, of outputs twice) divided by the user's weight."""

    seconds: list[float]
    #: By user, service so far.
    users: dict[str, list[float]]
    #: At each moment, over pairs of users and intervals that end then, in which at every moment both had requests
    #: waiting: the largest difference between what both were served.
    difference: list[float]
    #: Of ``difference`` under the policy ``fair``, by theorem 4.4 of Sheng et al. 2024, for users who were never idle.
    bound: float
    #: The end of the first time in which all users have requests waiting; 0: there is none.
    all_wait_until: float = 0.0


class StoreFigures(msgspec.Struct, frozen=True):
    """A tier of KV stores: what all engines did with it, and what it holds in the end."""

    asked: int = 0
    found: int = 0
    written: int = 0
    dropped: int = 0
    evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    held_bytes: int = 0
    max_bytes: int = 0


_OF_STORE = ("evicted", "held_bytes", "max_bytes")


def add_stores(
    total: Mapping[str, StoreFigures], more: Iterable[tuple[str, StoreTierStats | StoreFigures]], same: Container[str]
) -> dict[str, StoreFigures]:
    """Both together, by tier. ``same``: tiers whose store is one and the same, so that what it holds counts once."""
    sums = dict(total)
    for tier, one in more:
        before = msgspec.structs.asdict(sums.get(tier, StoreFigures()))
        for name, value in before.items():
            now = getattr(one, name)
            before[name] = now if name in _OF_STORE and tier in same else value + now
        sums[tier] = StoreFigures(**before)
    return sums


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run; times in seconds."""

    requests: int
    #: By finish reason, of requests that did not end as they should.
    failed: dict[str, int]
    #: From the start to the last token.
    seconds: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Latency | None
    #: Of a request, mean over its tokens after the first; and over all gaps between tokens.
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    #: Requests that met their targets a second, and as a share of those that have any; None if none has.
    goodput_requests_per_s: float | None = None
    goodput_share: float | None = None
    steps: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    #: Of the KV stores, by tier.
    stores: dict[str, StoreFigures] = {}
    num_blocks: int = 0
    #: Mean over time, of the samples; and queues and blocks over time.
    mean_running: float = 0.0
    mean_blocks_used: float = 0.0
    series: dict[str, list[float]] = {}
    #: None without users.
    service: ServiceByUser | None = None


def rates(done: Completions, gaps: Gaps) -> dict[str, Any]:
    """The fields of ``RunFigures`` that follow from the requests alone."""
    end = max(done.last, default=0.0)
    outputs = sum(done.outputs)
    return {
        "requests": len(done.sent),
        "failed": dict(sorted(done.failed.items())),
        "seconds": end,
        "requests_per_s": len(done.sent) / end if end else 0.0,
        "input_tokens": sum(done.inputs),
        "output_tokens": outputs,
        "output_tokens_per_s": outputs / end if end else 0.0,
        "ttft": Latency.of(done.ttft),
        "tpot": Latency.of(done.tpot),
        "itl": gaps.latency(),
        "e2e": Latency.of(done.e2e),
        "goodput_requests_per_s": done.met_targets / end if done.with_targets and end else None,
        "goodput_share": done.met_targets / done.with_targets if done.with_targets else None,
    }
