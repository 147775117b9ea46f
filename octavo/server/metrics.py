"""Prometheus metrics of ``/metrics``: families named ``octavo_...``, in seconds and tokens, labelled by model."""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from octavo import __version__
from octavo.core.outputs import RequestOutput
from octavo.core.stats import (
    CAPACITY,
    STEP_TOKENS,
    STORE_UP,
    AdapterStats,
    Family,
    GrammarStats,
    GroupState,
    RetentionStats,
    SchedulerState,
    SchedulerStats,
    SpeculationStats,
    Statistic,
    StoreStats,
    StoreTierStats,
    statistics,
)
from octavo.core.stats import Histogram as HistogramCounts

if TYPE_CHECKING:
    from octavo.core.outputs import Pooled
    from octavo.core.stats import StepStats
    from octavo.engine.replicas import ReplicaState


#: Upper bounds of histogram buckets, in seconds.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)

#: Most adapters with series of their own, as clients can name any number of them; the others share one.
MAX_ADAPTER_LABELS = 256
OTHER_ADAPTERS = "(others)"
#: Finish reasons of complete requests, which enter the histogram of durations.
COMPLETE = ("stop", "length")
#: Finish reasons with a series from the start; other series begin with their first request.
REASONS = (*COMPLETE, "abort", "error", "ignored")


