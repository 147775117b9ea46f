"""Metrics, dashboard, status line, spans."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.core.stats import (
    AdapterStats,
    GroupState,
    RetentionStats,
    SchedulerStats,
    SpeculationStats,
    StepStats,
    StoreStats,
    StoreTierStats,
    sum_stats,
)
from octavo.engine.front_end import StatusLine
from octavo.engine.replicas import ReplicaState
from octavo.grammar.compiler import GrammarCompiler
from octavo.process.sandbox import Sandbox
from octavo.server import metrics as server_metrics
from octavo.server.logging import Tracer
from octavo.server.metrics import Metrics, RequestObserver
from tests.busy_machine import once_in_three

DASHBOARD = Path(__file__).resolve().parents[2] / "dashboards" / "grafana.json"

STEP = StepStats(
    steps=1,
    seconds=0.04,
    worker_seconds=0.035,
    kernel_seconds=0.03,
    between_seconds=0.001,
    prefill_tokens=100,
    decode_tokens=7,
    num_waiting=3,
    num_running=8,
    num_swapped=1,
    blocks_used=40,
    blocks_cached=10,
    blocks_free=45,
    blocks_pinned=5,
    host_blocks_used=4,
    preemptions_by_recompute=2,
    preemptions_by_swap=1,
    prefix_queried_tokens=200,
    prefix_hit_tokens=64,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the metrics of requests read in place of the time."""
    clock = Clock()
    monkeypatch.setattr(server_metrics, "time", types.SimpleNamespace(monotonic=clock))
    return clock


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the page, by its name and its labels but for the model."""
    page, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if sample.name.startswith("octavo_"):
                assert sample.labels["model_name"] == "m"
            words = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[f"{sample.name}{{{words}}}" if words else sample.name] = sample.value
    return found


def output(counts: list[int], reasons: list[str | None] | None = None, **times: Any) -> RequestOutput:
    """An increment with so many tokens, and ends, of each completion."""
    now = time.monotonic()
    reasons = reasons or [None] * len(counts)
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * 5,
        outputs=[
            CompletionOutput(index, token_ids=[2] * count, finish_reason=reason)
            for index, (count, reason) in enumerate(zip(counts, reasons, strict=True))
        ],
        finished=None not in reasons,
        metrics=RequestMetrics(**{"arrival_time": now, **times}),
    )


def pooled(**times: Any) -> PoolingRequestOutput:
    metrics = RequestMetrics(**{"arrival_time": time.monotonic(), **times})
    return PoolingRequestOutput("r", PoolingOutput(np.ones(2, np.float32)), None, [1] * 5, metrics)


# Metrics --------------------------------------------------------------------------------------------------------------


def test_an_aborted_request_has_no_duration() -> None:
    metrics = Metrics("m")
    request = RequestObserver(metrics)
    request.update(output([1, 1], first_token_time=time.monotonic()))
    # One of its completions has ended, the request has not.
    request.update(output([1, 1], [None, "stop"]))
    request.close()
    request.close()
    found = samples(metrics)
    assert found["octavo_requests_finished_total{reason=abort}"] == 1
    assert found["octavo_requests_finished_total{reason=stop}"] == 0
    assert found["octavo_request_duration_seconds_count"] == 0


def test_a_request_shown_by_its_increments(clock: Clock) -> None:
    metrics = Metrics("m")
    request = RequestObserver(metrics)
    now = clock.now
    times: dict[str, Any] = {
        "arrival_time": now - 1.0,
        "first_scheduled_time": now - 0.9,
        "first_token_time": now - 0.6,
    }
    request.update(output([1, 1], **times))
    request.update(output([3, 1], **times))
    request.update(output([0, 0], **times))
    request.update(output([0, 3], ["stop", "length"], **times))
    request.close()
    found = samples(metrics)
    assert found["octavo_prompt_tokens_total"] == 5
    assert found["octavo_generation_tokens_total"] == request.num_tokens == 9
    assert found["octavo_time_to_first_token_seconds_count"] == 1
    assert found["octavo_time_to_first_token_seconds_sum"] == pytest.approx(0.4)
    assert found["octavo_request_queue_time_seconds_sum"] == pytest.approx(0.1)
    assert found["octavo_inter_token_latency_seconds_count"] == 7
    # 0.6 s since the first token, of each of two completions; tokens that came at once share the time.
    assert found["octavo_inter_token_latency_seconds_sum"] == pytest.approx(1.2)
    assert found["octavo_requests_finished_total{reason=stop}"] == 1
    assert found["octavo_requests_finished_total{reason=abort}"] == 0
    assert found["octavo_request_duration_seconds_sum"] == pytest.approx(1.0)
    assert request.finish_reasons == {0: "stop", 1: "length"}


def test_a_request_of_which_only_the_end_is_seen(clock: Clock) -> None:
    metrics = Metrics("m")
    now = clock.now
    request = RequestObserver(metrics)
    times: dict[str, Any] = {"arrival_time": now - 2, "first_scheduled_time": now - 2, "first_token_time": now - 1}
    request.update(output([51], ["length"], **times))
    found = samples(metrics)
    assert found["octavo_generation_tokens_total"] == 51
    assert found["octavo_time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert found["octavo_inter_token_latency_seconds_count"] == 50
    assert found["octavo_inter_token_latency_seconds_bucket{le=0.025}"] == 50
    assert found["octavo_inter_token_latency_seconds_bucket{le=0.015}"] == 0


def test_vectors_and_scores_are_requests_and_are_told_apart_by_task(clock: Clock) -> None:
    metrics, now = Metrics("m"), clock.now
    for task, adapter in (("embed", None), ("embed", "a"), ("classify", None)):
        observer = RequestObserver(metrics, adapter, task)
        observer.update(pooled(arrival_time=now - 1.0, first_scheduled_time=now - 0.75), "length")
        observer.close()
    observer = RequestObserver(metrics, task="embed")
    observer.update(pooled(), "error")
    observer.close()
    RequestObserver(metrics, task="embed").close()
    found = samples(metrics)
    assert [found[f"octavo_requests_finished_total{{reason={reason}}}"] for reason in ("stop", "error", "abort")] == [
        3,
        1,
        1,
    ]
    name = "octavo_pooling_requests_finished_total{{reason={},task={}}}"
    assert [found[name.format(*each)] for each in (("stop", "embed"), ("stop", "classify"), ("abort", "embed"))] == [
        2,
        1,
        1,
    ]
    assert found["octavo_prompt_tokens_total"] == 20 and found["octavo_pooling_prompt_tokens_total{task=classify}"] == 5
    assert found["octavo_request_queue_time_seconds_sum"] == pytest.approx(0.75)
    assert found["octavo_request_duration_seconds_count"] == 3
    assert found["octavo_pooling_request_duration_seconds_sum{task=embed}"] == pytest.approx(2.0)
    assert found["octavo_adapter_requests_finished_total{adapter=a}"] == 1
    assert found["octavo_time_to_first_token_seconds_count"] == 0, "there is none"


def test_blocks_of_each_group() -> None:
    metrics = Metrics("m")
    metrics.log(StepStats(blocks_free=100))
    assert not any("group_blocks" in name for name in samples(metrics)), "where there is one group"
    states = GroupState(2, 7, 1, 92, 0, 0, has_states=True)
    groups = [GroupState(None, 10, 20, 60, 10, 3), GroupState(512, 5, 0, 4, 1, 2), states]
    stats = StepStats(blocks_used=22, blocks_cached=21, blocks_free=156, blocks_pinned=11, groups=groups)
    metrics.log(stats)
    found = samples(metrics)
    name = "octavo_kv_cache_group_blocks{{group={},replica=0,state={},window={}}}"
    assert [found[name.format(0, state, "all")] for state in ("used", "cached", "free", "pinned")] == [10, 20, 60, 10]
    assert found[name.format(1, "free", 512)] == 4
    assert found[name.format(2, "used", "states")] == 7
    assert stats.kv_cache_usage == 0.6, "of the group that is full first"
    assert StepStats(blocks_used=1, blocks_pinned=1, blocks_free=2).kv_cache_usage == 0.5
    assert StepStats().kv_cache_usage == 0.0


def test_groups_of_replicas_are_summed() -> None:
    one = SchedulerStats(blocks_used=3, groups=[GroupState(None, 1, 0, 9, 0, 0), GroupState(8, 2, 1, 3, 0, 4, True)])
    total = sum_stats([one, one])
    assert (total.blocks_used, total.groups[1]) == (6, GroupState(8, 4, 2, 6, 0, 8, True))
    assert sum_stats([SchedulerStats(steps=2), SchedulerStats(steps=3)]) == SchedulerStats(steps=5)


def test_steps() -> None:
    metrics = Metrics("m")
    metrics.log(StepStats(blocks_free=100))
    found = samples(metrics)
    assert found["octavo_kv_cache_capacity_blocks{replica=0}"] == 100
    assert found["octavo_step_duration_seconds_count"] == 0
    assert "octavo_step_kernel_seconds_total" not in found
    metrics.log(STEP)
    metrics.log(STEP)
    found = samples(metrics)
    assert [found[f"octavo_requests{{replica=0,state={s}}}"] for s in ("running", "waiting", "swapped")] == [8, 3, 1]
    states = ("used", "cached", "free", "pinned")
    assert [found[f"octavo_kv_cache_blocks{{replica=0,state={s}}}"] for s in states] == [40, 10, 45, 5]
    assert found["octavo_kv_cache_capacity_blocks{replica=0}"] == 100
    assert found["octavo_kv_cache_host_used_blocks{replica=0}"] == 4
    assert found["octavo_step_duration_seconds_count"] == 2
    assert found["octavo_step_duration_seconds_sum"] == pytest.approx(0.08)
    assert found["octavo_step_kernel_seconds_total"] == pytest.approx(0.06)
    assert found["octavo_step_worker_seconds_total"] == pytest.approx(0.07)
    assert found["octavo_step_tokens_total{phase=prefill,replica=0}"] == 200
    # Totals are followed, not added up.
    assert found["octavo_preemptions_total{kind=recompute,replica=0}"] == 2
    assert found["octavo_preemptions_total{kind=swap,replica=0}"] == 1
    assert found["octavo_prefix_cache_queried_tokens_total{replica=0}"] == 200
    assert found["octavo_prefix_cache_hit_tokens_total{replica=0}"] == 64


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "MAX_ADAPTER_LABELS", 2)
    metrics = Metrics("m")
    assert not any("adapter" in name for name in samples(metrics))
    for name in ("a", "b", "c", "d", "a"):
        request = RequestObserver(metrics, name)
        request.update(output([2], ["stop"]))
        request.close()
    metrics.adapter_states = lambda: [("a", "running"), ("c", "running"), ("d", "running"), ("b", "waiting")]
    stats = AdapterStats(2, 3, 1, loads=9, slot_evictions=4, host_evictions=5, slot_hits=7, slot_misses=6, seconds=0.5)
    metrics.log(msgspec.structs.replace(STEP, adapters=stats))
    metrics.log(msgspec.structs.replace(STEP, adapters=stats))
    found = samples(metrics)
    labels = ("a", "b", "(others)")
    finished = [found[f"octavo_adapter_requests_finished_total{{adapter={label}}}"] for label in labels]
    assert finished == [2, 1, 2]
    assert [found[f"octavo_adapter_generation_tokens_total{{adapter={label}}}"] for label in labels] == [4, 2, 4]
    assert found["octavo_adapter_prompt_tokens_total{adapter=a}"] == 10
    assert [found[f"octavo_adapter_requests{{adapter={x},state=running}}"] for x in labels] == [1, 0, 2]
    assert found["octavo_adapter_requests{adapter=b,state=waiting}"] == 1
    metrics.adapter_states = tuple
    assert samples(metrics)["octavo_adapter_requests{adapter=b,state=waiting}"] == 0
    places = [found[f"octavo_adapters{{place={place},replica=0}}"] for place in ("slot", "host", "loading")]
    assert places == [2, 3, 1]
    assert found["octavo_adapter_loads_total{replica=0}"] == 9
    assert [found[f"octavo_adapter_evictions_total{{place={x},replica=0}}"] for x in ("slot", "host")] == [4, 5]
    assert [found[f"octavo_adapter_admissions_total{{replica=0,slot={x}}}"] for x in ("hit", "miss")] == [7, 6]
    assert found["octavo_adapter_stall_seconds_total{replica=0}"] == 0.5


def test_drafts(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("m")
    assert not any("spec_decode" in name for name in samples(metrics)), "where none are made"
    one, two = SpeculationStats(10, 40, 16, [8, 5, 3, 0], 1), SpeculationStats(20, 80, 26, [18, 5, 3, 0], 1)
    for stats in (one, two):
        metrics.log(msgspec.structs.replace(STEP, speculation=stats))
    found, prefix = samples(metrics), "octavo_spec_decode_num"
    names = ("drafts", "draft_tokens", "accepted_tokens", "failures")
    assert [found[f"{prefix}_{name}_total{{replica=0}}"] for name in names] == [20, 80, 26, 1]
    positions = [found[f"{prefix}_accepted_tokens_per_pos_total{{position={i},replica=0}}"] for i in range(4)]
    assert positions == [18, 5, 3, 0]
    total = sum_stats([SchedulerStats(speculation=one), SchedulerStats(speculation=two)]).speculation
    assert total == SpeculationStats(30, 120, 42, [26, 10, 6, 0], 2)
    clock = Clock()
    status = StatusLine(interval=1.0, clock=clock)
    with caplog.at_level(logging.INFO, "octavo"):
        for stats in (one, two, two):
            clock.now += 2.0
            status.log(msgspec.structs.replace(STEP, seconds=1.5, speculation=stats))
    endings = [line.split("; ")[-1] for line in caplog.messages]
    assert endings == [
        f"drafts accepted {x}" for x in ("40.0%, 2.60 tokens a draft", "25.0%, 2.00 tokens a draft", "-")
    ]


def test_http_requests() -> None:
    dropped = [0]
    metrics = Metrics("m", dropped_logs=lambda: dropped[0])
    for _ in range(3):
        metrics.http_started()
    metrics.http_finished("/v1/completions", 200)
    metrics.http_finished("/v1/completions", 429)
    dropped[0] = 7
    found = samples(metrics)
    assert found["octavo_http_open_requests"] == 1
    assert found["octavo_http_rejected_total"] == 1
    assert found["octavo_http_responses_total{code=429,route=/v1/completions}"] == 1
    assert found["octavo_log_lines_dropped_total"] == 7
    assert samples(metrics)["octavo_log_lines_dropped_total"] == 7


def test_two_servers_in_one_process_keep_apart() -> None:
    one, two = Metrics("m"), Metrics("m")
    RequestObserver(one).update(output([1]))
    assert samples(one)["octavo_prompt_tokens_total"] == 5
    assert samples(two)["octavo_prompt_tokens_total"] == 0


@pytest.mark.slow
def test_a_token_costs_microseconds() -> None:
    request = RequestObserver(Metrics("m"))
    one = output([1], first_token_time=time.monotonic())

    def measure() -> dict[str, bool]:
        start = time.process_time()
        for _ in range(5000):
            request.update(one)
        seconds = (time.process_time() - start) / 5000
        return {f"a token costs less than 50 us, not {seconds} s": seconds < 50e-6}

    once_in_three(measure)


def test_grammars_are_counted_by_result() -> None:
    metrics = Metrics("m")
    names = [f"octavo_grammar_compilations_total{{result={result}}}" for result in ("compiled", "refused")]
    assert [samples(metrics)[name] for name in names] == [0, 0]
    compiler = GrammarCompiler(Sandbox())
    metrics.grammars = compiler.stats
    compiler.compile(StructuredOutputsParams(regex="a+"))
    compiler.compile(StructuredOutputsParams(regex="a+"))
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            compiler.compile(StructuredOutputsParams(regex="a("))
    found = samples(metrics)
    assert [found[name] for name in names] == [1, 1], "each once, as both are kept"
    assert found["octavo_grammar_compile_seconds_total"] == pytest.approx(compiler.stats.seconds)
    assert found["octavo_grammars_compiling"] == 0


def test_the_tiers_of_kv_stores_have_series_of_their_own() -> None:
    metrics = Metrics("m")
    disk = StoreTierStats("disk", 10, 7, 5, bytes_read=700, read_seconds=0.5, held_bytes=500, max_bytes=1000)
    shared = StoreTierStats("shared", 3, errors=2, trouble="no answer")
    stores = StoreStats(fetches=2, computed=1, tiers=[disk, shared])
    metrics.log(msgspec.structs.replace(STEP, stores=stores))
    metrics.log(msgspec.structs.replace(STEP, stores=stores))  # totals, which have not grown
    found = samples(metrics)

    def of(name: str, *labels: str) -> float:
        [value] = [v for k, v in found.items() if k.startswith(f"octavo_{name}{{") and all(x in k for x in labels)]
        return value

    assert of("kv_store_blocks_total", "tier=disk", "event=found") == 7
    assert of("kv_store_bytes_total", "tier=disk", "direction=read") == 700
    assert of("kv_store_seconds_total", "tier=disk", "direction=read") == 0.5
    assert of("kv_store_size_bytes", "tier=disk", "size=max") == 1000
    assert [of("kv_store_up", f"tier={tier}") for tier in ("disk", "shared")] == [1, 0]
    assert of("kv_store_calls_total", "tier=shared") == 2
    assert of("kv_store_prompts_total", "choice=computed") == 1


def test_the_dashboard_reads_every_metric_and_none_that_does_not_exist() -> None:
    metrics = Metrics("m")
    groups = [GroupState(None, 10, 20, 60, 10, 3), GroupState(512, 5, 0, 4, 1, 2)]
    drafts = SpeculationStats(10, 40, 16, [8, 5, 3, 0], 1)
    kept = {"retention": RetentionStats(), "stores": StoreStats(tiers=[StoreTierStats("disk")])}
    metrics.log(msgspec.structs.replace(STEP, groups=groups, adapters=AdapterStats(), speculation=drafts, **kept))
    RequestObserver(metrics, "adapter").update(output([1], ["stop"]))
    observer = RequestObserver(metrics, task="embed")
    observer.update(pooled(), "length")
    metrics.http_started()
    metrics.http_finished("/health", 200)
    metrics.replica_states = lambda: [ReplicaState(0, "ready", 1, 0, 2)]
    exported = {name.split("{")[0] for name in samples(metrics)}
    # Creation times that the client library adds; no panel shows them.
    exported = {name for name in exported if not name.endswith("_created")}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    read = set(re.findall(r"\b(?:octavo|process)_\w+", " ".join(queries)))
    assert read <= exported
    # And nothing that is exported is forgotten: a histogram counts as read by any of its series.
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("octavo_")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in read} >= families


def test_every_panel_of_the_dashboard_has_a_place_and_a_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 10
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}" and target["expr"].count("(") == target["expr"].count(
                ")"
            )


# Status line ----------------------------------------------------------------------------------------------------------


def test_a_status_line_every_interval_while_busy(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    status = StatusLine(interval=5.0, clock=clock)
    idle = StepStats(seconds=1.0, decode_tokens=10, prefix_queried_tokens=200, prefix_hit_tokens=64)
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(11):  # a second each: the first began at 99 s
            status.log(STEP if clock.now < 110 else idle)
            clock.now += 1.0
        assert len(caplog.messages) == 2
        clock.now += 1000
        status.log(STEP)
    assert len(caplog.messages) == 2
    first = caplog.messages[0]
    # Six steps in 5.04 s.
    assert first == (
        f"8 running, 3 waiting, 1 swapped; prompts {600 / 5.04:.1f} tokens/s, output {42 / 5.04:.1f} tokens/s; "
        "KV cache 45.0% used, 4 host blocks; prefix hits 32.0%"
    )
    assert caplog.messages[1].endswith("prefix hits -")


def test_no_status_line_when_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    status = StatusLine(interval=0, clock=clock)
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(3):
            status.log(STEP)
            clock.now += 100
    assert caplog.messages == []


# Spans ----------------------------------------------------------------------------------------------------------------


def test_spans_of_a_request() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer("m", exporter=exporter)
    now = time.monotonic()
    times: dict[str, Any] = {"arrival_time": now - 1, "first_scheduled_time": now - 0.9, "first_token_time": now - 0.5}
    request_observer = RequestObserver(Metrics("m"))
    request_observer.update(output([2], **times))
    done = output([1], ["stop"], finished_time=now, **times)
    request_observer.update(done)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    tracer.record(done, request_observer, {"traceparent": f"00-{trace}-{parent}-01"})
    tracer.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"octavo.request", "octavo.queue", "octavo.prefill", "octavo.decode"}
    request = spans["octavo.request"]
    assert f"{request.context.trace_id:032x}" == trace and f"{request.parent.span_id:016x}" == parent
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert (request.end_time - request.start_time) / 1e9 == pytest.approx(1.0, abs=1e-3)
    assert (spans["octavo.prefill"].end_time - spans["octavo.prefill"].start_time) / 1e9 == pytest.approx(0.4, abs=1e-3)
    assert abs(request.end_time - time.time_ns()) < 10e9
    assert all(span.parent.span_id == request.context.span_id for name, span in spans.items() if span is not request)


def test_spans_of_a_vector() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer, now = Tracer("m", exporter=exporter), time.monotonic()
    done = pooled(arrival_time=now - 1, first_scheduled_time=now - 0.9, finished_time=now)
    observer = RequestObserver(Metrics("m"), task="embed")
    observer.update(done, "length")
    tracer.record(done, observer)
    tracer.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"octavo.request", "octavo.queue", "octavo.prefill"}
    attributes = spans["octavo.request"].attributes
    assert attributes is not None and attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 0
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra tracing (make test-all)")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracer = Tracer("m", f"http://127.0.0.1:{server.server_port}/v1/traces")
        observer, done = RequestObserver(Metrics("m")), output([1], ["stop"], finished_time=time.monotonic())
        observer.update(done)
        tracer.record(done, observer)
        tracer.shutdown()
        server.shutdown()
    [(path, body)] = received
    assert path == "/v1/traces" and b"octavo.request" in body


def test_tracing_without_opentelemetry_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"octavo\[tracing\]"):
        Tracer("m", "http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ConfigError, match="endpoint"):
        Tracer("m")


def test_the_replicas_and_what_went_from_one_to_another() -> None:
    metrics = Metrics("m")
    states = [ReplicaState(0, "ready", 1, 0, 2), ReplicaState(1, "starting", None, 3, 1)]
    metrics.replica_states, metrics.num_resumed = lambda: states, lambda: 7
    found = samples(metrics)
    assert [found[f"octavo_replica_up{{replica={i}}}"] for i in range(2)] == [1, 0]
    assert [found[f"octavo_replica_restarts_total{{replica={i}}}"] for i in range(2)] == [2, 1]
    assert found["octavo_requests_resumed_total"] == 7


def test_totals_of_an_engine_core_that_was_started_again_are_added_to_those_before() -> None:
    metrics = Metrics("m")
    for total in (5, 8, 2, 3):
        metrics.on_state(msgspec.structs.replace(STEP, prefix_hit_tokens=total))
    assert samples(metrics)["octavo_prefix_cache_hit_tokens_total{replica=0}"] == 8 + 3
