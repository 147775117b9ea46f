"""``get_metrics`` as vLLM gives it: counters, gauges, vectors and histograms, by vLLM's names."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from itertools import accumulate

from octavo.core.outputs import RequestOutput
from octavo.core.stats import SchedulerStats

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass
class Metric:
    """A figure by its name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A total since the engine started."""

    value: int


@dataclass
class Gauge(Metric):
    """A figure as it is now."""

    value: float


@dataclass
class Vector(Metric):
    """Totals by position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observations: how many, their sum, and how many of them are at most each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class _Observed:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def add(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self.counts or [0] * len(names)), strict=True))
        return Histogram(name, labels, buckets["+Inf"], self.sum, buckets)


class RequestFigures:
    """What ended requests have come to."""

    def __init__(self) -> None:
        self._seconds = {
            name: _Observed(_SECONDS)
            for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds")
        }
        self._tokens = {name: _Observed(_TOKENS) for name in ("request_prompt_tokens", "request_generation_tokens")}

    def add(self, output: RequestOutput, num_tokens: int) -> None:
        """A request has ended, with so many tokens of output."""
        times = output.metrics
        for name, moment in zip(
            self._seconds, (times.first_token_time, times.finished_time, times.first_scheduled_time), strict=True
        ):
            if moment is not None:
                self._seconds[name].add(moment - times.arrival_time)
        self._tokens["request_prompt_tokens"].add(output.num_prompt_tokens)
        self._tokens["request_generation_tokens"].add(num_tokens)

    def metrics(self, stats: SchedulerStats, model: str) -> list[Metric]:
        """All figures now; those of tokens and times are of requests that have ended."""
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, value: float) -> Counter:
            return Counter(f"vllm:{name}", labels, int(value))

        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", labels, stats.num_running),
            Gauge("vllm:num_requests_waiting", labels, stats.num_waiting),
            Gauge("vllm:kv_cache_usage_perc", labels, stats.kv_cache_usage),
            counter("prefix_cache_queries", stats.prefix_queried_tokens),
            counter("prefix_cache_hits", stats.prefix_hit_tokens),
            counter("num_preemptions", stats.preemptions_by_recompute + stats.preemptions_by_swap),
            counter("prompt_tokens", self._tokens["request_prompt_tokens"].sum),
            counter("generation_tokens", self._tokens["request_generation_tokens"].sum),
        ]
        if (drafts := stats.speculation) is not None:
            metrics += [
                counter("spec_decode_num_drafts", drafts.drafts),
                counter("spec_decode_num_draft_tokens", drafts.draft_tokens),
                counter("spec_decode_num_accepted_tokens", drafts.accepted_tokens),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(drafts.accepted_per_position)),
            ]
        observed = {**self._seconds, **self._tokens}
        return metrics + [each.histogram(f"vllm:{name}", labels) for name, each in observed.items()]