class Metrics:
    """Owns all families and their registry; nothing is registered globally, so a process can have several.

    All methods are for the event loop's thread and take microseconds; ``render`` takes milliseconds.
    """

    def __init__(
        self, model_name: str, dropped_logs: Callable[[], int] = lambda: 0, server: Metrics | None = None
    ) -> None:
        """``dropped_logs`` returns the number of log lines lost so far; called by every ``render``.

        ``server``: of a server with several models, its own metrics, on whose page this model's series appear.
        """
        self.registry: CollectorRegistry = CollectorRegistry() if server is None else server.registry
        #: Families by name.
        self._made: dict[str, Any] = {} if server is None else server._made
        self._model, self._dropped_logs = model_name, dropped_logs
        #: Called by every ``render``: the name and the state, "running" or "waiting", of each open request with an
        #: adapter; the replicas; and how often a request went from one core to another.
        self.adapter_states: Callable[[], Iterable[tuple[str, str]]] = tuple
        self.replica_states: Callable[[], Iterable[ReplicaState]] = tuple
        self.num_resumed: Callable[[], int] = int
        self.num_moved: Callable[[], int] = int
        #: Statistics of grammars, shown by every ``render``.
        self.grammars = GrammarStats()

        if server is None:
            ProcessCollector(registry=self.registry)
        counter, gauge = partial(self._family, Counter), partial(self._family, Gauge)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return self._family(Histogram, name, text, unit="seconds", buckets=buckets)()

        gauge("build", "1, with the version of this server.", ["version"], unit="info")(__version__).set(1)
        #: Functions from label values to metrics, of the families with a series for each replica.
        self._by_replica = self._families(FAMILIES, "replica")
        self._replicas: dict[int, ReplicaMetrics] = {}

        # Requests.
        self.finished = counter("requests_finished", "Requests that ended, by reason.", ["reason"])
        for reason in REASONS:
            self.finished(reason)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of requests that started.")()
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")()
        self.first_token = histogram(
            "time_to_first_token", "From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = histogram(
            "inter_token_latency", "Between two tokens of one completion, as they reach the front end.", TOKEN_BUCKETS
        )
        self.duration = histogram(
            "request_duration", "From arrival to the end, of requests that ended by stop or length.", REQUEST_BUCKETS
        )
        self.queue = histogram(
            "request_queue_time", "From arrival to the first step that computed something of it.", FIRST_TOKEN_BUCKETS
        )

        # Vectors and scores; the series of a task begin with its first request.
        self.pooled_finished = counter(
            "pooling_requests_finished", "Inputs for vectors and scores that ended, by task and reason.",
            ["task", "reason"],
        )  # fmt: skip
        self.pooled_tokens = counter(
            "pooling_prompt_tokens", "Tokens of inputs for vectors and scores, by task.", ["task"]
        )
        self.pooled_duration = self._family(
            Histogram, "pooling_request_duration", "From the arrival of an input to its vector or scores, by task.",
            ["task"], unit="seconds", buckets=FIRST_TOKEN_BUCKETS,
        )  # fmt: skip

        # Steps.
        self.step_seconds = histogram("step_duration", "Steps: schedule, execute, update.", STEP_BUCKETS)
        self._worker_seconds = counter("step_worker_seconds", "Time of steps inside the worker.")()
        self._between_seconds = counter(
            "step_between_seconds", "Time between steps while there was work: taking messages in, sending outputs."
        )()
        # Its series begins with the first value: without time_kernels it is absent rather than zero.
        self._kernel_seconds = counter(
            "step_kernel_seconds", "Time of steps inside kernels, if kernels are timed (time_kernels)."
        )

        # Adapters; the series of one begin with its first request.
        self._adapter_labels: set[str] = set()
        self._adapter_requests = gauge(
            "adapter_requests", "Requests in the engine now, by adapter and state.", ["adapter", "state"]
        )
        self.adapter_finished = counter("adapter_requests_finished", "Requests that ended.", ["adapter"])
        self.adapter_prompt_tokens = counter(
            "adapter_prompt_tokens", "Tokens of the prompts of requests that started.", ["adapter"]
        )
        self.adapter_generation_tokens = counter("adapter_generation_tokens", "Tokens generated.", ["adapter"])

        self._grammar_series = StatisticSeries(self._families(declared_families(GrammarStats)))
        self._grammar_series.show_fields(GrammarStats, self.grammars)

        # HTTP and logs, of the whole server.
        if server is None:
            self._http_open = gauge("http_open_requests", "HTTP requests being handled.")()
            self._http_responses = counter("http_responses", "HTTP responses by route and status.", ["route", "code"])
            self._http_rejected = counter("http_rejected", "HTTP requests answered 429, as the queue was full.")()
            self._log_lines_dropped = Total(
                counter("log_lines_dropped", "Log lines lost: the disk was full, or the writer too slow.")()
            )

        # Replicas.
        self._up = gauge("replica_up", "1 if the engine core of a replica takes requests, else 0.", ["replica"])
        self._starts = counter("replica_restarts", "Engine cores started in the place of another.", ["replica"])
        self._restarts: dict[int, Total] = {}
        self._resumed = Total(
            counter("requests_resumed", "Times that a request went on at another engine core than before.")()
        )
        self._moved = Total(
            counter("requests_moved", "Requests that moved to another engine core to decode (replica_roles).")()
        )
        self._replica(0)

    def render(self) -> tuple[bytes, str]:
        """The page that Prometheus scrapes, and its content type."""
        self._log_lines_dropped.set_total(self._dropped_logs())
        self.refresh()
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def refresh(self) -> None:
        """Shows what is asked for at each ``render``: adapters, grammars, replicas."""
        counts = Counts((self.adapter_label(name), state) for name, state in self.adapter_states())
        for label in self._adapter_labels:
            for state in ("running", "waiting"):
                self._adapter_requests(label, state).set(counts[label, state])
        self._grammar_series.show_fields(GrammarStats, self.grammars)
        for replica in self.replica_states():
            self._up(str(replica.number)).set(replica.status == "ready")
            total = self._restarts.setdefault(replica.number, Total(self._starts(str(replica.number))))
            total.set_total(replica.num_restarts)
        self._resumed.set_total(self.num_resumed())
        self._moved.set_total(self.num_moved())

    def end_engine(self) -> None:
        """Shows that the engine was unloaded: nothing runs, and there is no block."""
        for number, replica in self._replicas.items():
            replica.show(SchedulerState())
            self._up(str(number)).set(0)
        self.adapter_states, self.replica_states, self.num_resumed, self.num_moved = tuple, tuple, int, int

    def log(self, stats: StepStats) -> None:
        replica = self._replica(stats.replica)
        if stats.seconds:
            self.step_seconds.observe(stats.seconds)
            self._worker_seconds.inc(stats.worker_seconds)
            self._between_seconds.inc(stats.between_seconds)
        if stats.kernel_seconds:
            self._kernel_seconds().inc(stats.kernel_seconds)
        replica.prefill_tokens.inc(stats.prefill_tokens)
        replica.decode_tokens.inc(stats.decode_tokens)
        replica.show(stats)

    def on_state(self, stats: SchedulerState, replica: int = 0) -> None:
        """Shows queues, blocks and totals before the first step, so that the capacity is never 0."""
        self._replica(replica).show(stats)

    def _replica(self, number: int) -> ReplicaMetrics:
        if number not in self._replicas:
            self._replicas[number] = ReplicaMetrics(self._by_replica, str(number))
        return self._replicas[number]

    def latencies(self) -> list[HistogramCounts]:
        """The histograms of seconds to the first token, between tokens and of requests."""
        histograms = {"first token": self.first_token, "between tokens": self.inter_token, "request": self.duration}
        return [_counts(name, histogram) for name, histogram in histograms.items()]

    def http_started(self) -> None:
        self._http_open.inc()

    def http_finished(self, route: str, status: int) -> None:
        """Counts an HTTP response; ``route`` is the route's pattern, as each value is a series of its own."""
        self._http_open.dec()
        self._http_responses(route, str(status)).inc()
        if status == 429:
            self._http_rejected.inc()

    def adapter_label(self, name: str) -> str:
        """An adapter's name if it is among the first ``MAX_ADAPTER_LABELS``, else ``OTHER_ADAPTERS``."""
        if name in self._adapter_labels:
            return name
        label = name if len(self._adapter_labels) < MAX_ADAPTER_LABELS else OTHER_ADAPTERS
        self._adapter_labels.add(label)
        return label

    def _families(self, families: Iterable[Family], *labels: str) -> dict[Family, Any]:
        kinds: dict[str, Any] = {"gauge": Gauge, "counter": Counter}
        return {
            each: self._family(kinds[each.kind], each.name, each.text, [*labels, *each.labels]) for each in families
        }

    def _family(self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **options: Any) -> Any:
        """Makes a family; returns a function from its label values to the metric."""
        family = self._made.get(name)
        if family is None:
            labels = ["model_name", *labels]
            family = self._made[name] = kind(f"octavo_{name}", text, labels, registry=self.registry, **options)
        return lambda *values: family.labels(self._model, *values)


