"""Loggers of statistics, and names in views."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, ConfigError, SamplingParams, StepStats
from octavo.core.stats import (
    MAX_ADAPTER_NAMES,
    MAX_ID_LENGTH,
    MAX_REQUEST_IDS,
    NOBODY,
    AdapterSlot,
    BlockMap,
    BlockRun,
    Change,
    EngineView,
    GroupRow,
    SchedulerState,
)
from octavo.engine.core import StepLoop
from octavo.engine.front_end import name_adapters, name_requests

OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 32, "max_num_seqs": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


class Kept:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def log(self, stats: StepStats) -> None:
        self.steps.append(stats)


class Broken:
    def log(self, stats: StepStats) -> None:
        raise OSError("the disk is full")


def test_a_logger_gets_the_statistics_of_each_step(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    llm = LLM(str(tiny_model), stat_loggers=[Broken(), kept], **OPTIONS)
    llm.generate(["one", "two and a half"], PARAMS, use_tqdm=False)
    steps, total = kept.steps, llm.llm_engine.stats()
    assert [s.steps for s in steps] == list(range(1, total.steps + 1))
    assert sum(s.prefill_tokens for s in steps) == total.prefill_tokens > 0
    assert sum(s.decode_tokens for s in steps) == total.decode_tokens == 8
    assert all(s.seconds >= s.worker_seconds > 0 and s.num_blocks == 32 for s in steps)
    assert steps[0].num_running == 2 and steps[-1].num_running == 0
    with pytest.raises(AttributeError):
        steps[0].steps = 7  # type: ignore[misc]
    assert "stat logger Broken failed" in caplog.text and "the disk is full" in caplog.text


def test_the_status_line_is_written_offline_if_asked_for(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"):
        llm = LLM(str(tiny_model), log_stats_interval=1e-6, **OPTIONS)
        llm.generate("one", PARAMS, use_tqdm=False)
    lines = [m for m in caplog.messages if "prefix hits" in m]
    assert len(lines) == 5
    speed = r"[\d.]+ tokens/s"
    line = rf"1 running, 0 waiting; prompts {speed}, output {speed}; KV cache 3\.1% used; prefix hits 0\.0%"
    assert re.fullmatch(line, lines[0])


def test_without_loggers_nothing_is_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StepLoop) -> None:
        raise AssertionError("a step would be measured")

    monkeypatch.setattr(StepLoop, "measured_step", refuse)
    LLM(str(tiny_model), disable_log_stats=True, **OPTIONS).generate("one", PARAMS, use_tqdm=False)
    with pytest.raises(AssertionError, match="measured"):
        LLM(str(tiny_model), disable_log_stats=False, **OPTIONS).generate("one", PARAMS, use_tqdm=False)
    refused: list[dict[str, Any]] = [{"log_stats_interval": -1}, {"log_stats_interval": 5, "disable_log_stats": True}]
    for wrong in refused:
        with pytest.raises(ConfigError, match="log_stats_interval"):
            LLM(str(tiny_model), **wrong, **OPTIONS)


def test_the_documented_logger_of_json_lines_works(tiny_model: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = blocks[0].replace('"smollm2-135m"', f"{str(tiny_model)!r}, **OPTIONS").replace("steps.jsonl", "{}")
    exec(code.replace("{}", str(tmp_path / "steps.jsonl"), 1), {"OPTIONS": OPTIONS, "__name__": "page"})
    (first, *_) = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert first["steps"] == 1 and first["prefill_tokens"] > 0 and first["time"] > 0


def test_the_documented_logger_for_prometheus_works(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda port: None)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"StepStats": StepStats, "__name__": "page", "LLM": lambda *_, **options: options}
    exec(blocks[1].replace("from octavo import LLM, StepStats\n", ""), names)
    names["llm"]["stat_loggers"][0].log(StepStats(num_running=3, decode_tokens=2))
    assert prometheus_client.REGISTRY.get_sample_value("octavo_running") == 3
    assert prometheus_client.REGISTRY.get_sample_value("octavo_tokens_total", {"phase": "decode"}) == 2


# --- names in a view --------------------------------------------------------------------------------------------------


def row(group_id: int, preempted_for: int | None = None) -> GroupRow:
    return GroupRow(group_id, "running", 1, 4, 1, 4, 0, 0.1, 0, 0, 0, 0, preempted_for)


def view(rows: list[GroupRow], owners: list[int], changes: list[Change] | None = None) -> EngineView:
    runs = [BlockRun(1, 2, 1, owner, 0, 0) for owner in owners]
    blocks = BlockMap(0, False, 16, None, 0, len(runs), [0, 0, len(runs), 0, 0], runs)
    return EngineView(0, 1.0, 512, 64, SchedulerState(), [blocks], rows, [], changes or [], 0, 0)


def test_all_that_a_view_mentions_are_named() -> None:
    shown = view([row(1, preempted_for=2)], [3, NOBODY, 1], [Change("swap", 1, 4, preempted_for=5)])
    name_requests(shown, {i: f"chatcmpl-{i}" for i in range(1, 9)}.get)
    assert shown.request_ids == {i: f"chatcmpl-{i}" for i in (1, 2, 3, 4, 5)}


def test_one_that_has_ended_has_no_name() -> None:
    shown = view([row(1), row(2)], [])
    name_requests(shown, {2: "b"}.get)
    assert shown.request_ids == {2: "b"}


def test_names_are_bounded_in_number_and_length_and_the_queues_come_first() -> None:
    shown = view([row(10_000)], list(range(2 * MAX_REQUEST_IDS)))
    name_requests(shown, lambda group_id: "x" * 10_000)
    assert len(shown.request_ids) == MAX_REQUEST_IDS and next(iter(shown.request_ids)) == 10_000
    assert {len(name) for name in shown.request_ids.values()} == {MAX_ID_LENGTH}
    assert len(msgspec.json.encode(shown.request_ids)) < 100_000


def test_adapters_are_called_by_the_names_of_their_content_within_bounds() -> None:
    shown = view([], [])
    shown.adapters = [AdapterSlot(0, "a", 2), AdapterSlot(1, "b", 0), AdapterSlot(2, "c", 0)]
    name_adapters(shown, lambda key: {"a": ["sql", "tables"], "b": ["x" * 1000] * 50}.get(key, ()))
    assert [one.names for one in shown.adapters] == [
        ["sql", "tables"],
        ["x" * (MAX_ID_LENGTH - 1) + "…"] * MAX_ADAPTER_NAMES,
        [],
    ]


def test_names_are_kept_in_json() -> None:
    shown = view([row(1)], [1])
    shown.adapters = [AdapterSlot(3, "a", 2, ["sql"])]
    name_requests(shown, {1: "chatcmpl-1"}.get)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=EngineView) == shown
