"""Engines that find the blocks of engines before them, however many workers they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.stats import StoreStats
from octavo.executor.worker import Worker

PROMPTS = [bytes(range(40, 120)).decode(), bytes(range(40, 90)).decode() + "another end", "a short one"]
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 4, "engine_restarts": 0}


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[(c.token_ids, c.logprobs, c.error) for c in output.outputs] for output in outputs]


def stores_of(llm: LLM) -> StoreStats:
    stats = llm.llm_engine.core.scheduler.stats().stores
    assert stats is not None
    return stats


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"async_scheduling": True},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "int8", "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_continues_from_the_blocks_of_one_before_it(
    layout: dict[str, Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    options = {**OPTIONS, **layout}
    plain = LLM(str(tiny_model), **options)
    expected = answers(plain)
    plain.llm_engine.core.shutdown()
    for number in range(2):
        llm = LLM(str(tiny_model), **options, kv_disk=str(tmp_path / "kv"))
        assert answers(llm) == expected
        assert (stores_of(llm).fetched_tokens >= 4 * 20) is (number == 1)
        llm.llm_engine.core.shutdown()


def change_weights(worker: Worker) -> bool:
    """A function of an operator."""
    return True


def test_weights_that_somebody_may_have_changed_are_not_those_of_the_files(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    first, second = (LLM(str(tiny_model), **OPTIONS, kv_disk=str(tmp_path / "kv")) for _ in range(2))
    before = answers(first)
    first.llm_engine.core.shutdown()
    second.collective_rpc("measure_swap")
    assert second.collective_rpc(change_weights) == [True]
    assert "change_weights was called on the workers" in caplog.text
    assert answers(second) == before
    stats = stores_of(second)
    assert stats.fetches > 0
    assert (stats.fetched_tokens, sum(tier.written for tier in stats.tiers)) == (0, 0)
    second.llm_engine.core.shutdown()