def _counts(name: str, histogram: Histogram) -> HistogramCounts:
    [family] = histogram.collect()
    upto = {float(s.labels["le"]): int(s.value) for s in family.samples if s.name.endswith("_bucket")}
    totals = list(upto.values())
    counts = [total - before for before, total in zip([0, *totals], totals, strict=False)]
    return HistogramCounts(name, [bound for bound in upto if bound < math.inf], counts)


class RequestObserver:
    """Counts the tokens, latencies and end of one request: for text, for vectors or scores, or of a recording."""

    def __init__(self, metrics: Metrics, adapter: str | None = None, task: str | None = None) -> None:
        """``adapter``: the name of the request's, if it has one. ``task``: of a request for vectors or scores."""
        self._metrics, self._task = metrics, task
        self._adapter = None if adapter is None else metrics.adapter_label(adapter)
        #: Tokens of all its completions so far.
        self.num_tokens = 0
        #: Finish reasons of its completions, by index.
        self.finish_reasons: dict[int, str] = {}
        self._started = self._ended = False
        #: Time of the last token, by index of the completion.
        self._last: dict[int, float] = {}

    def update(self, output: RequestOutput | Pooled, reason: str | None = None) -> None:
        """Counts the next output; its tokens are taken as evenly spaced since the output before.

        ``reason``: the finish reason of a request for vectors or scores, whose only output has no completions.
        """
        metrics, times, now = self._metrics, output.metrics, time.monotonic()
        if not self._started:
            self._started = True
            self.add_prompt(output.num_prompt_tokens)
            if times.time_in_queue is not None:
                metrics.queue.observe(times.time_in_queue)
            if times.first_token_time is not None:
                metrics.first_token.observe(times.first_token_time - times.arrival_time)
        if not isinstance(output, RequestOutput):
            # "length" is how a core calls the end of a prompt after which nothing is generated.
            self.finish_reasons[0] = "stop" if reason in COMPLETE else reason or "abort"
        else:
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    self.finish_reasons[completion.index] = completion.finish_reason
                if count := len(completion.token_ids):
                    self._count(completion.index, count, times.first_token_time or now, now)
        if output.finished:
            self.end(self.finish_reasons.get(0, "abort"), now - times.arrival_time)

    def add_prompt(self, num_tokens: int) -> None:
        self._metrics.prompt_tokens.inc(num_tokens)
        if self._adapter is not None:
            self._metrics.adapter_prompt_tokens(self._adapter).inc(num_tokens)
        if self._task is not None:
            self._metrics.pooled_tokens(self._task).inc(num_tokens)

    def add_tokens(self, count: int) -> None:
        self.num_tokens += count
        self._metrics.generation_tokens.inc(count)
        if self._adapter is not None:
            self._metrics.adapter_generation_tokens(self._adapter).inc(count)

    def end(self, reason: str, seconds: float = 0.0) -> None:
        """Counts the end of the request, ``seconds`` after its arrival."""
        self._ended, metrics = True, self._metrics
        metrics.finished(reason).inc()
        if self._adapter is not None:
            metrics.adapter_finished(self._adapter).inc()
        if self._task is not None:
            metrics.pooled_finished(self._task, reason).inc()
        if reason in COMPLETE:
            metrics.duration.observe(seconds)
            if self._task is not None:
                metrics.pooled_duration(self._task).observe(seconds)

    def close(self, untaken: int = 0) -> None:
        """Counts the request as aborted if it has not ended, and its tokens that were in no output."""
        if not self._ended:
            self.add_tokens(untaken)
            self.end("abort")

    def _count(self, index: int, count: int, first_token_time: float, now: float) -> None:
        self.add_tokens(count)
        last = self._last.get(index)
        if last is None:  # the prefill gives the first token of every completion
            last, count = first_token_time, count - 1
        self._last[index] = now if count else first_token_time
        for _ in range(count):
            self._metrics.inter_token.observe((now - last) / count)


