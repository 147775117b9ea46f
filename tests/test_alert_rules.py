"""The alert rules, tried by Prometheus' own tool: none fires for a server that is well, each for what it is for."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.core.stats import AdapterStats, GroupState, SchedulerState, SpeculationStats
from octavo.server.metrics import Metrics
from tests.busy_machine import PATIENCE

PROMETHEUS = Path(__file__).resolve().parent.parent / "deploy" / "prometheus"
#: Minutes of the tried history, one sample in each. The longest rule looks back half an hour, for an hour.
MINUTES = 100


def promtool(*arguments: str) -> None:
    """Runs Prometheus' tool, or skips the test."""
    if (program := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


#: What a server that is well shows: of each series a first value and what is added in each minute; others stay 0.
WELL = {
    "up": "1+0",
    "octavo_build_info": "1+0",
    "octavo_requests{running}": "4+0",
    "octavo_kv_cache_blocks{used}": "40+0",
    "octavo_kv_cache_blocks{cached}": "50+0",
    "octavo_kv_cache_blocks{free}": "10+0",
    "octavo_kv_cache_group_blocks{used}": "20+0",
    "octavo_kv_cache_group_blocks{free}": "5+0",
    "octavo_kv_cache_capacity_blocks": "100+0",
    "octavo_prefix_cache_queried_tokens_total": "0+900",
    "octavo_prefix_cache_hit_tokens_total": "0+300",
    "octavo_step_tokens_total": "0+1000",
    "octavo_generation_tokens_total": "0+500",
    "octavo_prompt_tokens_total": "0+500",
    "octavo_requests_finished_total{stop}": "0+50",
    "octavo_spec_decode_num_drafts_total": "0+20",
    "octavo_spec_decode_num_draft_tokens_total": "0+60",
    "octavo_spec_decode_num_accepted_tokens_total": "0+40",
    "octavo_http_responses_total{200}": "0+100",
    "octavo_step_worker_seconds_total": "0+40",
    "octavo_step_between_seconds_total": "0+2",
    "octavo_replica_up": "1+0",
    "octavo_http_open_requests": "9+0",
    "process_open_fds": "60+0",
    "process_max_fds": "1024+0",
    "process_start_time_seconds": "5+0",
}
#: Everything that was observed is in the smallest bucket: 10 a minute.
OBSERVED = "0+10"

#: Of each alert, what is different from a server that is well.
CASES: dict[str, dict[str, str]] = {
    "OctavoServerDown": {"up": "0+0"},
    "OctavoServerRestarts": {"process_start_time_seconds": "5+60"},
    "OctavoVersionsDiffer": {'octavo_build_info{version="0.0.0"}': "1+0"},
    "OctavoReplicaDown": {"octavo_replica_up": "0+0"},
    "OctavoEngineRestarts": {"octavo_replica_restarts_total": "0+0.1"},
    "OctavoRequestsResumed": {"octavo_requests_resumed_total": "0+5"},
    "OctavoServerErrors": {"octavo_http_responses_total{500}": "0+5"},
    "OctavoRequestErrors": {"octavo_requests_finished_total{error}": "0+1"},
    "OctavoRequestsIgnored": {"octavo_requests_finished_total{ignored}": "0+1"},
    "OctavoPoolingErrors": {"octavo_pooling_requests_finished_total{error}": "_x95 1+0x5"},
    "OctavoQueueFull": {"octavo_http_rejected_total": "0+5"},
    "OctavoRequestsWait": {"octavo_requests{waiting}": "5+0"},
    "OctavoQueueTime": {"octavo_request_queue_time_seconds_bucket<10": "0+0"},
    "OctavoSlowFirstToken": {"octavo_time_to_first_token_seconds_bucket<20": "0+0"},
    "OctavoSlowTokens": {"octavo_inter_token_latency_seconds_bucket<1": "0+0"},
    "OctavoSlowRequests": {"octavo_request_duration_seconds_bucket<300": "0+0"},
    "OctavoSlowPooling": {"octavo_pooling_request_duration_seconds_bucket<10": "0+0"},
    "OctavoLongSteps": {"octavo_step_duration_seconds_bucket<5": "0+0"},
    "OctavoTimeOutsideWorkers": {"octavo_step_between_seconds_total": "0+20"},
    "OctavoCacheFull": {"octavo_kv_cache_blocks{used}": "86+0", "octavo_kv_cache_blocks{pinned}": "14+0"},
    "OctavoCacheGroupFull": {"octavo_kv_cache_group_blocks{used}": "25+0", "octavo_kv_cache_group_blocks{free}": "0+0"},
    "OctavoPreemptions": {"octavo_preemptions_total{recompute}": "0+90"},
    "OctavoSwappedRequests": {"octavo_kv_cache_host_used_blocks": "3+0"},
    "OctavoPrefixMisses": {"octavo_prefix_cache_hit_tokens_total": "0+9"},
    "OctavoDraftsFail": {"octavo_spec_decode_num_failures_total": "0+1"},
    "OctavoDraftsRefused": {"octavo_spec_decode_num_accepted_tokens_total": "0+1"},
    "OctavoNoDrafts": {
        "octavo_spec_decode_num_drafts_total": "9+0",
        "octavo_spec_decode_num_draft_tokens_total": "9+0",
        "octavo_spec_decode_num_accepted_tokens_total": "9+0",
    },
    "OctavoAdaptersFail": {"octavo_adapter_failed_loads_total": "0+1"},
    "OctavoAdapterStalls": {"octavo_adapter_stall_seconds_total": "0+6"},
    "OctavoLongAdapterStall": {"octavo_adapter_longest_stall_seconds": "0x95 2+0x5"},
    "OctavoAdaptersReload": {"octavo_adapter_loads_total": "0+90"},
    "OctavoAdaptersThrash": {"octavo_adapter_evictions_total{slot}": "0+90"},
    "OctavoGrammarsWait": {"octavo_grammars_compiling": "12+0"},
    "OctavoGrammarsRefused": {"octavo_grammar_compilations_total{refused}": "0+3"},
    "OctavoGrammarTime": {"octavo_grammar_compile_seconds_total": "0+40"},
    "OctavoManyConnections": {"octavo_http_open_requests": "7000+0"},
    "OctavoOpenFiles": {"process_open_fds": "900+0"},
    "OctavoLogLost": {"octavo_log_lines_dropped_total": "0+1"},
    "OctavoNoOutput": {"octavo_step_tokens_total": "7+0"},
}


@dataclass(frozen=True)
class Series:
    """One that a server shows, or Prometheus of it."""

    name: str
    labels: dict[str, str]

    def values(self, changes: dict[str, str]) -> str:
        """Its history, in promtool's notation."""
        for wanted, given in [*changes.items(), *WELL.items()]:
            if self.matches(wanted):
                return given if "x" in given else f"{given}x{MINUTES}"
        return f"{OBSERVED}x{MINUTES}" if self.name.endswith(("_bucket", "_seconds_count")) else f"0+0x{MINUTES}"

    def matches(self, wanted: str) -> bool:
        """Whether ``name``, ``name{VALUE}`` of a label or ``name<BOUND``, of buckets below it, means this series."""
        if "<" in wanted:
            name, bound = wanted.split("<")
            return self.name == name and float(self.labels["le"]) < float(bound)
        name, _, value = wanted.rstrip("}").partition("{")
        return self.name == name and (not value or value in self.labels.values())

    def __str__(self) -> str:
        labels = {**self.labels, "instance": "octavo:8000", "job": "octavo"}
        return self.name + "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


@pytest.fixture(scope="module")
def served() -> list[Series]:
    """Those of a server that has done everything that begins a series."""
    metrics = Metrics("tiny")
    metrics.on_state(
        SchedulerState(
            groups=[GroupState(None, 1, 1, 1, 0, 1)], adapters=AdapterStats(), speculation=SpeculationStats()
        )
    )
    for reason in ("stop", "error"):
        metrics.pooled_finished("embed", reason)
    metrics.pooled_duration("embed")
    for code in (200, 429, 500):
        metrics.http_started()
        metrics.http_finished("/v1/completions", code)
    metrics._up("0")
    metrics._starts("0")
    text = metrics.render()[0].decode()
    shown = [
        Series(each.name, each.labels) for family in text_string_to_metric_families(text) for each in family.samples
    ]
    return [each for each in shown if not each.name.endswith("_created")] + [Series("up", {})]


def tried(alert: str, served: list[Series]) -> dict[str, Any]:
    """A test of promtool: after the whole history the alert fires, and no other; "": none does."""
    changes = CASES[alert] if alert else {}
    inputs = [{"series": str(each), "values": each.values(changes)} for each in served]
    for wanted, values in changes.items():  # a label of another value: a further series
        if '="' in wanted:
            name, label, value = wanted.replace('"}', "").replace('="', "{").split("{")
            series = Series(name, {"model_name": "tiny", label: value})
            inputs.append({"series": str(series), "values": f"{values}x{MINUTES}"})
    return {
        "interval": "1m",
        "name": alert or "well",
        "input_series": inputs,
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in [alert] if name],
            }
        ],
    }


def test_prometheus_reads_its_settings_and_the_rules() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_each_rule_has_a_case() -> None:
    groups = yaml.safe_load((PROMETHEUS / "octavo-rules.yml").read_text(encoding="utf-8"))["groups"]
    assert [rule["alert"] for group in groups for rule in group["rules"]] == [*CASES]


def test_each_case_names_series_that_a_server_shows(served: list[Series]) -> None:
    def wanted() -> Iterator[str]:
        yield from WELL
        for changes in CASES.values():
            yield from (each for each in changes if '="' not in each)

    assert [each for each in wanted() if not any(series.matches(each) for series in served)] == []


@pytest.mark.slow
def test_each_alert_fires_for_what_it_is_there_for_and_alone(tmp_path: Path, served: list[Series]) -> None:
    tests = [tried(alert, served) for alert in ("", *CASES)]
    shutil.copy(PROMETHEUS / "octavo-rules.yml", tmp_path)
    content = {"rule_files": ["octavo-rules.yml"], "evaluation_interval": "5m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(content))
    promtool("test", "rules", str(tmp_path / "tests.yml"))