# Series from the state of an engine core; each replica has its own.


def declared_families(*kinds: type[Struct]) -> list[Family]:
    """The families of ``/metrics`` that the statistics of these structs belong to."""
    declared = [each.family for kind in kinds for each in statistics(kind).values()]
    return [family for family in dict.fromkeys(declared) if not family.is_offline]


#: Families with a series for each replica; those of drafts, adapters and KV stores have series where there are any.
FAMILIES = [
    CAPACITY,
    STORE_UP,
    *declared_families(SchedulerStats, GroupState, SpeculationStats, AdapterStats, RetentionStats),
    *declared_families(StoreStats, StoreTierStats),
]


class StatisticSeries:
    """Shows declared statistics as series with the same first labels."""

    def __init__(self, families: Mapping[Family, Callable[..., Any]], *labels: str) -> None:
        """``families``: functions from label values to metrics."""
        self._families, self._labels = families, labels
        #: By struct and further labels: (field, function that shows its value).
        self._shown: dict[tuple[Any, ...], list[tuple[str, Callable[[Any], None]]]] = {}

    def show_fields(self, kind: type[Struct], stats: Struct, *labels: str) -> None:
        shown = self._shown.get((kind, *labels))
        if shown is None:
            declared = [each for each in statistics(kind).items() if not each[1].family.is_offline]
            shown = [(name, self._function(each, *labels)) for name, each in declared]
            self._shown[kind, *labels] = shown
        for name, show in shown:
            show(getattr(stats, name))

    def _function(self, declared: Statistic, *labels: str) -> Callable[[Any], None]:
        """Sets a gauge, or the total of a counter; of a list, one counter for each entry."""
        make = partial(self._families[declared.family], *self._labels, *labels)
        if declared.family.labels and not declared.value:
            totals: list[Total] = []

            def show(values: list[int]) -> None:
                totals.extend(Total(make(str(position))) for position in range(len(totals), len(values)))
                for one, value in zip(totals, values, strict=False):
                    one.set_total(value)

            return show
        metric = make(declared.value) if declared.value else make()
        return metric.set if isinstance(metric, Gauge) else Total(metric).set_total


class ReplicaMetrics(StatisticSeries):
    """The series of one engine core."""

    def __init__(self, families: Mapping[Family, Callable[..., Any]], replica: str) -> None:
        super().__init__(families, replica)
        self.prefill_tokens, self.decode_tokens = (families[STEP_TOKENS](replica, p) for p in ("prefill", "decode"))
        self._capacity, self._up = families[CAPACITY](replica), partial(families[STORE_UP], replica)
        self.show(SchedulerState())

    def show(self, stats: SchedulerState) -> None:
        self._capacity.set(stats.num_blocks)
        self.show_fields(SchedulerState, stats)
        for number, group in enumerate(stats.groups):
            self.show_fields(GroupState, group, str(number), group.kind)
        if stats.adapters is not None:
            self.show_fields(AdapterStats, stats.adapters)
        if stats.retention is not None:
            self.show_fields(RetentionStats, stats.retention)
        if stats.speculation is not None:
            self.show_fields(SpeculationStats, stats.speculation)
        if stats.stores is not None:
            self.show_fields(StoreStats, stats.stores)
            for tier in stats.stores.tiers:
                self.show_fields(StoreTierStats, tier, tier.tier)
                self._up(tier.tier).set(not tier.trouble)


class Total:
    """A counter that follows a running total."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._last = counter, 0.0

    def set_total(self, total: float) -> None:
        """Counts the growth since the last total; the totals of a restarted engine core begin at 0."""
        self._counter.inc(total - self._last if total >= self._last else total)
        self._last = total
